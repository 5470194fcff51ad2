"""Whether snapshots are consistent: an oracle that tells which pushes a shard contains.

Clients in processes of their own push while snapshots are taken one after the other. Each
push sets one bit of each shard it goes to, so that a snapshot tells exactly which pushes
every shard contains: for every producer they must be the same.
"""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING

from distributed import Client

import daskps
from daskps.testing import PushOracle

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.typing import Array


def _pusher(address: str, name: str, oracle: PushOracle, producer: int) -> list[float]:
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
    oracle: PushOracle,
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
