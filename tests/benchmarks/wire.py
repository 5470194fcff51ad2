"""Calls between machines, by socket and by message, beside bare sockets and gloo.

Memory that is shared on one machine is closed: what a worker reaches without a message
is in its own process, as between machines.
"""

from __future__ import annotations

import resource
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from distributed.security import Security

from tests.benchmarks import clusters, crowd, peers, sockets, workers
from tests.benchmarks.command import benchmark, duration, number, parts
from tests.benchmarks.jobs import StepJob
from tests.benchmarks.samples import Bar, Job, Sample, Side
from tests.benchmarks.workers import Pair

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator

#: Elements of 1 KiB, of 1 MiB and of 16 MiB.
SMALL, LARGE, LARGEST = 2**8, 2**18, 2**22
#: Of large arrays so many fewer calls, and so many at least.
FEWER = {SMALL: 1, LARGE: 10, LARGEST: 50}
LEAST = 5
#: The interpreter's switch interval and a millisecond more.
SWITCH = sys.getswitchinterval() + 1e-3
#: Connections of a crowd; answers that it should get in a second, and the longest that
#: one of them should wait.
CROWD, CROWD_RATE, STARVED = 1000, 15_000, 0.1
#: Open files that a thousand connections need, at both ends.
FILES = 8192


def small(pair: Pair, options: Namespace) -> Iterator[Job]:
    """Yield calls of 1 KiB; the bare socket does no work."""
    bars = (
        Bar("socket", "bare socket", 2.0),
        Bar("socket", "message", 8.0, at_least=True),
    )
    for verb in ("get", "push"):
        with pair.store(SMALL) as store:
            sides = pair.carriers(partial(pair.call, store, verb, options.calls))
            bare = partial(pair.bare, verb, SMALL, options.calls, work=False)
            title = f"{verb}, 1 KiB{', TLS' * pair.tls}"
            kept = bars if verb == "get" and not pair.tls else ()
            yield Job(title, sides | {"bare socket": bare}, kept)


