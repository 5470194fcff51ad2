"""Drains of workers at random moments, under pushes and reads, and faults beside them.

``python -m tests.cluster.draining N SEED`` drains N owners of a store, a third of them
where others of the machine adopt the memory, a third where memory is private, and a
third where it is shared and copied all the same, as between machines. Beside two of
three drains the worker that is drained or another one is stopped for a moment or killed.
It says for each way and fault how long pushes waited, and what was wrong.
``python -m tests.cluster.draining N SEED large`` drains the owner of 100 MB with Adam N
times under pushes of ten elements, and N times under pushes of all of them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from contextlib import nullcontext
from functools import partial
from typing import Any

import dask
import numpy as np

import daskps
from tests.cluster.killing_owners import (
    Found,
    User,
    act_beside,
    by_kind,
    disturb,
    store_on,
)
from tests.seams import drains_by_adoption
from tests.support import local_cluster, until

#: Whether memory is shared, and whether shards are copied although it is.
WAYS = {"adopted": (True, False), "private": (False, False), "copied": (True, True)}
FAULTS = ("none", "none", "source stopped", "target stopped")
#: With private memory what a worker owns dies with it.
KILLS = ("source killed", "target killed")
#: Parameters of a large store by what pushes to them are called: float32.
LARGE = {"ten elements": np.ones(10, "f4"), "100 MB": np.ones(25_000_000, "f4")}


def drain(client: Any, store: Any, fault: str, rng: random.Random) -> None:
    """Drain the owner of the first shard while something happens to a worker."""
    # A worker that was killed is followed by another.
    until(lambda: len(client.nthreads()) == 3)
    source = store.placement[0]
    others = [w for w in client.nthreads() if w != source]
    victim = source if fault.startswith("source") else rng.choice(others)
    pid = client.run(os.getpid, workers=[victim])[victim]
    drained = threading.Thread(target=_drain, args=(store, source, fault))
    drained.start()
    # No event to wait for: a moment of chance is what is tried.
    pause = threading.Event()
    pause.wait(rng.random() * 0.2)
    if fault.endswith("stopped"):
        os.kill(pid, signal.SIGSTOP)
        pause.wait(0.2 + rng.random())
        os.kill(pid, signal.SIGCONT)
    elif fault.endswith("killed"):
        os.kill(pid, signal.SIGKILL)
        until(lambda: victim not in store.placement)
    drained.join()


def _drain(store: Any, source: str, fault: str) -> None:
    try:
        store.drain(source)
    except (daskps.ConsistencyError, ValueError):
        # It was killed, or no other one could have the shards: they are where they were.
        if not fault.endswith("killed"):
            raise
    else:
        # Where another one was killed, it may have some of them again.
        assert source not in store.placement or fault == "target killed"


def one_cluster(way: str, faults: list[str], rng: random.Random) -> Found:
    """Drain owners of a store of a cluster of three workers."""
    is_shared, is_copied = WAYS[way]
    with (
        dask.config.set({"daskps.carriers.machine": is_shared}),
        drains_by_adoption() if is_copied else nullcontext(),
        local_cluster(n_workers=3, threads=1) as client,
        store_on(client, rng.sample([*client.nthreads()], 2)) as store,
    ):
        acts = [partial(drain, client, store, fault, rng) for fault in faults]
        return disturb(store, acts)


def main(n: int, seed: int) -> None:
    rng = random.Random(seed)
    about: dict[str, Any] = {"pushes": 0, "reads": 0}
    wrong = list[str]()
    threading.excepthook = lambda args: wrong.append(repr(args.exc_value))
    for i, way in enumerate(WAYS):
        kinds = FAULTS if way == "private" else FAULTS + KILLS
        faults = [kinds[j % len(kinds)] for j in range(len(range(i, n, len(WAYS))))]
        rng.shuffle(faults)
        found = one_cluster(way, faults, rng)
        sys.stderr.write(f"{way} {faults} {found}\n")
        about["pushes"] += found.n_pushes
        about["reads"] += found.n_reads
        wrong += found.wrong
        about |= by_kind((f"{way}, {fault}" for fault in faults), found.waits)
    sys.stdout.write(json.dumps({**about, "wrong": wrong}) + "\n")


class Trainer(User):
    """Pushes gradients of one parameter."""

    def __init__(self, handle: Any, name: str) -> None:
        super().__init__(handle)
        self.grads = {name: LARGE[name]}

    def use(self) -> None:
        self.handle.push(self.grads)


def large(n: int, seed: int) -> None:
    rng, about, wrong, n_pushes = random.Random(seed), dict[str, Any](), list[str](), 0
    private = dask.config.set({"daskps.carriers.machine": False})
    with private, local_cluster(n_workers=3, threads=1) as client:
        how: dict[str, Any] = {"servers": list(client.nthreads())[:1], "shards": 1}
        rule = daskps.optim.Adam(1e-3)
        with daskps.create(LARGE, optimizer=rule, client=client, **how) as store:
            for name in LARGE:
                trainer = Trainer(store, name)
                # At first nothing happens: so long pushes take by themselves.
                acts: list[Any] = [bool] * n
                acts += [partial(drain, client, store, "none", rng)] * n
                kinds = [name] * n + [f"{name}, drained"] * n
                about |= by_kind(kinds, act_beside([trainer], acts))
                wrong += trainer.wrong
                n_pushes += trainer.n_done
            if store.version != n_pushes:
                wrong.append(f"{store.version} of {n_pushes} pushes are there")
    sys.stdout.write(json.dumps({"pushes": n_pushes, **about, "wrong": wrong}) + "\n")


if __name__ == "__main__":
    does = large if sys.argv[3:] == ["large"] else main
    does(int(sys.argv[1]), int(sys.argv[2]))
