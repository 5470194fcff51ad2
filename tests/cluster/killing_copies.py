"""Owners and second copies that are killed at random moments, under pushes and reads.

``python -m tests.cluster.killing_copies N SEED`` kills N workers, one after the other:
half of them own a shard of a store with two copies, half have a copy. Their memory is
private, so each takes all that it held with it, as a machine does.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import dask
import numpy as np

import daskps
from tests.cluster import killing_owners
from tests.support import local_cluster, until

N_WORKERS = 4


def copies_of(client: Any, store: Any) -> dict[int, str]:
    """Return the worker of each second copy that can take over."""

    def found(dask_scheduler: Any) -> dict[int, str]:
        entry = dask_scheduler.extensions["daskps-directory"].stores[store.uid]
        return {i: copy.worker for i, copy in entry.copies.items() if copy.counts}

    copies: dict[int, str] = client.run_on_scheduler(found)
    return copies


def has_all(client: Any, store: Any) -> bool:
    """Return whether each shard has a second copy that can take over."""
    return len(copies_of(client, store)) == len(store.placement)


def kill(client: Any, worker: str) -> None:
    """Kill a worker, and return once the scheduler knows."""
    [pid] = client.run(os.getpid, workers=[worker]).values()
    os.kill(pid, signal.SIGKILL)
    until(lambda: worker not in client.nthreads())


def kill_owner(client: Any, store: Any) -> None:
    """Kill the owner of the first shard once all shards have two copies."""
    until(partial(has_all, client, store))
    kill(client, store.placement[0])
    store.pull()


def kill_copy(client: Any, store: Any) -> None:
    """Kill the worker with the second copy of the first shard."""
    until(partial(has_all, client, store))
    kill(client, copies_of(client, store)[0])


def store_on(client: Any) -> daskps.ParameterStore:
    """Make a store with two copies for `killing_owners.disturb`."""
    n, servers = killing_owners.N_SHARDS, list(client.nthreads())[:2]
    params = {"w": np.zeros((n, 2, killing_owners.HALF))}
    return daskps.create(params, copies=2, servers=servers, shards=n, client=client)


def main(n: int, seed: int) -> None:
    rng = random.Random(seed)
    acts: list[Callable[[Any, Any], None]] = [kill_owner, kill_copy] * (n // 2)
    rng.shuffle(acts)
    way = {"daskps.carriers.machine": False}
    with dask.config.set(way), local_cluster(N_WORKERS, 1) as client:

        def next_one(act: Callable[[Any, Any], None]) -> None:
            # One that was killed is followed by another.
            until(lambda: len(client.nthreads()) == N_WORKERS)
            act(client, store)

        with store_on(client) as store:
            found = killing_owners.disturb(store, [partial(next_one, a) for a in acts])
    said = {"pushes": found.n_pushes, "reads": found.n_reads, "wrong": found.wrong}
    for act in (kill_owner, kill_copy):
        waits = [w for w, of in zip(found.waits, acts, strict=True) if of is act]
        said[act.__name__] = {"median wait": np.median(waits), "longest": max(waits)}
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
