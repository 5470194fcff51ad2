"""Rows of tables through the public interface, beside the limit.

A trainer is a task that holds a handle, in another process than the shards; its memory
is theirs. A step reads 10,000 rows into an array and pushes as many gradients (SGD),
each step of other rows. What one call costs is told for few rows: a pull of 64, and a
push of 10 into a table of 1 GiB beside one of 1 MiB.
"""

from __future__ import annotations

import itertools
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import daskps
from daskps import config, optim
from tests.benchmarks import clusters, peers
from tests.benchmarks.command import benchmark, duration, number, parts, switch
from tests.benchmarks.rows import DIM, RATE, SETS, ZIPF, limits
from tests.benchmarks.samples import Job, lasting, seconds, timed

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator

    from distributed import Client

    from daskps.typing import Array

#: Rows of the table of 1 MiB, and rows that an unbounded table gets at a time.
_SMALL, _PART = 2**12, 2**16
#: Pushes of a sample that gives ids their rows, or of one of the same ids later.
_STEPS = 20
#: Sets of few rows; calls of a sample of pulls, and of pushes.
_FEW, _PULLS, _PUSHES = 1000, 2000, 500


@dataclass(frozen=True)
class TableJob:
    """Pulls and pushes of some rows of a table, cut into ranges for its servers."""

    rows: int
    named: int
    trainers: int
    servers: int
    #: "uniform", without repeats; "zipf"; "as zipf", as many rows as that has
    #: different.
    ids: str = "uniform"
    #: Whether what counts is the CPU time of the trainers' threads.
    cpu: bool = False

    @property
    def clock(self) -> Callable[[], float]:
        """The clock of this job."""
        return time.thread_time if self.cpu else time.perf_counter

    @property
    def title(self) -> str:
        """The job in words."""
        law = "" if self.ids == "uniform" else f", {self.ids}"
        law += ", CPU" if self.cpu else ""
        return f"{self.named:,} of {self.rows:,} rows{law}, {self.trainers} + {self.servers}"

    def turns(self, rank: int) -> Iterator[Array]:
        """Return ids for one step after the other."""
        rng, made = np.random.default_rng(rank), []
        for _ in range(SETS):
            ids, n = rng.zipf(ZIPF, self.named) % self.rows, self.named
            if self.ids == "as zipf":
                n = len(np.unique(ids))
            if self.ids != "zipf":
                ids = rng.choice(self.rows, n, replace=False)
            made.append(ids)
        return itertools.cycle(made)

    def step(self, side: Any, rank: int) -> Callable[[], object]:
        """Return one step of a trainer: pull rows, and push to them."""
        turns = self.turns(rank)
        out = np.zeros((self.named, DIM), np.float32)
        grads = np.full((self.named, DIM), 1e-3, np.float32)

        def both() -> None:
            ids = next(turns)
            side.pull(ids, out=out[: len(ids)])
            side.push(ids, grads[: len(ids)])

        return both

    def limit(self, place: peers.Place) -> LimitTable:
        """Return the table that all trainers map."""
        w = place.mapped(f"{self.rows}", (self.rows, DIM), np.float32)
        if place.rank == 0:
            w[:] = 1
        return LimitTable(w)


class LimitTable:
    """Rows in shared memory, without a lock; each is asked for before its turn."""

    def __init__(self, w: Array) -> None:
        self._w, loops = w, limits(str(config.load().cache))
        self._pull, self._push = loops("limit_pull"), loops("limit_push")

    def pull(self, ids: Array, out: Array) -> None:
        """Copy rows out."""
        self._pull(self._w, ids, out)

    def push(self, ids: Array, grads: Array) -> None:
        """Apply SGD to them."""
        self._push(self._w, ids, grads, RATE)


def _loop(store: Any, job: TableJob, steps: int, rank: int) -> float:
    return timed(job.step(store["emb"], rank), steps, job.clock)


def _store(client: Client, rows: int | None, servers: list[str]) -> Any:
    spec = {"emb": daskps.TableSpec(rows, DIM, init=1.0)}
    rule, n = optim.SGD(float(RATE)), len(servers)
    return daskps.create(spec, client=client, optimizer=rule, shards=n, servers=servers)


@contextmanager
def _opened(
    client: Client, job: TableJob, *, unbounded: bool = False
) -> Iterator[Callable[[int], float]]:
    """Make a store for a job; give what measures steps."""
    trainers, servers = clusters.places(client, job.trainers, job.servers)
    with _store(client, None if unbounded else job.rows, servers) as store:
        if unbounded:
            clusters.at(client, trainers[0], _fill, store, job.rows)

        def measure(steps: int) -> float:
            work = partial(_loop, store, job, steps)
            return float(max(clusters.at_once(client, trainers, work)))

        yield measure


def _fill(store: Any, rows: int) -> None:
    """Give all ids of a job their rows."""
    zeros = np.zeros((_PART, DIM), np.float32)
    for start in range(0, rows, _PART):
        ids = np.arange(start, min(start + _PART, rows))
        store["emb"].add(ids, zeros[: len(ids)])


