"""Rows of a table in a shard, beside loops that nothing protects.

The limit pulls and pushes as fast as memory lets it: it asks for rows ahead of their turn,
and knows no lock, no bounds, no repeats, no NaN and no log of what was there. Ours do all of
this but the lock. Tables are in shared memory, and each call names other rows, so that few
of them are still in a cache. Times are those of the thread on the CPU.
"""

from __future__ import annotations

import itertools
import time
from functools import partial
from mmap import mmap
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from daskps import optim
from daskps.kernels import plain, row_moves, row_repeats, row_split
from daskps.kernels.row_log import TableRows, UndoLog
from daskps.kernels.system import fetch
from daskps.kernels.words import TYPES
from tests.benchmarks.command import benchmark, number
from tests.benchmarks.row_rounds import RoundOfRows
from tests.benchmarks.samples import Job, Side, seconds

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator

    from daskps.kernels.words import Ids
    from daskps.typing import Array

    Rows: TypeAlias = Any
    Single: TypeAlias = Any

#: Weights of a row, and the learning rate.
DIM, RATE = 64, np.float32(1e-3)
#: Sets of ids that are used in turn, so that few of their rows are in a cache.
SETS = 31
#: Of Zipf's law, for ids that repeat.
ZIPF = 1.1
_EPS = np.float32(1e-10)
#: Rows of a small push, and of the smaller one of the tables that it goes to.
_FEW, _SMALL = 10, 2**12


def limit_pull(w: Rows, ids: Ids, out: Rows) -> None:
    """Copy rows out, each asked for before its turn."""
    for k in range(ids.size):
        row = np.uint64(ids[k])
        fetch(w, ids[min(k + 8, ids.size - 1)])
        for i in range(w.shape[1]):
            out[k, i] = w[row, i]


def limit_push(w: Rows, ids: Ids, g: Rows, lr: Single) -> None:
    """Apply SGD to rows in place."""
    for k in range(ids.size):
        row = np.uint64(ids[k])
        fetch(w, ids[min(k + 8, ids.size - 1)])
        for i in range(w.shape[1]):
            w[row, i] -= lr * g[k, i]


def limit_adagrad(
    w: Rows, total: Rows, ids: Ids, g: Rows, lr: Single, eps: Single
) -> None:
    """Apply Adagrad to rows in place."""
    for k in range(ids.size):
        later, row = ids[min(k + 8, ids.size - 1)], np.uint64(ids[k])
        fetch(w, later)
        fetch(total, later)
        for i in range(w.shape[1]):
            total[row, i] += g[k, i] * g[k, i]
            w[row, i] -= lr * g[k, i] / (np.sqrt(total[row, i]) + eps)


TYPES |= {"Rows": "write(types.float32).copy(ndim=2)", "Single": "types.float32"}
LIMITS = (limit_pull, limit_push, limit_adagrad)


def limits(cache_dir: str | None) -> Callable[[str], Callable[..., Any]]:
    """Return what gives these loops by their names."""
    return plain(LIMITS, cache_dir).function


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
        self.limits = limits(cache_dir)

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


def _shared(rows: int, dim: int) -> Array:
    """Return ones in shared memory, all of it there."""
    made = np.frombuffer(mmap(-1, rows * dim * 4), np.float32).reshape(rows, dim)
    made[:] = 1
    return made


def _side(turns: Iterator[Any], act: Callable[[Any], object], n: int = 1) -> Side:
    """Return a side of calls on the next sets of ids."""
    return partial(_taken, turns, act, n)


def _taken(turns: Iterator[Any], act: Callable[[Any], object], n: int) -> float:
    return n * seconds(lambda: act(next(turns)), n, time.thread_time)


def _small_push(rows: int, cache_dir: str | None) -> Side:
    rng, table = np.random.default_rng(1), LoopTable(rows, _FEW, cache_dir)
    g = rng.standard_normal((_FEW, DIM), np.float32)
    sets = [rng.choice(rows, _FEW, replace=False) for _ in range(1000)]
    return _side(itertools.cycle(sets), lambda ids: table.push(ids, g), 500)


@benchmark(
    "rows",
    "rows of a table under an undo log, beside loops without",
    number("--rows", 1_000_000, "of the table"),
    number("--named", 10_000, "rows of a pull and a push"),
    number("--many", 100_000, "rows of an update by Adagrad"),
    number("--large", 2**22, "rows of the large table of a small push"),
    ("--cache-dir", {"help": "of compiled kernels [in memory]"}),
    pairs=41,
)
def rows(options: Namespace) -> Iterator[Job]:
    """Yield pulls, pushes and rounds of rows."""
    rng, cache_dir = np.random.default_rng(0), options.cache_dir
    n, named, many = options.rows, options.named, min(options.many, options.rows)
    table = LoopTable(n, max(named, many), cache_dir)
    zipf = [rng.zipf(ZIPF, named) % n for _ in range(SETS)]
    distinct = [rng.choice(n, len(np.unique(ids)), replace=False) for ids in zipf]
    g, g_large = (rng.standard_normal((k, DIM), np.float32) for k in (named, many))

    def at_once(ids: Array) -> None:
        np.add.at(table.total, ids, g_large * g_large)
        step = RATE * g_large / (np.sqrt(table.total[ids]) + _EPS)
        np.add.at(table.w, ids, -step)

    def in_place(ids: Array) -> None:
        loop = table.limits("limit_adagrad")
        loop(table.w, table.total, ids, g_large, RATE, _EPS)

    # Turns that both sides take, or the second one would find in a cache what the first
    # has read.
    turns, turns_large = (
        itertools.cycle([rng.choice(n, k, replace=False) for _ in range(sets)])
        for k, sets in ((named, SETS), (many, 8))
    )
    limit = _side(turns, lambda ids: table.limit(ids, g))
    both = _side(turns, lambda ids: table.both(ids, g))
    halves = _side(turns, lambda ids: table.halves(ids, g))
    jobs: dict[str, dict[str, Side]] = {
        "pull + push": {"ours": both, "limit": limit},
        "pull + push, two shards": {"ours": halves, "limit": limit},
        f"Adagrad of {many:,} rows": {
            "ours": _side(turns_large, lambda ids: table.adagrad(ids, g_large)),
            "loop in place": _side(turns_large, in_place),
            "np.add.at": _side(turns_large, at_once),
        },
        f"pull + push, Zipf ({ZIPF})": {
            "ours": _side(itertools.cycle(zipf), lambda ids: table.both(ids, g)),
            "as many different rows": _side(
                itertools.cycle(distinct), lambda ids: table.both(ids, g[: len(ids)])
            ),
            "as many ids": both,
        },
    }
    for title, sides in jobs.items():
        yield Job(title, sides, warm=2)
    into = {f"into {size:,}": size for size in (options.large, _SMALL)}
    pushes = {name: _small_push(size, cache_dir) for name, size in into.items()}
    yield Job(f"500 pushes of {_FEW} rows", pushes, warm=2)
    one = RoundOfRows(n, named, DIM, cache_dir)
    acts = {"whole": one.whole, "its parts": one.parts}
    timed = {k: partial(seconds, a, 1, time.thread_time) for k, a in acts.items()}
    yield Job(f"BSP round, 2 x {named:,} rows", timed, warm=2)
