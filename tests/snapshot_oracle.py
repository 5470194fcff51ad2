"""Whether snapshots are consistent: an oracle that tells which pushes a shard contains.

Clients in processes of their own push while snapshots are taken one after the other. Each
push sets one bit of each shard it goes to, so that a snapshot tells exactly which pushes
every shard contains: for every producer they must be the same.
"""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import Client

import daskps

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.typing import Array

#: Bits of a float64 that sums of powers of two fill exactly.
BITS = 52
#: Every so many pushes one goes to some of the shards only.
PARTIAL = 5


@dataclass(frozen=True)
class Oracle:
    """A layout of pushes: each sets one bit of a parameter of each shard it goes to."""

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
        took = []
        for push in range(oracle.pushes):
            grads, began = oracle.grads(producer, push), time.perf_counter()
            store.push(grads)
            took.append(time.perf_counter() - began)
        return took


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