def _beside_limit(
    client: Client, job: TableJob, options: Namespace, *, unbounded: bool = False
) -> Iterator[Job]:
    with (
        _opened(client, job, unbounded=unbounded) as ours,
        peers.opened(client, peers.LIMIT, job) as limit,
    ):
        measured = {"ours": ours, peers.LIMIT: limit}
        sides = {name: lasting(options.seconds, of) for name, of in measured.items()}
        yield Job(job.title + ", unbounded" * unbounded, sides)


def _first_pushes(client: Client, job: TableJob) -> Iterator[Job]:
    """Yield pushes that give ids their rows, beside later ones of the same ids."""
    here, there = clusters.places(client, 1, 1)
    with _store(client, None, there) as store:
        new, known = (itertools.count(0, _STEPS * job.named) for _ in range(2))

        def pushed(starts: Iterator[int], seed: int) -> float:
            work = _pushes, store, job.named, next(starts), seed
            return float(clusters.at(client, here[0], *work))

        pushed(new, 0)  # ahead of the later ones, and what compiles
        sides = {"first": partial(pushed, new, 0), "later": partial(pushed, known, 1)}
        yield Job(f"push of {job.named:,} ids", sides)


def _pushes(store: Any, named: int, first: int, seed: int) -> float:
    """Push some ids from a first one on, in an order of chance; seconds of one push."""
    order = np.random.default_rng(seed).permutation(_STEPS * named)
    sets = iter((first + order).reshape(_STEPS, named))
    grads = np.full((named, DIM), 1e-3, np.float32)
    return seconds(lambda: store["emb"].push(next(sets), grads), _STEPS)


def _zipf(client: Client, job: TableJob, options: Namespace) -> Iterator[Job]:
    """Yield ids that repeat beside as many different ones, for ours and for the limit."""
    jobs = [replace(job, ids=law) for law in ("zipf", "as zipf")]
    for what, opened in (
        ("ours", partial(_opened, client)),
        ("the limit", partial(peers.opened, client, peers.LIMIT)),
    ):
        with opened(jobs[0]) as a, opened(jobs[1]) as b:
            measured = {"zipf": a, "uniform, as many rows": b}
            sides = {
                name: lasting(options.seconds, of) for name, of in measured.items()
            }
            yield Job(f"{what}: {jobs[0].title}", sides)


def _few(table: Any, rows: int, what: str, n: int, steps: int) -> float:
    """Return the seconds of a pull or a push of few rows, others each time."""
    rng = np.random.default_rng(0)
    sets = [rng.choice(rows, n, replace=False) for _ in range(min(_FEW, steps))]
    turns = itertools.cycle(sets)
    values = np.full((n, DIM), 1e-3, np.float32)
    acts = {
        "push": lambda: table.push(next(turns), values),
        "pull": lambda: table.pull(next(turns), out=values),
    }
    # A process that maps a shard meets its pages one after the other.
    seconds(acts[what], len(sets))
    return timed(acts[what], steps)


def _few_of_store(store: Any, *how: Any) -> float:
    return _few(store["emb"], store["emb"].rows, *how)


def _few_of_limit(rows: int, *how: Any) -> float:
    return _few(LimitTable(np.ones((rows, DIM), np.float32)), rows, *how)


def _few_rows(client: Client, options: Namespace) -> Iterator[Job]:
    """Yield small calls beside the loop alone, and into tables of two sizes."""
    [here], there = clusters.places(client, 1, 1)
    at = partial(partial, clusters.at, client, here)
    n = options.large
    with _store(client, n, there) as large, _store(client, _SMALL, there) as small:
        pull, push = ("pull", 64, _PULLS), ("push", 10, _PUSHES)
        sides = {"ours": at(_few_of_store, large, *pull)}
        sides["loop alone"] = at(_few_of_limit, n, *pull)
        yield Job("pull of 64 rows", sides)
        into = {f"into {n:,}": large, f"into {_SMALL:,}": small}
        sides = {name: at(_few_of_store, of, *push) for name, of in into.items()}
        yield Job("push of 10 rows", sides)


@benchmark(
    "tables",
    "rows of tables, beside the limit",
    parts(("rows", "unbounded", "zipf", "few rows")),
    number("--rows", 1_000_000, "of the table"),
    number("--named", 10_000, "rows of a pull and a push"),
    number("--large", 2**22, "rows of the large table of a small push"),
    duration("--seconds", 0.3, "of a sample"),
    switch("--cpu", "CPU time of the trainers' threads"),
)
def tables(options: Namespace) -> Iterator[Job]:
    """Yield the parts."""
    one, two = (
        TableJob(options.rows, options.named, n, n, cpu=options.cpu) for n in (1, 2)
    )
    if "rows" in options.only:
        for job in (one, two):
            with clusters.local(job.trainers + job.servers) as client:
                yield from _beside_limit(client, job, options)
    with clusters.local(2) as client:
        if "unbounded" in options.only:
            yield from _beside_limit(client, one, options, unbounded=True)
            yield from _first_pushes(client, one)
        if "zipf" in options.only:
            yield from _zipf(client, one, options)
        if "few rows" in options.only:
            yield from _few_rows(client, options)
