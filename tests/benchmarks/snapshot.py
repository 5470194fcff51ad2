"""Snapshots under load: whether they are consistent, and how long pushes wait.

Clients in processes of their own push while snapshots are taken one after the other.
Each push sets one bit of each shard it goes to, so that a snapshot tells exactly which
pushes every shard contains: for every producer they must be the same. The stall is
what the longest push takes beside a client that takes snapshots, and without.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
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

    from daskps.typing import Array

#: Bits of a float64 that sums of powers of two fill exactly.
BITS = 52
#: Every so many pushes one goes to some of the shards only.
PARTIAL = 5
#: Elements of a parameter of 100 MB.
BIG = 25_000_000
#: Between two snapshots while single pushes are timed.
PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class Oracle:
    """Which bit of which parameter a push sets."""

    shards: int
    producers: int
    pushes: int

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the parameter of one shard: a row per producer."""
        return self.producers, -(-self.pushes // BITS)

    def params(self) -> dict[str, Any]:
        """Return one parameter per shard; of one size, so that each fills one."""
        return {f"o{i}": np.zeros(self.shape) for i in range(self.shards)}

    def touched(self, push: int) -> list[int]:
        """Return the shards a push goes to."""
        every = list(range(self.shards))
        if push % PARTIAL == 0 and self.shards > 1:
            every.remove(push // PARTIAL % self.shards)
        return every

    def grads(self, producer: int, push: int) -> dict[str, Array]:
        """Return the gradients of a push."""
        grad = np.zeros(self.shape)
        grad[producer, push // BITS] = 2.0 ** (push % BITS)
        return {f"o{i}": grad for i in self.touched(push)}

    def contained(self, values: dict[str, Array]) -> list[list[set[int]]]:
        """Return for each producer and shard the pushes it contains."""
        return [
            [self._bits(-values[f"o{i}"][p]) for i in range(self.shards)]
            for p in range(self.producers)
        ]

    def _bits(self, words: Array) -> set[int]:
        return {
            at * BITS + bit
            for at, word in enumerate(words.tolist())
            for bit in range(BITS)
            if int(word) >> bit & 1
        }

    def faults(self, values: dict[str, Array]) -> list[str]:
        """Return what is inconsistent."""
        found = []
        for producer, shards in enumerate(self.contained(values)):
            for push in set().union(*shards):
                having = [i for i, of in enumerate(shards) if push in of]
                if having != self.touched(push):
                    found.append(f"push {push} of {producer} is on {having} only")
        return found

    def total(self, values: dict[str, Array]) -> int:
        """Return how many pushes a snapshot contains."""
        return sum(len(set().union(*shards)) for shards in self.contained(values))


def _pusher(address: str, name: str, oracle: Oracle, producer: int) -> list[float]:
    """Push one after the other; return how many seconds each took."""
    with Client(address):
        store = daskps.open(name)
        every = (oracle.grads(producer, push) for push in range(oracle.pushes))
        return [seconds(partial(store.push, grads)) for grads in every]


def _snapshot(client: Client, store: daskps.ParameterStore) -> dict[str, Array]:
    snapshot = store.snapshot()
    arrays = client.compute([snapshot[name] for name in store.names])
    return dict(zip(store.names, client.gather(arrays), strict=True))


def check(
    client: Client,
    oracle: Oracle,
    store: daskps.ParameterStore,
    take: Callable[[Client, daskps.ParameterStore], dict[str, Array]] = _snapshot,
) -> tuple[int, list[str], list[list[float]]]:
    """Take snapshots while every producer pushes; compare the shards in each.

    `take` returns the parameters of one, by default of a snapshot of the store.

    Returns how many snapshots there were in the middle of the pushes, what was wrong with
    any of them, and how many seconds the pushes of each producer took.
    """
    n, faults, wanted = 0, list[str](), oracle.producers * oracle.pushes
    address = client.scheduler_info()["address"]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(oracle.producers, mp_context=spawn) as pool:
        work = [
            pool.submit(_pusher, address, store.name, oracle, p)
            for p in range(oracle.producers)
        ]
        while not all(w.done() for w in work):
            values = take(client, store)
            faults += oracle.faults(values)
            n += 0 < oracle.total(values) < wanted
        return n, faults, [w.result() for w in work]


#: What is pushed while single pushes are timed.
SMALL = Oracle(2, 1, BITS)


def latency(
    client: Client,
    store: daskps.ParameterStore,
    pairs: int,
    what: tuple[str, Callable[[], object]],
) -> None:
    """Print how long small pushes to all shards take, alone and beside what is named."""
    alone, beside = [], []
    address = client.scheduler_info()["address"]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        pool.submit(_timed, address, store.name, 0.5).result()
        for _ in range(pairs):
            alone.append(pool.submit(_timed, address, store.name, 1.0))
            alone[-1].result()
            beside.append(pool.submit(_timed, address, store.name, 1.0))
            while not beside[-1].done():
                what[1]()
                time.sleep(PAUSE_SECONDS)
    for name, windows in (("alone", alone), (f"beside {what[0]}", beside)):
        took = [work.result() for work in windows]
        median = statistics.median(s for of in took for s in of)
        worst = sorted(max(of) for of in took)
        print(
            f"{name:<18}median {median * 1e3:5.2f} ms; longest of a second: median "
            f"{statistics.median(worst) * 1e3:.1f} ms "
            f"({worst[0] * 1e3:.1f}-{worst[-1] * 1e3:.1f})"
        )


def _timed(address: str, name: str, duration: float) -> list[float]:
    """Push for a while; return how many seconds each push took."""
    took: list[float] = []
    with Client(address):
        push = partial(daskps.open(name).push, SMALL.params())
        push()
        end = time.perf_counter() + duration
        while time.perf_counter() < end:
            took.append(seconds(push))
    return took


OPTIONS = (
    number("--pushes", 5000, "of each producer"),
    number("--producers", 4, "clients that push"),
    number("--pairs", 15, "of a second each"),
)


def run(options: Namespace) -> int:
    """Measure and print; return 1 if a snapshot was inconsistent."""
    oracle = Oracle(2, options.producers, options.pushes)
    with clusters.local(2, close=clusters.WAYS) as client:
        store = daskps.create(
            oracle.params(), name="oracle", optimizer=optim.SGD(1.0), shards=2
        )
        began = time.perf_counter()
        n, faults, pushes = check(client, oracle, store)
        took = time.perf_counter() - began
        each = [push for of in pushes for push in of]
        print(
            f"{len(each):,} pushes of {options.producers} clients in {took:.1f} s "
            f"(median {statistics.median(each) * 1e3:.2f} ms, {max(each) * 1e3:.1f} at "
            f"most), {n} snapshots in between, {len(faults)} faults {faults[:3]}"
        )
        store.delete()
        both = {**SMALL.params(), "w": daskps.ArraySpec((2 * BIG,), "float32")}
        store = daskps.create(both, name="big", optimizer=optim.SGD(1.0), shards=2)
        print("two shards of 100 MB, one client that pushes a few bytes to both:")
        latency(client, store, options.pairs, ("snapshots", store.snapshot))
        store.delete()
    return 1 if faults else 0
