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
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import Client, LocalCluster

import daskps
from daskps import config, optim
from daskps.bench import command

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Shards, and workers: one owns nothing and can take over.
SHARDS, WORKERS = 2, 3
#: After a kill: until the nanny's new worker is there, at most.
PATIENCE_SECONDS = 60.0
#: Then, until the next one. A new worker loads the loops of its rules meanwhile.
BETWEEN_SECONDS = 2.0


@dataclass
class Pusher:
    """Pushes without a pause and keeps how long each push took."""

    store: daskps.ParameterStore
    ended: threading.Event = field(default_factory=threading.Event)
    seconds: list[tuple[float, float]] = field(default_factory=list)

    def run(self) -> None:
        """Push until `ended`."""
        grads = {"w": np.ones(1000, "f4")}
        while not self.ended.is_set():
            began = time.perf_counter()
            self.store.push(grads)
            self.seconds.append((began, time.perf_counter() - began))

    def longest(self, since: float) -> float:
        """Return the seconds of the longest push that ended after a moment."""
        return max(took for began, took in self.seconds if began + took >= since)


def _cluster(workers: int) -> LocalCluster:
    return LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
        memory_limit=0,
        silence_logs=logging.CRITICAL,
    )


def _wait(what: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not what():
        if time.monotonic() > until:
            raise SystemExit("no new worker came after a kill")
        time.sleep(0.01)


def kills(n: int) -> tuple[list[float], list[int], int]:
    """Kill owners under pushes.

    Parameters
    ----------
    n : int
        How many, one after the other.

    Returns
    -------
    longest, versions, pushes
        Seconds of the longest push around each kill; the shards' versions, and how many
        pushes were acknowledged: all the same if none was lost or doubled.
    """
    longest = []
    with (
        config.restarts(),
        _cluster(WORKERS) as cluster,
        Client(cluster) as client,
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
    """Use a cluster of four workers; return the seconds that closing it takes.

    Parameters
    ----------
    what : str
        ``"plain"``, ``"store"``, ``"run"`` or ``"graph"``.

    Returns
    -------
    float
        Of `LocalCluster.close`.
    """
    cluster = _cluster(4)
    with Client(cluster) as client:
        client.submit(sum, [1, 2]).result()
        if what != "plain":
            store = daskps.create(
                {"w": np.zeros(1000, "f4")}, optimizer=optim.SGD(0.1), name="ends"
            )
            if what == "store":
                store.push({"w": np.ones(1000, "f4")})
            else:
                way = "resident" if what == "run" else "graph"
                daskps.train(
                    store, _ones, np.zeros((512, 1)), execution=way, callbacks=()
                )
    began = time.perf_counter()
    cluster.close()
    return time.perf_counter() - began


def _closings(n: int) -> dict[str, list[float]]:
    found = {what: list[float]() for what in ("plain", "store", "run", "graph")}
    for _ in range(n):
        for what, seconds in found.items():
            seconds.append(closing(what))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print.

    Parameters
    ----------
    argv : sequence of str, optional
        Command line without the program's name.

    Returns
    -------
    int
        Exit status: 1 if a push was lost or applied twice.
    """
    parser = command.plain("ends")
    add, count = parser.add_argument, command.count
    add("--kills", type=count, default=50, help="[%(default)s]")
    add("--closings", type=count, default=7, help="of each kind [%(default)s]")
    options = parser.parse_args(argv)
    longest, versions, pushes = kills(options.kills)
    ordered = sorted(longest)
    print(
        f"{options.kills} kills under {pushes} pushes: longest push median "
        f"{statistics.median(ordered):.3f} s, largest "
        f"{', '.join(f'{took:.3f}' for took in ordered[-5:])} s; versions {versions}",
        flush=True,
    )
    for what, seconds in _closings(options.closings).items():
        median = statistics.median(seconds)
        print(
            f"closing 4 workers, {what}: median {median:.2f} s "
            f"({min(seconds):.2f} to {max(seconds):.2f})"
        )
    return 0 if set(versions) == {pushes} else 1
