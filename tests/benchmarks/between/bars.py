"""The rows of the table between machines: which ways, and what the lane should reach."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.benchmarks import busy
from tests.benchmarks.between import crowd, sockets
from tests.benchmarks.between.calls import handle
from tests.benchmarks.between.rows import Bar, Row, WaySample
from tests.benchmarks.jobs import StepJob
from tests.benchmarks.peers import PeerError, allreduce, mpi, ray, torch_rpc

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

    from tests.benchmarks.between.calls import Pair
    from tests.benchmarks.between.rows import TakesSample
    from tests.benchmarks.jobs import Measure

#: Elements of 1 KiB, of 1 MiB and of 16 MiB.
SMALL, LARGE, LARGEST = 2**8, 2**18, 2**22
#: Of large arrays so many fewer calls, and so many at least.
FEWER = {SMALL: 1, LARGE: 10, LARGEST: 50}
LEAST = 5
#: What a contribution costs at the floor: microseconds under the interpreter's lock.
FLOOR_WORK = 40
FLOOR = Path(__file__).with_name("floor.py")
#: Microseconds: the interpreter's switch interval and a millisecond more.
SWITCH = 1e6 * sys.getswitchinterval() + 1000
#: Connections of a crowd; answers that it should get in a second, and the longest that
#: one of them should wait.
CROWD, CROWD_RATE, STARVED = 1000, 15_000, 100_000


def _calls(n: int, options: Namespace) -> int:
    calls: int = options.calls
    return max(LEAST, calls // FEWER[n])


def small(pair: Pair, options: Namespace) -> Iterator[Row]:
    """Yield calls of 1 KiB; the bare socket does no work."""
    bars = {
        "get": (
            Bar("lane", "bare socket", 2.0),
            Bar("lane", "message", 8.0, at_least=True),
        ),
        "push": (),
    }
    for verb, of in bars.items():
        with pair.store(SMALL) as store:
            call = partial(pair.call, store, verb, options.calls)
            sides: dict[str, TakesSample] = {
                "lane": partial(call, lane=True),
                "bare socket": partial(
                    pair.bare, verb, SMALL, options.calls, work=False
                ),
                "message": partial(call, lane=False),
            }
            yield Row(f"{verb}, 1 KiB", sides, of)


def large(pair: Pair, options: Namespace) -> Iterator[Row]:
    """Yield pull, push and update of 1 and 16 MiB."""
    for n, limit in ((LARGE, 1.3), (LARGEST, 1.2)):
        calls = _calls(n, options)
        with pair.store(n) as store:
            call = partial(pair.call, store, "both", calls)
            sides: dict[str, TakesSample] = {
                "lane": partial(call, lane=True),
                "bare socket": partial(pair.bare, "both", n, calls, work=True),
                "message": partial(call, lane=False),
            }
            bars = [Bar("lane", "bare socket", limit)]
            title = f"pull + push + apply, {4 * n // 2**20} MiB"
            yield Row(title, sides, bars)


def tls(pair: Pair, options: Namespace) -> Iterator[Row]:
    """Yield the same under TLS, beside a bare TLS socket."""
    for row in itertools.chain(small(pair, options), large(pair, options)):
        is_large = row.job.startswith("pull")
        row.job = f"{row.job}, TLS"
        row.bars = [Bar("lane", "bare socket", 1.3)] if is_large else ()
        yield row


def steps(pair: Pair, options: Namespace, *, floor: bool = True) -> Iterator[Row]:
    """Yield BSP steps of two trainers on two hosts, a model of 1 KiB.

    Beside the floor also with cores of its own for each host: left to itself the kernel
    now and then has all threads of both on one core, as those of machines never are.
    """
    apart = [False, True] if floor and pair.may_part else [False]
    for verb, own in itertools.product(("push + pull", "pushpull"), apart):
        with pair.store(SMALL, both=True) as store:
            step = partial(pair.steps, store, verb, options.calls, apart=own)
            sides: dict[str, TakesSample] = {
                "lane": partial(step, lane=True),
                "message": partial(step, lane=False),
            }
            bars = [Bar("lane", "message", 4.0, at_least=True)]
            if floor:
                sides["floor"] = partial(_floor, options.calls, apart=own)
                bars.insert(0, Bar("lane", "floor", 2.0))
            where = "2 hosts on cores of their own" if own else "2 hosts"
            yield Row(f"BSP step, 1 KiB, 2 trainers, {where}, {verb}", sides, bars)


def _floor(steps: int, *, apart: bool) -> WaySample:
    given = FLOOR_WORK, 2 * SMALL, 2 * steps, int(apart)
    line = [sys.executable, "-P", str(FLOOR), *map(str, given)]
    done = subprocess.run(line, stdout=subprocess.PIPE, check=True)
    took, cpu = json.loads(done.stdout)
    return WaySample(tuple(took[steps:]), cpu)


def peers(pair: Pair, options: Namespace) -> Iterator[Row | str]:
    """Yield the same step by other systems, and 16 MiB by MPI; or why one is not here.

    They are in two processes, a trainer and a part of the model in each, if they can.
    """
    step, both = StepJob("round", 4 * SMALL, 2, 2), StepJob("pullpush", 2**24, 1, 1)
    ahead = 1.0
    for peer, job, servers, limit in (
        (torch_rpc.PEER, step, 0, ahead),
        (allreduce.GLOO, step, 0, ahead),
        (ray.PEER, step, 1, ahead),
        (allreduce.MPI_TCP, step, 0, None),
        (mpi.TCP, both, 1, 1.2),
    ):
        if reason := peer.missing():
            yield f"left out {peer.title}: {reason}"
            continue
        n = job.nbytes // 4
        with pair.store(n, both=job is step) as store:
            if job is step:
                ours = partial(pair.steps, store, "push + pull", options.calls)
            else:
                ours = partial(pair.call, store, "both", _calls(n, options))
            try:
                with peer.opened(job.trainers, servers, pair.client) as measure:
                    sides: dict[str, TakesSample] = {
                        "lane": partial(ours, lane=True),
                        peer.title: partial(_peer, measure, job, _calls(n, options)),
                    }
                    bars = [] if limit is None else [Bar("lane", peer.title, limit)]
                    yield Row(f"{job.title} (of {peer.title}: means)", sides, bars)
            except PeerError as error:
                yield f"left out {peer.title}: {str(error).strip().splitlines()[-1]}"


def _peer(measure: Measure, job: StepJob, steps: int) -> WaySample:
    return WaySample((1e6 * measure(job, steps),))


def busy_server(pair: Pair, options: Namespace) -> Iterator[Row]:
    """Yield gets from a worker that computes, beside the same when it is idle."""
    with pair.store(SMALL) as store:
        sides: dict[str, TakesSample] = {}
        # Each takes a switch of threads there: fewer will do.
        calls = max(LEAST, options.calls // 4)
        for way in ("lane", "message"):
            side = partial(pair.call, store, "get", calls, lane=way == "lane")
            sides[way] = side
            for work in busy.WORK:
                sides[f"{way}, {work} busy"] = partial(
                    busy.beside, pair.client, pair.there, work, side
                )
        bars = [
            Bar("lane, NumPy busy", "lane", 1.5),
            Bar("lane, Python busy", "lane", 3.0),
            Bar("lane, Python busy", "", SWITCH),
            Bar("lane, Python busy", "message, Python busy", 1 / 3, "p99"),
        ]
        yield Row(
            "get, 1 KiB, server busy (of Python: 2nd bar, or 3rd and 4th)", sides, bars
        )


def many(pair: Pair, options: Namespace) -> Iterator[Row | str]:
    """Yield a thousand connections to one host: at work, and idle beside one that is."""
    seconds, (_, peer) = options.seconds, pair.pids

    def lane() -> WaySample:
        # Its shard has room for one crowd of producers.
        with pair.store(crowd.ELEMENTS) as store:
            pushes = partial(crowd.by_lane, seconds=seconds, peer=peer)
            sample: WaySample = pair.run(pushes, store, pair.there, CROWD)
            return sample

    def selector() -> WaySample:
        serve = partial(sockets.serve_many, crowd.ELEMENTS)
        where = pair.client.run(serve, workers=[pair.there])[pair.there]
        sample: WaySample = pair.run(crowd.by_selector, where, CROWD, seconds, peer)
        return sample

    # Before the others: what they have used is kept by the process.
    with pair.store(crowd.ELEMENTS) as store:
        files, kib, threads = pair.run(crowd.taken, store, pair.there, CROWD, peer)
        yield (
            f"  {CROWD:,} lanes take of their host: {files:,} open files, "
            f"{kib / 1024:.1f} MiB, {threads} threads"
        )
    bars = (
        Bar("lane", "", CROWD_RATE, "rate", at_least=True),
        Bar("lane", "", STARVED, "p100"),
    )
    title = f"{CROWD:,} connections push 64 B: the longest call of each"
    yield Row(title, {"lane": lane, "bare selector": selector}, bars)
    with pair.store(SMALL) as store:
        one = partial(handle, store, "get", options.calls, lane=True, peer=peer)
        yield Row(
            f"get, 1 KiB, beside {CROWD:,} idle lanes",
            {
                "lane": partial(pair.run, one),
                "lane, others open": partial(
                    pair.run, crowd.beside, store, pair.there, CROWD, one
                ),
                "bare socket": partial(
                    pair.bare, "get", SMALL, options.calls, work=False
                ),
            },
            [Bar("lane, others open", "bare socket", 2.0)],
        )


def between(pair: Pair, options: Namespace) -> Iterator[Row]:
    """Yield what is measured on workers that were given, as those of two machines."""
    yield from small(pair, options)
    yield from steps(pair, options, floor=False)
    yield from large(pair, options)
