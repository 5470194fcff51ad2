"""Owners of shards that die, hang or leave at random moments, under pushes and reads.

``python -m tests.cluster.killing_owners N SEED`` disturbs N owners, one after the
other, and says for each kind how long calls waited, and whether anything was lost,
counted twice, torn or taken back. Each push adds one to an element of both halves of
every shard.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import dask
import numpy as np

import daskps
from tests.seams import shards_of
from tests.support import CARRIERS, local_cluster, until

N_SHARDS, N_PUSHERS = 4, 2
#: Elements of one pusher in half a shard; its pushes go round them.
N_ELEMENTS = 32
HALF = N_PUSHERS * N_ELEMENTS
FAULTS = ("killed", "stopped", "retired", "terminated")


def remote(store: Any, way: str = "rpc") -> Any:
    """Return a handle that reaches the shards by message, or in another way."""
    found = pickle.loads(pickle.dumps(store))
    with dask.config.set(CARRIERS[way]):
        shards_of(found)
    return found


class User(threading.Thread):
    """Uses a store until it is told that all is over."""

    def __init__(self, handle: Any) -> None:
        super().__init__()
        self.handle, self.is_over = handle, threading.Event()
        #: How often it has used the store, and when each time ended.
        self.n_done, self.times = 0, list[float]()
        self.wrong: list[str] = []

    def run(self) -> None:
        try:
            while not self.is_over.is_set():
                self.use()
                self.times.append(time.monotonic())
                self.n_done += 1
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not be
            self.wrong.append(f"{type(self).__name__}: {error!r:.300}")

    def use(self) -> None:
        raise NotImplementedError

    def longest_wait(self, since: float) -> float:
        """Return the longest of its uses that ended after a moment, in seconds."""
        before = [t for t in self.times if t <= since]
        waits = np.diff([*before[-1:], *self.times[len(before) :]])
        return round(float(max(waits, default=0.0)), 3)


class Pusher(User):
    """Pushes one element after the other."""

    def __init__(self, handle: Any, number: int) -> None:
        super().__init__(handle)
        self._first = number * N_ELEMENTS

    def use(self) -> None:
        values = np.zeros(self.handle["w"].shape)
        values[:, :, self._first + self.n_done % N_ELEMENTS] = 1.0
        self.handle.add({"w": values})

    def counts(self) -> Any:
        """Return how often each of its elements was acknowledged."""
        turns, rest = divmod(self.n_done, N_ELEMENTS)
        return turns + (np.arange(N_ELEMENTS) < rest)


class Reader(User):
    """Reads weights and versions, and says what should never be read."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        self.seen: Any = 0.0
        self.versions: Any = 0

    def use(self) -> None:
        values = self.handle["w"].pull()
        if (values[:, 0] != values[:, 1]).any():
            self.wrong.append("a shard has a part of a push")
        if (values < self.seen).any():
            self.wrong.append("a push that was read is gone")
        versions = np.array(self.handle.versions)
        # Where the store was resharded there are more of them, or fewer.
        if len(versions) == np.size(self.versions) and (versions < self.versions).any():
            self.wrong.append(f"versions {self.versions} became {versions}")
        self.seen, self.versions = values, versions


@dataclass(frozen=True)
class Found:
    """What came of disturbing a store."""

    n_pushes: int
    n_reads: int
    #: Of each disturbance, the longest wait of any push for its acknowledgement,
    #: seconds.
    waits: list[float]
    wrong: list[str]


def disturb(store: Any, acts: Sequence[Callable[[], None]]) -> Found:
    """Push and read in four threads while this is done to owners of a store's shards."""
    handles = store, remote(store)
    pushers = [Pusher(handle, number) for number, handle in enumerate(handles)]
    readers = [Reader(handle) for handle in handles]
    waits = act_beside(pushers, acts, readers)
    wrong = [text for user in (*pushers, *readers) for text in user.wrong]
    wrong += compare(store["w"].pull(), pushers, readers)
    n_pushes, n_reads = (sum(u.n_done for u in some) for some in (pushers, readers))
    return Found(n_pushes, n_reads, waits, wrong)


