"""What rows of a table cost in a shard, beside loops that nothing protects.

The limit pulls and pushes as fast as memory lets it: it asks for rows ahead of their turn,
and knows no lock, no bounds, no repeats, no NaN and no log of what was there. Ours do all of
this but the lock. Tables are in shared memory, and each call names other rows, so that few
of them are still in a cache. Times are those of the thread on the CPU; both sides of a line
run in turn, and the ratio is the median over the pairs of our time over the peer's.
"""

from __future__ import annotations

import itertools
import statistics
import time
from functools import partial
from mmap import mmap
from typing import TYPE_CHECKING

import numpy as np

from daskps import optim
from daskps.kernels import plain, row_moves, row_repeats, row_split
from daskps.kernels.interface import TableRows, UndoLog
from tests.benchmarks.options import number
from tests.benchmarks.peers.tables import DIM, LIMITS, RATE, ZIPF
from tests.benchmarks.row_rounds import RoundOfRows

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from daskps.typing import Array

    Action: TypeAlias = Callable[[], object]
    #: Our name and action, the peer's name and action.
    Line: TypeAlias = tuple[str, Action, str, Action]

OPTIONS = (
    number("--rows", 1_000_000, "of the table"),
    number("--named", 10_000, "rows of a pull and a push"),
    number("--many", 100_000, "rows of an update by Adagrad"),
    number("--large", 2**22, "rows of the large table of a small push"),
    number("--pairs", 41),
    ("--cache-dir", {"help": "of compiled kernels [in memory]"}),
)
_EPS = np.float32(1e-10)
#: Sets of ids that are used in turn.
_SETS = 31
#: Rows of a small push, and of the smaller one of the tables that it goes to.
_FEW, _SMALL = 10, 2**12


def run(options: Namespace) -> None:
    """Measure and print a table."""
    print(
        f"{options.rows:,} rows of {DIM} float32, {options.named:,} of them in a call, "
        f"medians of {options.pairs} pairs"
    )
    print(f"{'ours':<34}{'us':>9}  {'peer':<34}{'us':>9}  {'ratio':>5}  range")
    for line in _lines(options):
        print(_compare(line, options.pairs), flush=True)


class LoopTable:
    """A table in shared memory, its log, and what is done to it."""

    def __init__(self, rows: int, named: int, cache_dir: str | None) -> None:
        self.cache_dir = cache_dir
        self.w, self.total = _shared(rows, DIM), _shared(rows, DIM)
        self.out = np.zeros((named, DIM), np.float32)
        numbers = np.frombuffer(mmap(-1, 8 * named), np.int64)
        log, logged = _shared(named, DIM), _shared(named, DIM)
        self.log = UndoLog(numbers, log, (logged,), np.zeros(1, np.int64), 0)
        self._rules = [
            optim.bind(rule, np.float32, cache_dir=cache_dir)
            for rule in (optim.SGD(float(RATE)), optim.Adagrad(float(RATE), eps=1e-10))
        ]
        self.limits = plain(LIMITS, cache_dir=cache_dir, alone=True).function

    def push(self, ids: Array, g: Array) -> None:
        """Apply SGD as a shard does, of ids that may repeat."""
        at = None
        if not row_repeats.are_distinct(ids, 0, len(self.w), cache_dir=self.cache_dir):
            found = row_repeats.repeats(ids, cache_dir=self.cache_dir)
            ids, g = found.ids, found.sum(g)
        self._apply(TableRows(self.w), ids, at, g, rule=0)

    def adagrad(self, ids: Array, g: Array) -> None:
        """Apply Adagrad as a shard does."""
        row_repeats.are_distinct(ids, 0, len(self.w), cache_dir=self.cache_dir)
        self._apply(TableRows(self.w, (self.total,)), ids, None, g, rule=1)

    def pull(self, ids: Array) -> None:
        """Read rows as a shard does."""
        out = self.out[: len(ids)]
        row_moves.gather(self.w, ids, out, cache_dir=self.cache_dir)

    def both(self, ids: Array, g: Array) -> None:
        """Pull and push."""
        self.pull(ids)
        self.push(ids, g)

    def halves(self, ids: Array, g: Array) -> None:
        """Pull and push where two shards have a half of the table each."""
        half, rows = len(self.w) // 2, len(self.w)
        split = row_split.split(
            ids, np.array([0, half, rows]), cache_dir=self.cache_dir
        )
        if split is None or split.pos is None:
            raise ValueError("ids outside")
        ends = itertools.pairwise(split.starts)
        parts = [
            (slice(a, b), first) for (a, b), first in zip(ends, (0, half), strict=True)
        ]
        tables = [(part, self.w[first : first + half], first) for part, first in parts]
        for part, w, first in tables:
            at = split.pos[part]
            ours = split.ids[part]
            row_moves.gather(
                w, ours, self.out, at, first=first, cache_dir=self.cache_dir
            )
        for part, w, first in tables:
            ours = split.ids[part]
            row_repeats.are_distinct(ours, first, len(w), cache_dir=self.cache_dir)
            self._apply(TableRows(w, (), first), ours, split.pos[part], g, rule=0)

    def limit_pull(self, ids: Array) -> None:
        """Read rows without anything."""
        self.limits("limit_pull")(self.w, ids, self.out)

    def limit_push(self, ids: Array, g: Array) -> None:
        """Apply SGD without anything."""
        self.limits("limit_push")(self.w, ids, g, RATE)

    def limit(self, ids: Array, g: Array) -> None:
        """Pull and push without anything."""
        self.limit_pull(ids)
        self.limit_push(ids, g)

    def _apply(
        self, table: TableRows, ids: Array, at: Array | None, g: Array, *, rule: int
    ) -> None:
        bound = self._rules[rule]
        log = self.log if rule else self.log._replace(slots=())
        bound.rows(table, ids, at, g, bound.scalars(1), log, check=True)


