"""Rounds of 1 to 64 trainers, all in this process, beside the cost model.

Every worker has a TCP address of its own and no other way to a shard is open, so each
trainer sends each host one message a step, as between machines. Messages and bytes are
counted where they are written, and must be those of :mod:`tests.benchmarks.model`. With
``--sockets`` these are calls by sockets, as the trainers count them.

In one process the work of all workers is done one after the other. So the time of a
round grows with its messages and bytes, and what one of them costs can be told: fitted
on every second number of workers, checked on the others, extrapolated to machines.
"""

from __future__ import annotations

import resource
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from distributed import Client

import daskps
from daskps import optim
from tests.benchmarks import clusters
from tests.benchmarks.command import benchmark, duration, number, numbers, switch
from tests.benchmarks.inprocess import WARM, Point, Sample, resident
from tests.benchmarks.model import StoreShape, Times, apart, fitted
from tests.benchmarks.report import Verdict

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from tests.benchmarks.report import Found

#: The fewest and the most steps of a sample.
FEWEST, MOST = 3, 300
#: About what a message takes, to choose the number of steps.
GUESS_SECONDS = 1e-3
#: What the model is extrapolated to.
LARGEST = 1000
#: Files that are open besides the connections of trainers, and for each worker.
FILES, FILES_OF_WORKER = 200, 20


def fit(points: Sequence[Point], cpu: bool = False) -> tuple[Times, list[Point]]:
    """Fit seconds, or CPU seconds, on every second number of workers of each size.

    Returns the points they were not fitted on, too.
    """
    chosen = sorted({p.shape.trainers for p in points})[::2]
    those = [p for p in points if p.shape.trainers in chosen]
    rows = [(p.shape.work, p.cpu if cpu else p.seconds) for p in those]
    return fitted(rows), [p for p in points if p.shape.trainers not in chosen]


HEADER = (
    f"{'workers':>7}{'hosts':>6}{'model':>10}{'messages':>10}{'KiB a round':>13}"
    f"{'exact':>7}{'rounds/s':>10}{'ms':>9}{'CPU ms':>9}{'us/message':>12}"
    f"{'directory':>11}{'events':>8}"
)


def line(point: Point) -> str:
    """Return a line of the table."""
    shape, last = point.shape, point.samples[-1]
    steps = range(WARM, WARM + last.steps)
    kib = shape.nbytes(steps) / last.steps / 1024
    asked = max(sum(s.asked.values()) for s in point.samples)
    events = max(s.events for s in point.samples)
    return (
        f"{shape.trainers:>7}{shape.hosts:>6}{shape.elements * 4 // 1024:>6} KiB"
        f"{shape.messages:>10,}{kib:>13,.1f}{'yes' if point.is_exact else 'NO':>7}"
        f"{1 / point.seconds:>10.2f}{1e3 * point.seconds:>9.2f}"
        f"{1e3 * point.cpu:>9.2f}{1e6 * point.seconds / shape.messages:>12.0f}"
        f"{asked:>11}{events:>8}"
    )


def verdict(points: Sequence[Point]) -> Iterator[str]:
    """Yield lines about the model: what fits, how far it is off, and where it leads."""
    for cpu, what in ((False, "time"), (True, "CPU time")):
        times, others = fit(points, cpu)
        yield (
            f"{what} of a round: {1e3 * times.fixed:.2f} ms + "
            f"{1e6 * times.per_message:.0f} us a message + "
            f"{1e6 * times.per_framed:.0f} us more with frames + "
            f"{1e9 * times.per_byte:.3f} ns a byte"
        )
        for point in others:
            shape, found = point.shape, point.cpu if cpu else point.seconds
            yield (
                f"  {shape.trainers} workers, {shape.elements * 4 // 1024} KiB, "
                f"not fitted on: off by {times.round(shape.work) / found - 1:+.0%}"
            )
    times, _ = fit(points)
    yield f"{LARGEST:,} workers, each a machine of its own, by the time above:"
    for hosts in (1, 16, LARGEST):
        for elements in sorted({p.shape.elements for p in points}):
            far = apart(times, StoreShape(LARGEST, hosts, elements))
            yield (
                f"  {hosts:>5} hosts, {elements * 4 // 1024} KiB: a round "
                f"{1e3 * far.round:,.0f} ms (a host {1e3 * far.host:,.0f}, "
                f"a trainer {1e3 * far.trainer:,.1f})"
            )


def measured(options: argparse.Namespace, workers: int) -> Iterator[Point]:
    """Measure all sizes of model on so many workers."""
    hosts = min(workers, options.hosts)
    with ExitStack() as stack:
        cluster = stack.enter_context(
            clusters.inside(workers, by_socket=options.sockets)
        )
        client = stack.enter_context(Client(cluster))
        server: Any = cluster.scheduler
        servers, runs = list(client.nthreads())[:hosts], 0
        stores: dict[StoreShape, daskps.ParameterStore] = {}
        samples: dict[StoreShape, list[Sample]] = {}
        for kib in options.kib:
            shape = StoreShape(workers, hosts, kib * 256, by_socket=options.sockets)
            params = {"w": daskps.ArraySpec((shape.elements,), "float32")}
            made = daskps.create(params, optimizer=optim.SGD(1e-3), servers=servers)
            stores[shape] = stack.enter_context(made)
            samples[shape] = []
        for _ in range(options.pairs):
            for shape, store in stores.items():
                runs += 1
                guess = options.seconds / (GUESS_SECONDS * shape.messages)
                steps = int(min(max(guess, FEWEST), MOST))
                this = replace(shape, run=runs, version=store.version)
                samples[shape].append(resident(server, store, this, steps))
        for shape in stores:
            yield Point(shape, tuple(samples[shape]))


def _room(workers: int, hosts: int) -> None:
    """See to it that so many connections can be open."""
    need = FILES + FILES_OF_WORKER * workers
    # A connection of Dask's and a socket, with both ends in this process.
    need += 2 * 2 * workers * min(hosts, workers)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and need > hard:
        raise SystemExit(
            f"{workers} workers in one process need {need} open files, the limit is "
            f"{hard}; raise it (ulimit -n), or take fewer --workers or --hosts"
        )
    if soft != resource.RLIM_INFINITY and need > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


@benchmark(
    "scaling",
    "rounds of 1 to 64 trainers in one process, beside the cost model",
    numbers("--workers", [1, 2, 4, 8, 16, 32, 64]),
    number("--hosts", 16, "at most so many"),
    numbers("--kib", [1, 1024], "of the models"),
    duration("--seconds", 2.0, "of a sample"),
    switch("--sockets", "by socket instead of by message"),
    pairs=3,
)
def scaling(options: argparse.Namespace) -> Iterator[Found]:
    """Yield rounds, what the model says of them, and whether bytes were exact."""
    _room(max(options.workers), options.hosts)
    yield HEADER
    points: list[Point] = []
    for workers in options.workers:
        for point in measured(options, workers):
            points.append(point)
            yield line(point)
    yield from verdict(points)
    yield {
        "resident": [
            {"is_exact": s.is_exact} | asdict(s) for p in points for s in p.samples
        ]
    }
    exact = all(point.is_exact for point in points)
    yield Verdict("messages and bytes are those of the model", exact)
