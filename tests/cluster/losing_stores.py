"""Stores made with `recover_from=` whose owners are killed at random moments.

``python -m tests.cluster.losing_stores N SEED`` does so N times, half the time with a
second owner a moment later, while some push and one saves, and says how often each
handle was told, and whether anything was lost that was saved, counted twice, or torn.
Nothing is shared by memory there: with its worker a shard is lost.
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
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import dask
import numpy as np

import daskps
from daskps.errors import StoreRestoredError
from tests.support import local_cluster, until

N_PUSHERS, N_SHARDS, N_ELEMENTS = 3, 6, 3000
#: How long a call may take: a recovery among it.
PATIENCE = 60


class User(threading.Thread):
    """Uses a store until it is told that all is over."""

    def __init__(self) -> None:
        super().__init__()
        self.is_over, self.n_told = threading.Event(), 0


class Pusher(User):
    """Adds one to each element of its own row, which is cut over all shards."""

    def __init__(self, store: Any, row: int) -> None:
        super().__init__()
        # Of another process, as far as the store knows.
        self.handle, self.row = pickle.loads(pickle.dumps(store)), row
        self.one = np.zeros((N_PUSHERS, N_ELEMENTS))
        self.one[row] = 1
        self.n_pushed = 0
        self.wrong: list[str] = []

    def run(self) -> None:
        try:
            self.begin()
            while not self.is_over.is_set():
                self.push()
            self.look()
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not be
            self.wrong.append(f"row {self.row}: {error!r:.300}")

    def begin(self) -> None:
        """Count from what is in the store now."""
        while True:
            try:
                self.base, self.n_counted = self.read(), 0
                return
            except StoreRestoredError:
                self.n_told += 1

    def read(self) -> float:
        found = self.handle["w"].pull(timeout=PATIENCE)[self.row]
        if (found != found[0]).any():
            self.wrong.append(f"row {self.row} is torn: {np.unique(found)!r:.200}")
        return float(found[0])

    def push(self) -> None:
        try:
            self.handle.add({"w": self.one}, timeout=PATIENCE)
            self.n_pushed, self.n_counted = self.n_pushed + 1, self.n_counted + 1
            if self.n_counted % 10 == 0:
                self.look()
        except StoreRestoredError:
            self.n_told += 1
            self.begin()

    def look(self) -> None:
        if (found := self.read()) != self.base + self.n_counted:
            self.wrong.append(
                f"row {self.row} has {found}, of {self.base} and {self.n_counted} pushes"
            )


class Saver(User):
    """Saves all the time, and notes what is lost when it is told."""

    def __init__(self, store: Any, folder: str) -> None:
        super().__init__()
        self.store, self.folder, self.n_saves = store, folder, 0
        #: Seconds between the save that was restored and the moment of being told.
        self.lost: list[float] = []

    def has_heard(self, n: int) -> bool:
        return self.n_told >= n

    def run(self) -> None:
        while not self.is_over.is_set():
            try:
                self.store.save(self.folder, timeout=PATIENCE)
                self.n_saves += 1
            except StoreRestoredError as error:
                self.n_told += 1
                self.lost.append(time.time() - error.time.timestamp())
            except daskps.DaskPSError:
                # An owner died while it wrote: there is no checkpoint of that.
                continue


def workers_of(client: Any) -> list[str]:
    return [*client.scheduler_info(n_workers=-1)["workers"]]


def kill(client: Any, store: Any, rng: random.Random) -> int:
    """Kill an owner, half the time another one too; return how many."""

    def owners() -> list[str]:
        return sorted({*store.placement} & {*workers_of(client)})

    there = until(owners)
    two = len(there) > 1 and rng.random() < 0.5
    some, pids = rng.sample(there, 1 + two), client.run(os.getpid)
    for worker in some:
        os.kill(pids[worker], signal.SIGKILL)
        # A moment of chance is what is tried.
        threading.Event().wait(0.3 * rng.random())
    until(lambda: not {*some} & {*workers_of(client)})
    client.wait_for_workers(3, timeout=PATIENCE)
    return len(some)


def main(n: int, seed: int) -> None:
    rng, n_killed = random.Random(seed), 0
    apart = dask.config.set({"daskps.carriers.machine": False})
    with apart, TemporaryDirectory() as folder, local_cluster(3, threads=1) as client:
        first = {"w": np.zeros((N_PUSHERS, N_ELEMENTS))}
        store = daskps.create(first, name="s", recover_from=folder, shards=N_SHARDS)
        store.save(folder)
        users = [Pusher(store, row) for row in range(N_PUSHERS)]
        saver = Saver(store, folder)
        everybody: list[User] = [*users, saver]
        for user in everybody:
            user.start()
        for kills in range(n):
            threading.Event().wait(0.5 + 1.5 * rng.random())
            n_killed += kill(client, daskps.open("s"), rng)
            until(partial(saver.has_heard, kills + 1))
        for user in everybody:
            user.is_over.set()
            user.join()
        events = [event["action"] for _, event in client.get_events("daskps")]
        about = {
            "owners killed": n_killed,
            "restored": events.count("store-restored"),
            "told": [user.n_told for user in everybody],
            "pushes": sum(user.n_pushed for user in users),
            "saves": saver.n_saves,
            "lost seconds": [round(s, 2) for s in sorted(saver.lost)],
            "wrong": [text for user in users for text in user.wrong],
        }
        sys.stdout.write(json.dumps(about) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