def act_beside(
    some: Sequence[User],
    acts: Sequence[Callable[[], None]],
    others: Sequence[User] = (),
) -> list[float]:
    """Do this while some and others use a store; return the longest waits of some."""
    users, waits = [*some, *others], []

    def more() -> None:
        """Wait until all of them have done some more."""
        goals = [user.n_done + 5 for user in users]
        pairs = [*zip(users, goals, strict=True)]
        until(lambda: all(u.n_done >= n or not u.is_alive() for u, n in pairs))

    for user in users:
        user.start()
    try:
        more()
        for act in acts:
            since = time.monotonic()
            act()
            more()
            waits.append(max(user.longest_wait(since) for user in some))
    finally:
        for user in users:
            user.is_over.set()
        for user in users:
            user.join()
    return waits


def by_kind(kinds: Iterable[str], waits: Iterable[float]) -> dict[str, Any]:
    """Return for each kind of disturbance how often there was one, and the waits."""
    of: dict[str, list[float]] = {}
    for kind, wait in zip(kinds, waits, strict=True):
        of.setdefault(kind, []).append(wait)
    return {
        kind: {"times": len(w), "median wait": float(np.median(w)), "longest": max(w)}
        for kind, w in of.items()
    }


def compare(values: Any, pushers: list[Pusher], readers: list[Reader]) -> list[str]:
    """Return what is there and should not be, and what is not there."""
    more = values[..., :HALF] - np.concatenate([pusher.counts() for pusher in pushers])
    wrong = []
    if n := -int(np.minimum(more, 0).sum()):
        wrong.append(f"{n} elements of acknowledged pushes are lost")
    if n := int(np.maximum(more, 0).sum()):
        wrong.append(f"{n} elements count twice")
    if any((values < reader.seen).any() for reader in readers):
        wrong.append("what was read is gone")
    return wrong


def store_on(client: Any, servers: list[str]) -> daskps.ParameterStore:
    """Make a store for :func:`disturb`."""
    params = {"w": np.zeros((N_SHARDS, 2, HALF))}
    return daskps.create(params, servers=servers, shards=N_SHARDS, client=client)


def strike(client: Any, store: Any, fault: str, rng: random.Random) -> None:
    """Do something to the owner of the first shard; return once that is past."""
    [(victim, pid)] = client.run(os.getpid, workers=[store.placement[0]]).items()
    pause = threading.Event()
    # No event to wait for: a moment of chance is what is tried.
    pause.wait(rng.random() * 0.05)
    if fault == "stopped":
        os.kill(pid, signal.SIGSTOP)
        pause.wait(0.2 + rng.random())
        os.kill(pid, signal.SIGCONT)
        return
    if fault == "retired":
        client.retire_workers([victim], close_workers=True)
    else:
        os.kill(pid, signal.SIGKILL if fault == "killed" else signal.SIGTERM)
    until(lambda: victim not in store.placement)


def one_cluster(faults: list[str], rng: random.Random) -> Found:
    """Disturb a store of a cluster of three workers."""
    with local_cluster(n_workers=3, threads=1) as client:

        def next_one(fault: str) -> None:
            # Who was killed is followed by another.
            until(lambda: len(client.nthreads()) == 3)
            strike(client, store, fault, rng)

        with store_on(client, rng.sample([*client.nthreads()], 2)) as store:
            return disturb(store, [partial(next_one, fault) for fault in faults])


def main(n: int, seed: int) -> None:
    rng = random.Random(seed)
    left = [FAULTS[i % len(FAULTS)] for i in range(n)]
    rng.shuffle(left)
    faults, waits = [*left], list[float]()
    n_pushes, n_reads, wrong = 0, 0, list[str]()
    while left:
        # Who has left in order does not come back: a cluster ends with it.
        ends = [i for i, fault in enumerate(left) if fault in ("retired", "terminated")]
        some = left[: ends[0] + 1] if ends else left
        left = left[len(some) :]
        found = one_cluster(some, rng)
        sys.stderr.write(f"{some} {found}\n")
        waits += found.waits
        n_pushes, n_reads = n_pushes + found.n_pushes, n_reads + found.n_reads
        wrong += found.wrong
    about = {"pushes": n_pushes, "reads": n_reads, **by_kind(faults, waits)}
    about["wrong"] = wrong
    sys.stdout.write(json.dumps(about) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
