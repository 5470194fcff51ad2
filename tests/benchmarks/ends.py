"""Kills of workers: how long pushes take around them.

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

import daskps
from daskps import optim
from tests.benchmarks import clusters
from tests.benchmarks.command import benchmark, number
from tests.benchmarks.report import Verdict
from tests.benchmarks.samples import seconds

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator

    from distributed import Client

    from tests.benchmarks.report import Found

#: Shards, and workers: one owns nothing and can take over.
SHARDS, WORKERS = 2, 3
#: After a kill: until the nanny's new worker is there, at most.
PATIENCE_SECONDS = 60.0
#: Then, until the next one. A new worker loads the loops of its rules meanwhile.
BETWEEN_SECONDS = 2.0
#: Lost workers are expected.
QUIET: dict[str, Any] = {"silence_logs": logging.CRITICAL}


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


@benchmark("ends", "kills of workers under pushes", number("--kills", 50))
def ends(options: Namespace) -> Iterator[Found]:
    """Yield the longest pushes around kills, and whether each push was applied once."""
    longest, versions, pushes = kills(options.kills)
    last = ", ".join(f"{took:.3f}" for took in sorted(longest)[-5:])
    yield (
        f"{options.kills} kills under {pushes} pushes: longest push median "
        f"{statistics.median(longest):.3f} s, largest {last} s"
    )
    yield Verdict(f"each push is applied once: {versions}", {*versions} == {pushes})
