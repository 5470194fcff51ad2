"""Rows of tables through the public interface, beside other systems and the limit.

A trainer is a task that holds a handle, in another process than the shards; its memory
is theirs. A step reads 10,000 rows into an array and pushes as many gradients (SGD), each
step of other rows. What one call costs is told for few rows: a pull of 64, and a push of
10 into a table of 1 GiB beside one of 1 MiB.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import daskps
from daskps import optim
from tests.benchmarks import clusters, command
from tests.benchmarks.jobs import timed
from tests.benchmarks.options import number, reported
from tests.benchmarks.pairs import Comparison, alternate, seconds, steps_in
from tests.benchmarks.peers import PeerError
from tests.benchmarks.peers.table_servers import PEERS
from tests.benchmarks.peers.tables import DIM, RATE, TableJob, TableTrainer, loops
from tests.benchmarks.report import Report
from tests.benchmarks.sides import ways_of

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

    from distributed import Client

OPTIONS = (
    *reported(pairs=7),
    number("--rows", 1_000_000, "of the table"),
    number("--named", 10_000, "rows of a pull and a push"),
    number("--large", 2**22, "rows of the large table of a small push"),
    ("--seconds", {"type": float, "default": 0.3, "help": "of a sample"}),
    (
        "--cpu",
        {
            "action": "store_true",
            "help": "CPU time of the trainers' threads, beside the limit alone",
        },
    ),
    ("--job", {"default": "", "help": "only jobs whose title contains this"}),
)
#: Rows of the table of 1 MiB, and rows that a table of any ids gets at a time.
_SMALL, _PART = 2**12, 2**16
#: Pushes of a sample that gives ids their rows, or of one of the same ids later.
_STEPS = 20


class _Ours(TableTrainer):
    def __init__(self, store: Any, job: TableJob, rank: int) -> None:
        super().__init__(job, rank)
        self._table = store["emb"]

    def move(self, ids: Any, out: Any, grads: Any) -> None:
        self._table.pull(ids, out=out)
        self._table.push(ids, grads)


def _loop(store: Any, job: TableJob, rank: int, steps: int) -> float:
    return timed(_Ours(store, job, rank).step, steps, job.clock)


@contextmanager
def _opened(client: Client, job: TableJob, *, any_ids: bool = False) -> Iterator[Any]:
    """Make a store for a job; give what measures steps, and the ways."""
    trainers, servers = clusters.places(client, job.trainers, job.servers)
    rows = None if any_ids else job.rows
    with daskps.create(
        {"emb": daskps.TableSpec(rows, DIM, init=1.0)},
        client=client,
        optimizer=optim.SGD(float(RATE)),
        shards=job.servers,
        servers=servers,
    ) as store:
        if any_ids:
            client.submit(_fill, store, job.rows, workers=trainers[:1]).result()

        def measure(steps: int) -> float:
            work = [
                client.submit(_loop, store, job, i, steps, workers=[at], pure=False)
                for i, at in enumerate(trainers)
            ]
            return float(max(client.gather(work)))

        asked = client.submit(ways_of, store, workers=trainers[:1], pure=False)
        yield measure, tuple(asked.result())


def _fill(store: Any, rows: int) -> None:
    """Give all ids of a job their rows."""
    zeros = np.zeros((_PART, DIM), np.float32)
    for start in range(0, rows, _PART):
        ids = np.arange(start, min(start + _PART, rows))
        store["emb"].add(ids, zeros[: len(ids)])


def _any_ids(client: Client, job: TableJob, options: Namespace) -> Comparison:
    """Set rows of any ids, all of them there, beside the limit, which numbers them."""
    with (
        _opened(client, job, any_ids=True) as (ours, ways),
        PEERS["limit"].opened(job.trainers, job.servers, client) as measure,
    ):
        loops: Any = measure
        limit = partial(loops, job)
        mine = partial(ours, steps_in(options.seconds, ours))
        theirs = partial(limit, steps_in(options.seconds, limit))
        found = alternate(mine, theirs, options.pairs)
    return Comparison(f"{job.title}, any ids", PEERS["limit"].title, *found, ways)


def _pushes(store: Any, job: TableJob, first: int, seed: int) -> float:
    """Push some ids from a first one on, in an order of chance; seconds of one push."""
    order = np.random.default_rng(seed).permutation(_STEPS * job.named)
    sets = iter((first + order).reshape(_STEPS, job.named))
    grads = np.full((job.named, DIM), 1e-3, np.float32)
    return seconds(lambda: store["emb"].push(next(sets), grads), _STEPS)


def _first_pushes(client: Client, job: TableJob, options: Namespace) -> Comparison:
    """Set pushes that give ids their rows beside later ones of the same ids."""
    here, there = clusters.places(client, 1, 1)
    with _store(client, None, there) as store:

        def pushed(starts: Iterator[int], seed: int) -> float:
            work = _pushes, store, job, next(starts), seed
            return float(client.submit(*work, workers=here, pure=False).result())

        new, known = (itertools.count(0, _STEPS * job.named) for _ in range(2))
        pushed(new, 0)  # ahead of the later ones, and what compiles
        first, later = partial(pushed, new, 0), partial(pushed, known, 1)
        found = alternate(first, later, options.pairs)
    return Comparison(f"first push of {job.named:,} ids", "later push", *found)


def _beside_peers(client: Client, job: TableJob, options: Namespace) -> Iterator[Any]:
    for name, peer in PEERS.items():
        if job.cpu and name != "limit":
            continue  # others work in processes that are no trainers
        if reason := peer.missing():
            yield name, reason
            continue
        try:
            with (
                _opened(client, job) as (ours, ways),
                peer.opened(job.trainers, job.servers, client) as measure,
            ):
                theirs: Any = measure
                n_ours = steps_in(options.seconds, ours)
                n_theirs = steps_in(options.seconds, partial(theirs, job))
                found = alternate(
                    partial(ours, n_ours), partial(theirs, job, n_theirs), options.pairs
                )
                yield Comparison(job.title, peer.title, *found, ways)
        except PeerError as error:
            yield name, str(error)


def _zipf(client: Client, job: TableJob, options: Namespace) -> Iterator[Comparison]:
    """Set ids that repeat beside as many different ones, for ours and for the limit."""
    jobs = [replace(job, ids=law) for law in ("zipf", "as zipf")]
    with _opened(client, jobs[0]) as (a, ways), _opened(client, jobs[1]) as (b, _):
        n = steps_in(options.seconds, a)
        found = alternate(partial(a, n), partial(b, n), options.pairs)
        yield Comparison(jobs[0].title, "ours, uniform", *found, ways)
    with PEERS["limit"].opened(job.trainers, job.servers, client) as measure:
        limit: Any = measure
        n = steps_in(options.seconds, partial(limit, jobs[0]))
        one, other = (partial(limit, of, n) for of in jobs)
        found = alternate(one, other, options.pairs)
        yield Comparison(f"the limit: {jobs[0].title}", "limit, uniform", *found)


def _small(store: Any, what: str, n: int, steps: int) -> float:
    """Return the seconds of a pull or a push of few rows, others each time."""
    table = store["emb"]
    rng = np.random.default_rng(0)
    sets = [rng.choice(table.rows, n, replace=False) for _ in range(1000)]
    values, at = np.full((n, DIM), 1e-3, np.float32), iter(range(10**9))

    def act() -> None:
        ids = sets[next(at) % 1000]
        if what == "push":
            table.push(ids, values)
        else:
            table.pull(ids, out=values)

    for _ in sets:  # a process that maps a shard meets its pages one after the other
        act()
    return timed(act, steps)


def _small_limit(rows: int, n: int, steps: int) -> float:
    table, (pull, _) = np.ones((rows, DIM), np.float32), loops()
    rng = np.random.default_rng(0)
    sets = [rng.choice(rows, n, replace=False) for _ in range(1000)]
    out, at = np.empty((n, DIM), np.float32), iter(range(10**9))
    return timed(lambda: pull(table, sets[next(at) % 1000], out), steps)


def _few_rows(client: Client, options: Namespace) -> Iterator[Comparison]:
    """Set small calls beside the loop alone, and into a large table beside a small one."""
    here, there = clusters.places(client, 1, 1)
    with (
        _store(client, options.large, there) as large,
        _store(client, _SMALL, there) as small,
    ):

        def at(*work: Any) -> Any:
            return lambda: client.submit(*work, workers=here, pure=False).result()

        steps, small_steps = 2000, 500
        ways = tuple(at(ways_of, large)())
        bare = at(_small_limit, options.large, 64, steps)
        found = alternate(at(_small, large, "pull", 64, steps), bare, options.pairs)
        yield Comparison("pull of 64 rows", "loop alone", *found, ways)
        how = "push", 10, small_steps
        found = alternate(
            at(_small, large, *how), at(_small, small, *how), options.pairs
        )
        title = f"push of 10 rows into {options.large:,}"
        yield Comparison(title, f"into {_SMALL:,}", *found, ways)


def _store(client: Client, rows: int | None, servers: list[str]) -> Any:
    spec = {"emb": daskps.TableSpec(rows, DIM, init=1.0)}
    rule = optim.SGD(float(RATE))
    return daskps.create(spec, client=client, optimizer=rule, shards=1, servers=servers)


def run(options: Namespace) -> None:
    """Measure and print."""
    report = Report("tables", options)
    how = {"cpu": options.cpu}
    jobs = [TableJob(options.rows, options.named, n, n, **how) for n in (1, 2)]
    for job in jobs:
        if options.job not in job.title:
            continue
        with command.cluster(options, job.trainers + job.servers) as client:
            for found in _beside_peers(client, job, options):
                if isinstance(found, Comparison):
                    report.add(found)
                else:
                    report.missing[found[0]] = found[1]
    if options.job in f"{jobs[0].title}, any ids":
        with command.cluster(options, 2) as client:
            report.add(_any_ids(client, jobs[0], options))
            report.add(_first_pushes(client, jobs[0], options))
    if options.job in "zipf":
        with command.cluster(options, 2) as client:
            for found in _zipf(client, jobs[0], options):
                report.add(found)
    if options.job in "few rows":
        with command.cluster(options, 2) as client:
            for found in _few_rows(client, options):
                report.add(found)
    report.end()
