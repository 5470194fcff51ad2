"""Trainers with rows whose worker processes die, stop or leave, at random moments.

``python -m tests.cluster.killing_trainers N SEED`` does so to N runs, one after the other,
and says how often of each kind, and how many sums were wrong. The ids are drawn for each
batch: a trainer that starts again must draw the same, else the sums are others.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from typing import Any

import numpy as np

import daskps
from daskps import TableSpec, optim
from tests.support import local_cluster, until

N_ROWS, PER_BATCH, SEED = 40, 6, 5
SYNCS = ("bsp", "asp", daskps.SSP(2))
FAULTS = ("trainer killed", "owner killed", "stopped", "trainer left", "owner left")


def store_on(servers: list[str], client: Any = None) -> daskps.ParameterStore:
    """Make a store whose values count steps, and how often each row was named."""
    params = {"w": np.zeros(4), "emb": TableSpec(N_ROWS, 2, "float64")}
    rule = optim.SGD(1.0)
    return daskps.create(params, optimizer=rule, servers=servers, client=client)


def drawn(X: Any, rng: np.random.Generator) -> Any:
    return rng.integers(0, N_ROWS, PER_BATCH)


def ones(params: Any, X: Any, y: Any) -> Any:
    # A busy trainer, not a wait for anything: the kill must find it at work.
    end = time.perf_counter() + 0.002
    while time.perf_counter() < end:
        pass
    return {name: np.ones_like(value) for name, value in params.items()}


def train(store: Any, n: int, epochs: int, **how: Any) -> Any:
    """Train with so many trainers, each of which does n steps in an epoch."""
    n *= how["trainers"]
    how |= {"batch_size": 1, "epochs": epochs, "seed": SEED, "reduce": "sum"}
    return daskps.train(store, ones, np.zeros((n, 1)), rows={"emb": drawn}, **how)


def named(trainers: int, n: int, epochs: int) -> Any:
    """Return how often each row is named in all of that."""
    found = np.zeros(N_ROWS)
    for rank in range(trainers):
        for clock in range(n * epochs):
            place = np.random.SeedSequence(SEED, spawn_key=(clock // n, rank, clock))
            ids = drawn(None, np.random.default_rng(place))
            found += np.bincount(ids, minlength=N_ROWS)
    return found


def is_exact(store: Any, trainers: int, n: int, epochs: int) -> bool:
    """Return whether each step of each trainer has counted once."""
    rows = -store["emb"].pull(np.arange(N_ROWS))
    expected = named(trainers, n, epochs)
    return bool(
        (rows == expected[:, None]).all()
        and (-store["w"].pull() == trainers * n * epochs).all()
    )


class Runs:
    """Runs on one cluster of three worker processes, and what is done to them."""

    def __init__(self, cluster: Any, rng: random.Random) -> None:
        self._client, self._rng = cluster, rng

    def one(self, sync: Any, fault: str) -> bool:
        """Do something to a run; return whether it was exact all the same."""
        client, rng = self._client, self._rng
        until(lambda: len(client.nthreads()) == 3)
        workers = [*client.nthreads()]
        pids = client.run(os.getpid)
        owners = rng.sample(workers, rng.choice([1, 2]))
        others = [w for w in workers if w not in owners]
        victim = rng.choice(owners if "owner" in fault else others)
        with store_on(owners, client) as store:
            over = threading.Event()
            at = rng.randrange(1, 100 if sync == "bsp" else 300)
            work = self._act, (store, fault, victim, pids[victim], at, over)
            thread = threading.Thread(target=work[0], args=work[1])
            thread.start()
            try:
                train(store, 60, 2, trainers=3, sync=sync, callbacks=())
            finally:
                over.set()
                thread.join()
            return is_exact(store, 3, 60, 2)

    def _act(
        self, store: Any, fault: str, victim: str, pid: int, at: int, over: Any
    ) -> None:
        while not over.is_set() and store.version < at:
            over.wait(0.001)
        # No event to wait for: a moment of chance is what is tried.
        over.wait(self._rng.random() * 0.02)
        if "killed" in fault:
            os.kill(pid, signal.SIGKILL)
        elif "left" in fault:
            self._client.retire_workers([victim], close_workers=True)
        else:
            os.kill(pid, signal.SIGSTOP)
            over.wait(0.2 + self._rng.random())
            os.kill(pid, signal.SIGCONT)


def main(n: int, seed: int) -> None:
    rng, found = random.Random(seed), Counter[str]()
    wrong: list[str] = []
    while sum(found.values()) < n:
        # A worker that has left stays away; one that was killed comes back.
        with local_cluster(n_workers=3, threads=1) as client:
            fault = ""
            while "left" not in fault and sum(found.values()) < n:
                sync, fault = rng.choice(SYNCS), rng.choice(FAULTS)
                what = f"{sync}, {fault}"
                try:
                    if not Runs(client, rng).one(sync, fault):
                        wrong.append(what)
                except Exception as error:  # noqa: BLE001 - to be looked at
                    wrong.append(f"{what}: {error!r:.300}")
                found[what] += 1
                sys.stderr.write(f"{what} {wrong[-1:]}\n")
    sys.stdout.write(json.dumps({**found, "wrong": wrong}) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
