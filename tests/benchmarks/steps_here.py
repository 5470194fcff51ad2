"""Steps of the daskps that is imported here, timed on request: one side of `tree`.

It is run as a script, in a checkout of its own, so it uses public names alone. Each
line of standard input names a job; the answer is the seconds of one step and the ways
to the shards that it took, where one step says so.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from distributed import Client, LocalCluster

import daskps
from daskps import optim

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: Elements of 1 KiB in each of two shards, of 256 KiB in one, and so on.
SMALL, MEDIUM, LARGE, HUGE = (512, 2), (2**16, 1), (250_000, 2), (2**22, 1)
#: Rows that a step reads or pushes, and how long they are.
ROWS, DIM, N_ROWS = 64, 16, 100_000
#: Calls of one sample, and for how long calls are made before that: a nearer way to a
#: shard opens meanwhile.
CALLS, WARM_SECONDS = 1000, 1.2
#: How the ways to shards were called, and are.
NAMES = {"lane": "socket", "rpc": "message"}

#: Seconds of one step, and the ways that it took.
Found: TypeAlias = "tuple[float, list[str]]"


def _quartile(call: Callable[[], object], n: int) -> float:
    """Return the seconds that a quarter of the calls stay below."""
    found = []
    for _ in range(n):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return statistics.quantiles(found, n=4)[0]


def _carriers(store: daskps.ParameterStore) -> list[str]:
    handle = store.stats()["handle"]
    carriers = {*(handle.get("carriers") or handle["ways"]).values()}
    return sorted(NAMES.get(way, way) for way in carriers)


def _warm(calls: Mapping[str, Callable[[], object]], seconds: float) -> None:
    end = time.perf_counter() + seconds
    while True:
        for call in calls.values():
            call()
        if time.perf_counter() > end:
            return


def _steps(trainer: daskps.Trainer, part: tuple[Any, str, int, float]) -> Found:
    """Time one verb of a trainer; a step of BSP needs both, so both are done."""
    store, verb, n, warm = part
    out = trainer.pull(("w",))
    grads = {name: np.full(a.shape, 1e-3, a.dtype) for name, a in out.items()}
    calls: dict[str, Callable[[], object]] = {
        "push": lambda: trainer.push(grads),
        "pull": lambda: trainer.pull(("w",), out=out),
        "pushpull": lambda: trainer.pushpull(grads, out=out),
    }
    if "emb" in store.names:
        ids = np.arange(ROWS) * 997 % N_ROWS
        rows = {"emb": daskps.RowGrad(ids, np.full((ROWS, DIM), 1e-3, "f4"))}
        calls = {
            "push": lambda: trainer.push(rows),
            "pull": lambda: trainer.pull((), rows={"emb": ids}),
        }
    _warm(calls, warm)
    return _quartile(calls[verb], n), _carriers(store)


def _run(
    store: daskps.ParameterStore, verb: str, sync: str, trainers: int, calls: int = 0
) -> Found:
    parts = [(store, verb, calls or CALLS, WARM_SECONDS)] * trainers
    found: list[Found] = daskps.run(store, _steps, parts, sync=sync)
    return max(seconds for seconds, _ in found), found[0][1]


def _handle(store: daskps.ParameterStore, verb: str, n: int) -> Found:
    calls: dict[str, Callable[[], object]] = {}
    if "emb" in store.names:
        ids, table = np.arange(ROWS) * 997 % N_ROWS, store["emb"]
        values = np.full((ROWS, DIM), 1e-3, "f4")
        read = np.empty((ROWS, DIM), "f4")
        calls["push"] = lambda: table.push(ids, values)
        calls["pull"] = lambda: table.pull(ids, out=read)
    else:
        out = store.pull()
        grads = {name: np.full(a.shape, 1e-3, a.dtype) for name, a in out.items()}
        calls["push"] = lambda: store.push(grads)
        calls["pull"] = lambda: store.pull(out=out)
    _warm(calls, WARM_SECONDS)
    return _quartile(calls[verb], n), _carriers(store)


def _slope(params: Any, X: Any, y: Any) -> Any:
    z = 1 / (1 + np.exp(-(X @ params["w"])))
    return {"w": (X.T @ (z - y) / len(X)).astype("f4")}


def _train(store: daskps.ParameterStore) -> Found:
    rng = np.random.default_rng(0)
    n = 6 * CALLS
    X, y = rng.normal(size=(n, 512)).astype("f4"), np.ones(n, "f4")
    began = time.perf_counter()
    daskps.train(store, _slope, X, y, trainers=2, batch_size=32, callbacks=())
    return (time.perf_counter() - began) / (n / 64), []


def _half(params: Any, X: Any, y: Any) -> Any:
    return {"w": params["w"] * np.float32(0.5)}


def _graph(store: daskps.ParameterStore) -> Found:
    rounds = CALLS // 32
    options: dict[str, Any] = {"batch_size": 1, "execution": "graph", "callbacks": ()}
    began = time.perf_counter()
    daskps.train(store, _half, np.zeros((8 * rounds, 1)), trainers=8, **options)
    return (time.perf_counter() - began) / rounds, []


def _saved(store: daskps.ParameterStore) -> Found:
    with TemporaryDirectory() as folder:
        began = time.perf_counter()
        store.save(Path(folder).as_uri())
        return time.perf_counter() - began, []


def _restored(store: daskps.ParameterStore) -> Found:
    with TemporaryDirectory() as folder:
        url = Path(folder).as_uri()
        store.save(url)
        began = time.perf_counter()
        with daskps.restore(url):
            return time.perf_counter() - began, []


def jobs(client: Client, stack: ExitStack) -> dict[str, Callable[[], Found]]:
    """Return what can be timed by name; the stack frees the stores."""
    first = list(client.nthreads())[:1]

    def store(
        params: Mapping[str, Any], shards: int, servers: Any = "auto"
    ) -> daskps.ParameterStore:
        made: daskps.ParameterStore = daskps.create(
            params, optimizer=optim.SGD(1e-3), shards=shards, servers=servers
        )
        stack.callback(made.close)
        return made

    def arrays(size: tuple[int, int], servers: Any = "auto") -> daskps.ParameterStore:
        return store({"w": np.ones(size[0], "f4")}, size[1], servers)

    def table(rows: int | None) -> daskps.ParameterStore:
        params = {"w": np.ones(512, "f4"), "emb": daskps.TableSpec(rows, DIM)}
        return store(params, 1, first)

    near, medium, huge = arrays(SMALL, first), arrays(MEDIUM, first), arrays(HUGE)
    both, large = arrays(SMALL), arrays(LARGE)
    of_rows = {"rows": table(N_ROWS), "rows, unbounded": table(None)}
    found: dict[str, Callable[[], Found]] = {}
    for verb in ("push", "pull"):
        for size, held in ("1 KiB x 2", near), ("256 KiB", medium):
            for sync in ("bsp", "asp"):
                name = f"trainer, {verb}, {size}, {sync.upper()}"
                found[name] = partial(_run, held, verb, sync, 1)
        found[f"trainer, {verb}, 16 MB, ASP"] = partial(
            _run, huge, verb, "asp", 1, CALLS // 20
        )
        found[f"handle, {verb}, 1 KiB x 2"] = partial(_handle, near, verb, CALLS)
        for name, held in of_rows.items():
            found[f"trainer, {verb}, {name}, ASP"] = partial(_run, held, verb, "asp", 1)
            found[f"handle, {verb}, {name}"] = partial(_handle, held, verb, CALLS)
    return found | {
        "rounds of two trainers, 1 KiB x 2": partial(_run, both, "pushpull", "bsp", 2),
        "rounds of two trainers, 1 MB": partial(_run, large, "pushpull", "bsp", 2),
        "train, two trainers": partial(_train, both),
        "graph, 8 parts, 1 MB": partial(_graph, large),
        "checkpoint, saved, 16 MB": partial(_saved, huge),
        "checkpoint, restored, 16 MB": partial(_restored, huge),
    }


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anything prints is no answer
    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=4,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            memory_limit=0,
        ) as cluster,
        Client(cluster) as client,
        ExitStack() as stack,
    ):
        known = jobs(client, stack)
        print("\t".join(known), file=answers, flush=True)
        for line in sys.stdin:
            seconds, carriers = known[line.rstrip("\n")]()
            print(seconds, *carriers, sep="\t", file=answers, flush=True)


if __name__ == "__main__":
    main()
