"""What the scheduler is left with after many pushes, rounds and tasks: nothing.

``python -m tests.cluster.long_run N`` pushes N times, trains N rounds by resident trainers
and N / 50 in the task graph, has N / 50 tasks push, and says what has grown meanwhile.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]  # without type hints

import daskps
from daskps import optim
from daskps.shards.memory.format import N_PRODUCERS
from tests.support import local_cluster, until

WIDTH = 1000


def of_scheduler(dask_scheduler: Any) -> dict[str, int]:
    """Return what the scheduler and the directory keep."""
    book = dask_scheduler.extensions["daskps-directory"]
    return {
        "tasks": len(dask_scheduler.tasks),
        # Dask keeps the last ones alone: those of earlier runs would go for these.
        "events": dask_scheduler._broker._topics["daskps"].count,
        "runs": len(book.runs.open),
        "producers of tasks": len(book.producers._tasks),
        "producers": len(book.producers._owners),
    }


def of_worker(dask_worker: Any) -> dict[str, int]:
    """Return what a worker keeps for others, and how large its shards are."""
    # Pickled by value where this module is the program: with a copy of what it names.
    from daskps.cluster.host.node import HOSTS

    host = HOSTS[dask_worker.address]
    shards = host.shards.values()
    copies = [coming.hosted for coming in host.coming.values()]
    return {
        "bytes of copies": sum(of.shard.segment.buffer.nbytes for of in copies),
        "bytes of shards": sum(hosted.shard.segment.buffer.nbytes for hosted in shards),
        "tasks of workers": len(dask_worker.state.tasks),
        "parked": sum(len(hosted.shard.waiting) for hosted in shards),
        "most producers": max(
            int(hosted.shard.segment.current.fixed[N_PRODUCERS]) for hosted in shards
        ),
    }


def kept(client: Any) -> dict[str, int]:
    """Return what all of them keep."""
    found = dict(client.run_on_scheduler(of_scheduler))
    rows = list(client.run(of_worker).values())
    return found | {
        what: (max if "most" in what else sum)(row[what] for row in rows)
        for what in rows[0]
    }


def ones(params: Any, X: Any, y: Any) -> Any:
    return {"w": np.ones(WIDTH)}


def push_once(handle: Any, i: int) -> int:
    return int(handle.push({"w": np.ones(WIDTH)}))


def train(store: Any, rounds: int, execution: Any) -> None:
    X = np.zeros((2 * rounds, 1))
    how: dict[str, Any] = {"batch_size": 1, "trainers": 2, "callbacks": ()}
    daskps.train(store, ones, X, execution=execution, **how)


def push_and_train(store: Any, n: int) -> None:
    """Push and train as often, without a task of Dask's for each."""
    for _ in range(n):
        store.push({"w": np.ones(WIDTH)})
    train(store, n, "resident")


def work(client: Any, store: Any, n: int) -> int:
    """Do all of that; return how many updates it comes to."""
    push_and_train(store, n)
    few = max(n // 50, 1)
    train(store, few, "graph")
    client.gather(client.map(push_once, [store] * few, range(few)))
    return 2 * n + 2 * few


def growth(client: Any, store: Any, n: int) -> dict[str, int]:
    """Return what has grown by all of that, once what is on its way has come."""
    # Tasks of ours that are over may be on their way out.
    until(lambda: not kept(client)["producers of tasks"])
    before, version = kept(client), store.version
    n_updates = work(client, store, n)
    found = store.pull()["w"], store.version - version
    if found[1] != n_updates or (found[0] != -float(store.version)).any():
        raise AssertionError(f"{found[1]} updates instead of {n_updates}")

    def settled() -> bool:
        now = kept(client)
        return now["tasks"] <= before["tasks"] and not now["producers of tasks"]

    until(settled)
    after = kept(client)
    return {what: after[what] - before[what] for what in before}


def memory() -> int:
    """Return the bytes of this process, which has the scheduler and the client."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def main(n: int) -> None:
    with local_cluster(n_workers=2, threads=2) as client:
        params = {"w": np.zeros(WIDTH)}
        with daskps.create(params, optimizer=optim.SGD(1.0), client=client) as store:
            # What is loaded and compiled once.
            work(client, store, 100)
            said: dict[str, Any] = dict(growth(client, store, n))
            before = memory()
            push_and_train(store, n)
            # Not by tasks: of these Dask keeps a log, up to a bound of its own.
            said["MiB by pushes and resident rounds"] = (memory() - before) / 2**20
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