def large(pair: Pair, options: Namespace) -> Iterator[Job]:
    """Yield pull, push and update of 1 and 16 MiB."""
    for n, limit in ((LARGE, 1.3), (LARGEST, 1.3 if pair.tls else 1.2)):
        calls = max(LEAST, options.calls // FEWER[n])
        with pair.store(n) as store:
            sides = pair.carriers(partial(pair.call, store, "both", calls))
            bare = partial(pair.bare, "both", n, calls, work=True)
            title = f"pull + push + apply, {4 * n // 2**20} MiB{', TLS' * pair.tls}"
            bars = [Bar("socket", "bare socket", limit)]
            yield Job(title, sides | {"bare socket": bare}, bars)


def steps(pair: Pair, options: Namespace) -> Iterator[Job]:
    """Yield BSP steps of two trainers on two hosts, a model of 1 KiB, beside gloo's."""
    job = StepJob("round", 4 * SMALL, 2, 0)
    for verb in ("push + pull", "pushpull"):
        with pair.store(SMALL, both=True) as store:
            sides = pair.carriers(partial(pair.steps, store, verb, options.calls))
            bars = [Bar("socket", "message", 4.0, at_least=True)]
            yield Job(f"BSP step, 1 KiB, 2 hosts, {verb}", sides, bars)
            with peers.opened(pair.client, peers.GLOO, job) as gloo:
                beside: dict[str, Side] = {
                    "socket": sides["socket"],
                    peers.GLOO: partial(gloo, options.calls),
                }
                yield Job(f"BSP step, {verb}, beside gloo's mean", beside)


def busy_server(pair: Pair, options: Namespace) -> Iterator[Job]:
    """Yield gets from a worker that computes, beside the same when it is idle."""
    with pair.store(SMALL) as store:
        # Each takes a switch of threads there: fewer will do.
        calls = max(LEAST, options.calls // 4)
        sides: dict[str, Side] = {}
        for way, side in pair.carriers(partial(pair.call, store, "get", calls)).items():
            sides[way] = side
            for work in workers.WORK:
                sides[f"{way}, {work} busy"] = partial(
                    workers.beside, pair.client, pair.there, work, side
                )
        bars = [
            Bar("socket, NumPy busy", "socket", 1.5),
            Bar("socket, Python busy", "socket", 3.0),
            Bar("socket, Python busy", "", SWITCH),
            Bar("socket, Python busy", "message, Python busy", 1 / 3, "p99"),
        ]
        # Of Python: the second bar, or the third and the fourth.
        yield Job("get, 1 KiB, server busy", sides, bars)


def many(pair: Pair, options: Namespace) -> Iterator[Job | str]:
    """Yield a thousand connections to one host: at work, and idle beside one that is."""
    length, (_, peer) = options.seconds, pair.pids

    def by_socket() -> Sample:
        # Its shard has room for one crowd of producers.
        with pair.store(crowd.ELEMENTS) as store:
            found: Sample = pair.run(
                crowd.by_socket, store, pair.there, CROWD, length, peer
            )
            return found

    def selector() -> Sample:
        where = pair.served(partial(sockets.serve_many, crowd.ELEMENTS))
        found: Sample = pair.run(crowd.by_selector, where, CROWD, length, peer)
        return found

    # Before the others: what they have used is kept by the process.
    with pair.store(crowd.ELEMENTS) as store:
        files, kib, threads = pair.run(crowd.taken, store, pair.there, CROWD, peer)
        taken = f"{files:,} open files, {kib / 1024:.1f} MiB, {threads} threads"
        yield f"{CROWD:,} sockets take of their host: {taken}"
    bars = (
        Bar("socket", "", CROWD_RATE, "a second", at_least=True),
        Bar("socket", "", STARVED, "longest"),
    )
    title = f"{CROWD:,} connections push 64 B: longest calls"
    yield Job(title, {"socket": by_socket, "bare selector": selector}, bars)
    with pair.store(SMALL) as store:
        get = workers.handle, store, "get", options.calls, peer, True
        open_beside = partial(crowd.beside, store, pair.there, CROWD)
        sides = {
            "socket, others open": partial(pair.run, open_beside, *get),
            "socket": partial(pair.run, *get),
            "bare socket": partial(pair.bare, "get", SMALL, options.calls, work=False),
        }
        kept = [Bar("socket, others open", "bare socket", 2.0)]
        yield Job(f"get, 1 KiB, beside {CROWD:,} idle sockets", sides, kept)


def tls(pair: Pair, options: Namespace) -> Iterator[Job]:
    """Yield small calls and large arrays under TLS, beside bare TLS sockets."""
    yield from small(pair, options)
    yield from large(pair, options)


PARTS: dict[str, Callable[[Pair, Namespace], Iterator[Job | str]]] = {
    "small": small,
    "step": steps,
    "large": large,
    "busy": busy_server,
    "many": many,
    "tls": tls,
}


def _room() -> None:
    """Let this process and its workers open so many files, where they may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FILES:
        most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@benchmark(
    "wire",
    "calls between machines, beside messages, bare sockets and gloo",
    parts([*PARTS]),
    number("--calls", 400, "of one sample, fewer of large arrays"),
    duration("--seconds", 1.0, "of a sample of many connections"),
    pairs=5,
)
def wire(options: Namespace) -> Iterator[Job | str]:
    """Yield the parts, those under TLS in a cluster of their own."""
    _room()
    for under_tls in (False, True):
        names = [name for name in options.only if (name == "tls") is under_tls]
        how: dict[str, Any] = {}
        if under_tls:
            how = {"security": Security.temporary(), "protocol": "tls"}
        if names:
            with clusters.local(2, close=["machine"], **how) as client:
                pair = Pair.of(client, tls=under_tls)
                for name in names:
                    yield from PARTS[name](pair, options)
