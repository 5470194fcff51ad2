"""Snapshots under load: whether they are consistent, and how long pushes wait.

The stall is what the longest push takes beside a client that takes snapshots, and
without.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from distributed import Client

import daskps
from daskps import optim
from daskps.testing import PushOracle
from tests.benchmarks import clusters
from tests.benchmarks.command import benchmark, number
from tests.benchmarks.report import Verdict
from tests.benchmarks.samples import Job, Sample, seconds
from tests.snapshot_oracle import check

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator

    from tests.benchmarks.report import Found

#: Elements of a parameter of 100 MB.
BIG = 25_000_000
#: Between two snapshots while single pushes are timed.
PAUSE_SECONDS = 0.1


#: What is pushed while single pushes are timed.
SMALL = PushOracle(2, 1, 52)


def waits(
    client: Client, store: daskps.ParameterStore, name: str, act: Callable[[], object]
) -> Iterator[Job]:
    """Yield how long small pushes to all shards take, alone and beside what is named.

    The time of a sample is the longest of a second; "push" is the median.
    """
    address = client.scheduler_info()["address"]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        pool.submit(_timed, address, store.name, 0.5).result()

        def side(acts: bool) -> Sample:
            work = pool.submit(_timed, address, store.name, 1.0)
            while acts and not work.done():
                act()
                time.sleep(PAUSE_SECONDS)
            took = work.result()
            return Sample(max(took), {"push": statistics.median(took)})

        sides = {f"beside {name}": partial(side, True), "alone": partial(side, False)}
        yield Job(f"longest push of a second, {name}", sides)


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


def big_store(rule: Any) -> daskps.ParameterStore:
    """Return a store of two shards of 100 MB, and what small pushes name."""
    both = {**SMALL.params(), "w": daskps.ArraySpec((2 * BIG,), "float32")}
    return daskps.create(both, name="big", optimizer=rule, shards=2)


@benchmark(
    "snapshot",
    "snapshots while others push",
    number("--pushes", 5000, "of each producer"),
    number("--producers", 4, "clients that push"),
    pairs=15,
)
def snapshot(options: Namespace) -> Iterator[Found]:
    """Yield whether snapshots are consistent, and how long pushes wait beside them."""
    oracle = PushOracle(2, options.producers, options.pushes)
    with clusters.local(2, close=clusters.CARRIERS) as client:
        params, rule = oracle.params(), optim.SGD(1.0)
        store = daskps.create(params, name="oracle", optimizer=rule, shards=2)
        began = time.perf_counter()
        n, faults, pushes = check(client, oracle, store)
        took = time.perf_counter() - began
        each = [push for of in pushes for push in of]
        yield (
            f"{len(each):,} pushes of {options.producers} clients in {took:.1f} s "
            f"(median {statistics.median(each) * 1e3:.2f} ms, {max(each) * 1e3:.1f} at "
            f"most), {n} snapshots in between"
        )
        yield Verdict(f"snapshots are consistent: {faults[:3]}", not faults)
        store.delete()
        store = big_store(rule)
        yield from waits(client, store, "snapshots", store.snapshot)
        store.delete()
