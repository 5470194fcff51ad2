"""Workers that join a cluster under pushes and reads, and take their share of shards.

``python -m tests.cluster.joining N`` starts N clusters of two workers without shared
memory, one after the other, each with a store of four shards and two copies. A third
worker joins and gets a shard. It says how long pushes waited, and what was wrong.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any
from unittest import mock

import dask
import numpy as np

import daskps
from daskps.cluster.directory import rebalance
from tests.cluster import killing_owners
from tests.support import local_cluster, until


def n_hosts() -> int:
    # Pickled by value where this module is the program: with a copy of what it names.
    from daskps.cluster.host.node import HOSTS

    return len(HOSTS)


def has_host(client: Any, worker: str) -> bool:
    (found,) = client.run(n_hosts, workers=[worker]).values()
    return bool(found)


def has_some(store: Any, worker: str) -> bool:
    """Tell whether a worker has a shard, when a handle has heard of it."""
    store.pull()
    return worker in store.placement


def grow(client: Any, store: Any) -> None:
    """Have a third worker come; it takes one shard of the four."""
    before = {*store.placement}
    client.cluster.scale(3)
    client.wait_for_workers(3)
    (joined,) = {*client.nthreads()} - before
    until(partial(has_host, client, joined))
    # Its half a minute is over.
    scheduler = client.cluster.scheduler
    came = scheduler.extensions["daskps-directory"].rebalance.worker_came
    with mock.patch.object(rebalance, "_STAY_SECONDS", 0.0):
        scheduler.loop.add_callback(came, joined)
        until(partial(has_some, store, joined))


def store_on(client: Any, copies: int) -> daskps.ParameterStore:
    """Make a store of four shards on all workers for `killing_owners.disturb`."""
    n = killing_owners.N_SHARDS
    params = {"w": np.zeros((n, 2, killing_owners.HALF))}
    return daskps.create(params, shards=n, copies=copies, client=client)


def main(n: int) -> None:
    found = []
    for _ in range(n):
        with (
            dask.config.set(
                {"daskps.carriers.machine": False, "daskps.rebalance": True}
            ),
            local_cluster(n_workers=2, threads=1) as client,
            store_on(client, copies=2) as store,
        ):
            found.append(killing_owners.disturb(store, [partial(grow, client, store)]))
    about: dict[str, Any] = {
        "pushes": sum(one.n_pushes for one in found),
        "reads": sum(one.n_reads for one in found),
        "wrong": [text for one in found for text in one.wrong],
    }
    waits = [wait for one in found for wait in one.waits]
    about |= killing_owners.by_kind(["joined"] * len(waits), waits)
    sys.stdout.write(json.dumps(about) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
