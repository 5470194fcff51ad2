"""Owners and second copies that are killed or stopped, under pushes and reads.

``python -m tests.cluster.killing_copies N SEED`` acts N times upon a worker of a store
with two copies, in any order: two of six times it kills an owner, and as often the worker
of a copy; once it stops an owner until its copy has taken over, and once an owner loses
its power. Memory is private, so each that dies takes all that it held with it, as a
machine does. It says for each act how long pushes waited, and how long it took to make
new copies; with ``large`` behind them of a store of 100 MB.
``python -m tests.cluster.killing_copies N SEED rounds`` does so N times within runs in
rounds, resident and in the task graph, or stops an owner until its copy has taken over,
and compares bits with undisturbed runs.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import dask
import numpy as np

import daskps
from daskps import testing
from tests.cluster import killing_owners
from tests.support import local_cluster, until

N_WORKERS = 4
#: Elements that nobody looks at: with them half a shard has 80 kB.
N_MORE = 10_000
#: Bytes that nobody pushes to, of a large store.
LARGE = 100_000_000


def workers_of(client: Any, store: Any) -> tuple[list[str], dict[int, str]]:
    """Return the owners of all shards, and the worker of each copy that can take over."""

    def found(dask_scheduler: Any) -> tuple[list[str], dict[int, str]]:
        entry = dask_scheduler.extensions["daskps-directory"].stores[store.uid]
        copies = {i: copy.worker for i, copy in entry.copies.items() if copy.counts}
        return [*entry.owners], copies

    both: tuple[list[str], dict[int, str]] = client.run_on_scheduler(found)
    return both


def copies_of(client: Any, store: Any) -> dict[int, str]:
    """Return the worker of each second copy that can take over."""
    return workers_of(client, store)[1]


def has_all(client: Any, store: Any) -> bool:
    """Return whether each shard has a second copy that can take over."""
    return len(copies_of(client, store)) == len(store.placement)


def kill_owner(client: Any, store: Any) -> None:
    """Kill the owner of the first shard once all shards have two copies."""
    until(partial(has_all, client, store))
    testing.kill_owner(client, store)
    store.pull()


def kill_copy(client: Any, store: Any) -> None:
    """Kill the worker with the second copy of the first shard."""
    until(partial(has_all, client, store))
    testing.kill_worker(client, copies_of(client, store)[0])


@contextmanager
def stopped(pid: int, ends_by: int = signal.SIGCONT) -> Iterator[None]:
    """Have a process stand still in a block; then it goes on, or ends.

    Its nanny is in the process of the cluster, and has none of its connections: all of
    them stay open.
    """
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, ends_by)


def first_owner(client: Any, store: Any) -> tuple[str, int]:
    """Return the owner of the first shard and its process, once all have two copies."""
    until(partial(has_all, client, store))
    [owner, *_], _ = workers_of(client, store)
    return owner, client.run(os.getpid, workers=[owner])[owner]


def stop_owner(client: Any, store: Any) -> None:
    """Stop the owner of the first shard until its copy has taken over."""
    worker, pid = first_owner(client, store)
    with stopped(pid):
        until(lambda: workers_of(client, store)[0][0] != worker)


def cut_power(client: Any, store: Any) -> None:
    """Stop the owner of the first shard for good; others get all that it had."""
    worker, pid = first_owner(client, store)

    def has_nothing() -> bool:
        owners, copies = workers_of(client, store)
        return worker not in {*owners, *copies.values()}

    with stopped(pid, signal.SIGKILL):
        until(lambda: has_nothing() and has_all(client, store))
    until(lambda: worker not in client.nthreads())


#: One of three is silence, which takes longer than `daskps.suspect-after`.
ACTS = (kill_owner, kill_copy, stop_owner, kill_owner, kill_copy, cut_power)


def store_on(
    client: Any, *, is_large: bool = False, nbytes: int = 0
) -> daskps.ParameterStore:
    """Make a store with two copies for `killing_owners.disturb`.

    With `is_large` states are sent from the memory of a shard to that of its copy. So
    many bytes beside it are in the copies, too.
    """
    n, servers = killing_owners.N_SHARDS, list(client.nthreads())[:2]
    params = {"w": np.zeros((n, 2, killing_owners.HALF + N_MORE * is_large))}
    if nbytes:
        params["beside"] = np.zeros((n, nbytes // 8 // n))
    return daskps.create(params, copies=2, servers=servers, shards=n, client=client)


def copies_made(client: Any) -> dict[str, Any]:
    """Return how long new copies took, also if they were of all shards, and their memory.

    That is twice the bytes of what they have: arrays have two buffers.
    """
    events = [of for _, of in client.get_events("daskps")]
    made = [of for of in events if of["action"] == "copies-made"]
    each = {what: [of[what] for of in made] for what in ("seconds", "nbytes")}
    shares = [len(of["shards"]) / killing_owners.N_SHARDS for of in made]
    pairs = zip(each["seconds"], shares, strict=True)
    each["seconds for a whole store"] = [seconds / share for seconds, share in pairs]
    return {"times": len(made)} | {
        what: {"median": float(np.median(found)), "most": max(found)}
        for what, found in each.items()
    }


def main(n: int, seed: int, nbytes: int = 0) -> None:
    rng = random.Random(seed)
    acts = [ACTS[i % len(ACTS)] for i in range(n)]
    rng.shuffle(acts)
    way = {"daskps.carriers.machine": False}
    with dask.config.set(way), local_cluster(N_WORKERS, 1) as client:

        def next_one(act: Callable[[Any, Any], None]) -> None:
            # One that was killed is followed by another.
            until(lambda: len(client.nthreads()) == N_WORKERS)
            act(client, store)

        is_large = rng.random() < 0.5
        with store_on(client, is_large=is_large, nbytes=nbytes) as store:
            found = killing_owners.disturb(store, [partial(next_one, a) for a in acts])
        made = copies_made(client)
    said = killing_owners.by_kind((act.__name__ for act in acts), found.waits)
    about = {"pushes": found.n_pushes, "reads": found.n_reads, **said}
    about |= {"copies made": made, "wrong": found.wrong}
    sys.stdout.write(json.dumps(about) + "\n")


# -- runs in rounds --------------------------------------------------------------------

#: Kinds of runs: how they are executed and what encodes their gradients.
KINDS: dict[str, dict[str, Any]] = {
    "resident": {},
    "int8": {"codec": "int8"},
    "topk": {"codec": daskps.codecs.TopK(0.3)},
    "graph": {"execution": "graph"},
}
N_TRAINERS, N_ROUNDS = 3, 80


def gradient(params: Any, X: Any, y: Any) -> Any:
    """Return what depends on all that has been applied so far."""
    return {name: np.cos(value + X.sum()) for name, value in params.items()}


def rows_of(X: Any) -> Any:
    return (np.abs(X[:, 0]) * 7).astype("i8") % 9


def trained(client: Any, kind: str, act: Callable[[Any], Any] | None = None) -> bytes:
    """Train a new store while something happens to it; return its bits."""
    workers = sorted(client.nthreads())
    servers = workers[:2]
    X = np.random.default_rng(5).normal(size=(N_TRAINERS * N_ROUNDS, 2))
    params = {"w": np.zeros(20_000), "emb": daskps.TableSpec(9, 2)}
    how: dict[str, Any] = {"trainers": N_TRAINERS, "batch_size": 1, "callbacks": ()}
    how |= KINDS[kind]
    if kind in ("resident", "int8"):
        how["rows"] = {"emb": rows_of}
    if "codec" in how:
        # A trainer takes the rest of gradients along that words have yet to say.
        how["workers"] = workers[2:]
    about: dict[str, Any] = {"servers": servers, "shards": 2, "client": client}
    rule = daskps.optim.Adam(0.01)
    about |= {"name": "trained", "optimizer": rule, "copies": 2, "overwrite": True}
    with daskps.create(params, **about) as store:
        until(partial(has_all, client, store))
        thread = threading.Thread(target=act or bool, args=(store,))
        thread.start()
        try:
            daskps.train(store, gradient, X, **how)
        finally:
            thread.join()
        found = store.pull()["w"].tobytes() + store["emb"].pull(np.arange(9)).tobytes()
        found += bytes([store.version])
        store.delete()
        return found


def kill_at(client: Any, whose: str, at: int, shard: int, store: Any) -> None:
    """Kill the owner of a shard, or the worker of its copy, at a version; or stop it."""
    pids = client.run(os.getpid)
    until(lambda: store.version >= at)
    of = copies_of(client, store) if whose == "copy" else store.placement
    worker = of[shard]
    if whose != "stopped":
        os.kill(pids[worker], signal.SIGKILL)
        return
    with stopped(pids[worker]):
        until(lambda: workers_of(client, store)[0][shard] != worker)


def rounds(n: int, seed: int) -> None:
    rng, wrong, found = random.Random(seed), list[str](), Counter[str]()
    way = {"daskps.carriers.machine": False}
    with dask.config.set(way), local_cluster(N_WORKERS, 2) as client:
        expected = {kind: trained(client, kind) for kind in KINDS}
        for _ in range(n):
            until(lambda: len(client.nthreads()) == N_WORKERS)
            kind = rng.choice([*KINDS])
            whose = rng.choice(["owner", "stopped", "copy"])
            if whose == "copy" and "codec" in KINDS[kind]:
                whose = "owner"
            at, shard = rng.randrange(1, N_ROUNDS), rng.randrange(2)
            kill = partial(kill_at, client, whose, at, shard)
            what = f"{kind}, {whose}"
            try:
                if trained(client, kind, kill) != expected[kind]:
                    wrong.append(f"{what} in round {at}")
            except Exception as error:  # noqa: BLE001 - to be looked at
                wrong.append(f"{what} in round {at}: {error!r:.300}")
            found[what] += 1
            sys.stderr.write(f"{what} {wrong[-1:]}\n")
    sys.stdout.write(json.dumps({**found, "wrong": wrong}) + "\n")


if __name__ == "__main__":
    modes: dict[str, Any] = {
        "": main,
        "rounds": rounds,
        "large": partial(main, nbytes=LARGE),
    }
    modes["".join(sys.argv[3:])](int(sys.argv[1]), int(sys.argv[2]))
