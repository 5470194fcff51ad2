"""What the ends of workers cost: kills under pushes, and closing a cluster.

A client pushes one push after the other while owners of shards are killed; each kill is
told by the longest push around it. At the end every shard must have applied each push
once.
"""

from __future__ import annotations

import logging
import os
import signal
import statistics
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import Client

import daskps
from daskps import optim
from tests.benchmarks import clusters
from tests.benchmarks.options import number
from tests.benchmarks.pairs import seconds

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

#: Shards, and workers: one owns nothing and can take over.
SHARDS, WORKERS = 2, 3
#: After a kill: until the nanny's new worker is there, at most.
PATIENCE_SECONDS = 60.0
#: Then, until the next one. A new worker loads the loops of its rules meanwhile.
BETWEEN_SECONDS = 2.0
#: Lost workers are expected.
QUIET: dict[str, Any] = {"silence_logs": logging.CRITICAL}
#: How runs are trained, by what closing a cluster is told of.
EXECUTION = {"run": "resident", "graph": "graph"}


@dataclass
class Pusher:
    """Pushes without a pause and keeps how long each push took."""

    store: daskps.ParameterStore
    ended: threading.Event = field(default_factory=threading.Event)
    seconds: list[tuple[float, float]] = field(default_factory=list)

    def run(self) -> None:
        """Push until `ended`."""
        push = partial(self.store.push, {"w": np.ones(1000, "f4")})
        while not self.ended.is_set():
            self.seconds.append((time.perf_counter(), seconds(push)))

    def longest(self, since: float) -> float:
        """Return the seconds of the longest push that ended after a moment."""
        return max(took for began, took in self.seconds if began + took >= since)


def _wait(what: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not what():
        if time.monotonic() > until:
            raise SystemExit("no new worker came after a kill")
        time.sleep(0.01)


def kills(n: int) -> tuple[list[float], list[int], int]:
    """Kill owners under pushes, so many one after the other.

    Returns the seconds of the longest push around each kill; the shards' versions, and
    how many pushes were acknowledged: all the same if none was lost or doubled.
    """
    longest = []
    with (
        # Else Dask gives a worker up that is lost twice within 15 s.
        clusters.configured({"distributed.deploy.lost-worker-timeout": "1 hour"}),
        clusters.local(WORKERS, **QUIET) as client,
        daskps.create(
            {"w": np.zeros(1000, "f4")},
            name="ends",
            optimizer=optim.Adam(),
            shards=SHARDS,
            servers=list(client.nthreads())[:SHARDS],
        ) as store,
    ):
        pusher = Pusher(store)
        thread = threading.Thread(target=pusher.run)
        thread.start()
        try:
            for i in range(n):
                time.sleep(BETWEEN_SECONDS)
                longest.append(_kill(client, store, pusher, i))
        finally:
            pusher.ended.set()
            thread.join()
        versions = [shard["version"] for shard in store.stats()["shards"]]
        store.delete()
    return longest, versions, len(pusher.seconds)


def _kill(
    client: Client, store: daskps.ParameterStore, pusher: Pusher, i: int
) -> float:
    """Kill an owner; return the longest push until a new worker is there."""
    victim = store.stats()["shards"][i % SHARDS]["worker"]
    pid = client.run(os.getpid, workers=[victim])[victim]
    before, killed = set(client.nthreads()), time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    _wait(lambda: len(set(client.nthreads()) - before) > 0)
    pushed = len(pusher.seconds)
    _wait(lambda: len(pusher.seconds) > pushed)
    return pusher.longest(killed)


def _ones(params: Any, X: Any, y: Any) -> dict[str, Any]:
    return {name: np.ones_like(value) for name, value in params.items()}


def closing(what: str) -> float:
    """Use a cluster of four workers; return the seconds that `LocalCluster.close` takes."""
    cluster = clusters.started(4, **QUIET)
    with Client(cluster) as client:
        client.submit(sum, [1, 2]).result()
        if what != "plain":
            start, sgd = {"w": np.zeros(1000, "f4")}, optim.SGD(0.1)
            store = daskps.create(start, optimizer=sgd, name="ends")
            if how := EXECUTION.get(what):
                data = np.zeros((512, 1))
                daskps.train(store, _ones, data, execution=how, callbacks=())
            else:
                store.push({"w": np.ones(1000, "f4")})
    return seconds(cluster.close)


OPTIONS = (number("--kills", 50), number("--closings", 7, "of each kind"))


def run(options: Namespace) -> int:
    """Measure and print; return 1 if a push was lost or applied twice."""
    longest, versions, pushes = kills(options.kills)
    ordered = sorted(longest)
    print(
        f"{options.kills} kills under {pushes} pushes: longest push median "
        f"{statistics.median(ordered):.3f} s, largest "
        f"{', '.join(f'{took:.3f}' for took in ordered[-5:])} s; versions {versions}",
        flush=True,
    )
    closings = {what: list[float]() for what in ("plain", "store", *EXECUTION)}
    for _ in range(options.closings):
        for what, took in closings.items():
            took.append(closing(what))
    for what, took in closings.items():
        print(
            f"closing 4 workers, {what}: median {statistics.median(took):.2f} s "
            f"({min(took):.2f} to {max(took):.2f})"
        )
    return 0 if set(versions) == {pushes} else 1