def _lines(options: Namespace) -> list[Line]:
    rng = np.random.default_rng(0)
    rows, named, many = options.rows, options.named, min(options.many, options.rows)
    table = LoopTable(rows, max(named, many), options.cache_dir)
    uniform = [rng.choice(rows, named, replace=False) for _ in range(_SETS)]
    zipf = [rng.zipf(ZIPF, named) % rows for _ in range(_SETS)]
    distinct = [rng.choice(rows, len(np.unique(ids)), replace=False) for ids in zipf]
    large = [rng.choice(rows, many, replace=False) for _ in range(8)]
    g, g_large = (rng.standard_normal((n, DIM), np.float32) for n in (named, many))

    def at_once(ids: Array) -> None:
        np.add.at(table.total, ids, g_large * g_large)
        step = RATE * g_large / (np.sqrt(table.total[ids]) + _EPS)
        np.add.at(table.w, ids, -step)

    def in_place(ids: Array) -> None:
        loop = table.limits("limit_adagrad")
        loop(table.w, table.total, ids, g_large, RATE, _EPS)

    # Turns that both sides take, or the second one would find in a cache what the first
    # has read.
    turns, turns_large = itertools.cycle(uniform), itertools.cycle(large)
    limit = "limit", _each(turns, lambda ids: table.limit(ids, g))
    both = _each(turns, lambda ids: table.both(ids, g))
    halves = _each(turns, lambda ids: table.halves(ids, g))
    adagrad = _each(turns_large, lambda ids: table.adagrad(ids, g_large))
    repeated = _each(itertools.cycle(zipf), lambda ids: table.both(ids, g))
    as_many = _each(
        itertools.cycle(distinct), lambda ids: table.both(ids, g[: len(ids)])
    )
    law, updates = f"pull + push, Zipf ({ZIPF})", f"Adagrad of {many:,} rows"
    return [
        ("pull + push", both, *limit),
        ("pull + push, two shards", halves, *limit),
        (updates, adagrad, "loop in place", _each(turns_large, in_place)),
        (updates, adagrad, "np.add.at", _each(turns_large, at_once)),
        (law, repeated, "uniform, as many different rows", as_many),
        (law, repeated, "uniform, as many ids", both),
        _small_push(options),
        _round(options),
    ]


def _round(options: Namespace) -> Line:
    """Return what compares a round of two ranks and its parts."""
    one = RoundOfRows(options.rows, options.named, DIM, options.cache_dir)
    return f"BSP round, 2 x {options.named:,} rows", one.whole, "its parts", one.parts


def _small_push(options: Namespace) -> Line:
    """Return what compares a push of few rows into a large table and a small one."""
    rng, actions = np.random.default_rng(1), []
    g = rng.standard_normal((_FEW, DIM), np.float32)
    for rows in (options.large, _SMALL):
        table = LoopTable(rows, _FEW, options.cache_dir)
        sets = [rng.choice(rows, _FEW, replace=False) for _ in range(1000)]
        actions.append(_each(itertools.cycle(sets), partial(_push, table, g), 500))
    large, small = actions
    into = f"into {options.large:,}", f"into {_SMALL:,}"
    return f"push of {_FEW} rows {into[0]}", large, into[1], small


def _push(table: LoopTable, g: Array, ids: Array) -> None:
    table.push(ids, g)


def _each(turns: Iterator[Array], act: Callable[[Array], object], n: int = 1) -> Action:
    """Return an action on the next sets of ids, so many times."""

    def action() -> None:
        for _ in range(n):
            act(next(turns))

    return action


def _shared(rows: int, dim: int) -> Array:
    """Return ones in shared memory, all of it there."""
    made = np.frombuffer(mmap(-1, rows * dim * 4), np.float32).reshape(rows, dim)
    made[:] = 1
    return made


def _compare(line: Line, pairs: int) -> str:
    """Return a line of the table."""
    name, ours, peer_name, peer = line
    for action in (ours, peer, ours, peer):
        action()
    times = [(_microseconds(ours), _microseconds(peer)) for _ in range(pairs)]
    ratios = [a / b for a, b in times]
    a, b = (statistics.median(column) for column in zip(*times, strict=True))
    return (
        f"{name:<34}{a:9.0f}  {peer_name:<34}{b:9.0f}  "
        f"{statistics.median(ratios):5.2f}  {min(ratios):.2f} to {max(ratios):.2f}"
    )


def _microseconds(action: Action) -> float:
    began = time.thread_time()
    action()
    return 1e6 * (time.thread_time() - began)
