"""Stores with two copies: what the second one adds, beside a bare socket's round trip.

Four workers that share no memory: the first, or the first two, push to a shard of the
third, whose copy is on the fourth. A bare socket carries the bytes of the state from
the third to the fourth: its ends share a core, or have one each.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import daskps
from daskps import optim
from tests.benchmarks import clusters, workers
from tests.benchmarks.command import benchmark, number, parts
from tests.benchmarks.samples import Bar, Job, Sample, seconds
from tests.benchmarks.workers import Pair

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator

    from distributed import Client

#: Elements of 8 kB, 1 MB and 8 MB, the calls of a sample, and how many times the bare
#: round trip of a state the copy may add.
SIZES = {2**11: (200, 5.0), 2**18: (40, 1.5), 2**21: (8, 1.5)}
#: Pushes that queue.
QUEUED = 8


def _made(
    client: Client, servers: list[str], n: int, rule: Any, copies: int
) -> daskps.ParameterStore:
    spec = clusters.vector(n)
    of: dict[str, Any] = {"optimizer": rule, "servers": servers[:copies]}
    return daskps.create(spec, client=client, copies=copies, shards=1, **of)


def pushes(store: daskps.ParameterStore, calls: int) -> Sample:
    """Time pushes to a shard of another worker, one after the other."""
    return workers.handle(store, "push", calls, 0, True)


def queued(store: daskps.ParameterStore) -> float:
    """Time pushes of as many threads, all at once."""
    grads = {name: np.full_like(a, 1e-3) for name, a in store.pull().items()}
    with ThreadPoolExecutor(QUEUED) as threads:

        def act() -> None:
            list(threads.map(store.push, [grads] * QUEUED))

        act()
        return seconds(act, 3)


def pushed(client: Client, options: Namespace) -> Iterator[Job]:
    """Yield pushes of several sizes, and what the second copy adds to them."""
    here, _, *servers = list(client.nthreads())[:4]
    beside = Pair(client, servers[0], servers[1], (0, 0))
    rules = [(n, optim.SGD(1e-3), 1) for n in SIZES] + [(2**21, optim.Adam(1e-3), 3)]
    for n, rule, times in rules:
        calls, limit = SIZES[n]
        n, calls = n // options.fewer, max(2, calls // options.fewer)
        make = partial(_made, client, servers, n, rule)
        with make(1) as one, make(2) as two:

            def added(one: Any = one, two: Any = two, calls: int = calls) -> Sample:
                push = partial(clusters.at, client, here, pushes)
                alone, both = push(one, calls).seconds, push(two, calls).seconds
                more = {"one copy": alone, "two copies": both}
                return Sample(both - alone, more)

            bare = partial(beside.bare, "send", times * n, calls, work=False)
            title = f"added to a push, {4 * n // 1000:,} kB, {type(rule).__name__}"
            others = {"on one core": bare, "a core each": partial(bare, apart=True)}
            bars = [Bar("copy", other, limit) for other in others]
            yield Job(title, {"copy": added, **others}, bars)


def at_once(client: Client, options: Namespace) -> Iterator[Job]:
    """Yield pushes that queue."""
    here, _, *servers = list(client.nthreads())[:4]
    n = 2**21 // options.fewer
    make = partial(_made, client, servers, n, optim.SGD(1e-3))
    with make(1) as one, make(2) as two:
        push = partial(clusters.at, client, here, queued)
        sides = {"two copies": partial(push, two), "one copy": partial(push, one)}
        bars = [Bar("two copies", "one copy", 1.15)]
        yield Job(f"{QUEUED} pushes of {4 * n // 1000:,} kB at once", sides, bars)


def rounds(client: Client, options: Namespace) -> Iterator[Job]:
    """Yield BSP steps of two trainers, of 1 kB."""
    pair, servers = Pair.of(client), list(client.nthreads())[2:4]
    make = partial(_made, client, servers, 2**8, optim.SGD(1e-3))
    calls = max(2, 400 // options.fewer)
    with make(1) as one, make(2) as two:
        steps = [partial(pair.steps, s, "push + pull", calls, True) for s in (two, one)]
        sides = dict(zip(("two copies", "one copy"), steps, strict=True))
        bars = [Bar("two copies", "one copy", 1.5)]
        yield Job("BSP step, 1 kB, 2 trainers", sides, bars)


PARTS: dict[str, Callable[[Client, Namespace], Iterator[Job]]] = {
    "push": pushed,
    "queue": at_once,
    "step": rounds,
}


@benchmark(
    "copies",
    "what a second copy adds to pushes and steps, beside a bare socket",
    parts([*PARTS]),
    number("--fewer", 1, "times fewer calls and elements"),
    pairs=7,
)
def copies(options: Namespace) -> Iterator[Job]:
    """Yield the parts, in one cluster."""
    with clusters.local(4, close=["machine"]) as client:
        for name in options.only:
            yield from PARTS[name](client, options)
