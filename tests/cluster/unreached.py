"""What a client that loses its way to the workers hears of each call; a program.

``python -m tests.cluster.unreached ADDRESS`` connects to a scheduler, makes a store,
and says "open". A line on its input, and the workers are out of its reach; it prints
what each call came to, and after another line those of a client that has never reached
them.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import Client

import daskps
from daskps import optim
from daskps.cluster.caller import liveness

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

N = 3000
ONES = {"w": np.ones(N, "f4")}


def loop(trainer: Any, part: int) -> int:
    trainer.push(ONES)
    return int(trainer.clock)


def gradient(params: Any, X: Any, y: Any) -> Any:
    return 0.0, ONES


def train(store: Any, execution: str) -> Any:
    X = np.zeros((8, 2))
    return daskps.train(store, gradient, X, X[:, 0], execution=execution)


def calls(client: Client, name: str) -> dict[str, Callable[[], Any]]:
    store = daskps.open(name, client=client)
    w, bounded, unbounded = store["w"], store["bounded"], store["any"]
    one = np.ones((1, 4), "f4")
    return {
        "create": lambda: daskps.create({"w": np.zeros(3)}, client=client),
        "pull": store.pull,
        "pull of a version": lambda: store.pull(min_version=99),
        "push": lambda: store.push(ONES),
        "add": lambda: store.add(ONES),
        "assign": lambda: store.assign(ONES),
        "pushpull": lambda: store.pushpull(ONES),
        "push_async": lambda: store.push_async(ONES).result(),
        "pull_async": lambda: store.pull_async().result(),
        "large push": lambda: store["large"].add(np.ones(10**6, "f4")),
        "version": lambda: store.version,
        "stats": store.stats,
        "sum": w.sum,
        "asarray": lambda: np.asarray(w),
        "slice": lambda: w[3:5],
        "region": lambda: w.region(1, 2000).pull(),
        "rows": lambda: bounded.pull([1, 99]),
        "push of rows": lambda: unbounded.push([1], one),
        "n_rows": lambda: unbounded.n_rows,
        "remove": lambda: unbounded.remove([1]),
        "contains": lambda: unbounded.contains([1]),
        "scale_lr": lambda: store.scale_lr(0.5),
        "apply": lambda: store.apply(lambda block, name: -block, "w"),
        "aggregate": lambda: store.aggregate([ONES, ONES]),
        "save": lambda: store.save("memory://unreached"),
        "train": lambda: train(store, "resident"),
        "train in the graph": lambda: train(store, "graph"),
    }


def by_scheduler(client: Client, name: str) -> dict[str, Any]:
    """Return what needs the scheduler alone."""
    store = daskps.open(name, client=client)
    return {
        "snapshot": float(store.snapshot()["w"].sum().compute()),
        "run": daskps.run(store, loop, [1, 2]),
        "after": float(store["w"].to_dask_array().sum().compute()),
        "list": [info.name for info in daskps.list_stores(client=client)],
        "repr": "ParameterStore" in repr(store) and bool(store._repr_html_()),
    }


def heard(made: Mapping[str, Callable[[], Any]]) -> dict[str, str]:
    found = {}
    for what, call in made.items():
        try:
            found[what] = f"returned {call()!r:.99}"
        except daskps.WorkerUnreachableError as error:
            is_said = f"worker {error.worker} cannot be reached from this" in str(error)
            found[what] = error.worker.rpartition(":")[0] if is_said else str(error)
        except Exception as error:  # noqa: BLE001 - the test compares it
            found[what] = repr(error)
    return found


def say(what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    with Client(sys.argv[1], timeout="20s") as client:
        client.wait_for_workers(2, timeout=20)
        params = {
            "w": np.zeros(N, "f4"),
            "large": np.zeros(10**6, "f4"),
            "bounded": daskps.TableSpec(100, 4),
            "any": daskps.TableSpec(None, 4),
        }
        daskps.create(params, name="model", optimizer=optim.SGD(0.5), client=client)
        made = calls(client, "model")
        for what in ("push", "pull", "version", "large push", "push of rows") * 9:
            made[what]()
        say("open")
        sys.stdin.readline()
        # That it is so nobody doubts here: shorter than for users.
        liveness.FIRST_SECONDS = liveness.AGAIN_SECONDS = 0.5
        say([heard(made), by_scheduler(client, "model")])
        sys.stdin.readline()
        with Client(sys.argv[1], timeout="20s") as other:
            made = calls(other, "model")
            only = {what: made[what] for what in ("sum", "create", "push")}
            say([heard(only), by_scheduler(other, "model")])
