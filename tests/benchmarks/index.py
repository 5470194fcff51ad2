"""Rows by id in a shard: the cost to find them, to make them, and to grow.

Ids are random, and each look-up names others, so that few entries are still in a cache. The
peer of a look-up reads one entry an id, at random and asked for ahead of its turn, and knows
neither ids nor homes. Rows come in pushes of so many new ids, as they do in a shard: the
words that change go to their log, and the index grows a part at a time. Of ids that have
rows a push looks up which, and with `ttl` or `max_rows` says of each that it was pushed.
Times are those of the thread on the CPU, but the longest push, which is by the clock.
"""

from __future__ import annotations

import functools
import itertools
import time
from mmap import mmap
from typing import TYPE_CHECKING

import numpy as np

from daskps.kernels import index_probe as at
from daskps.kernels import plain
from daskps.kernels.row_index import RowIndex
from daskps.kernels.system import fetch_to_read
from daskps.kernels.words_log import WordsLog
from tests.benchmarks.command import benchmark, number, numbers
from tests.benchmarks.samples import Job, seconds

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator

    from daskps.kernels.words import Ids, Longs
    from daskps.typing import Array
    from tests.benchmarks.samples import Side

#: Entries that are moved to a larger index for each new id.
_PACE = 16
#: Entries of an index at first, and those that there is room for, for each row.
_FIRST, _ROOM = 1024, 4


def limit(words: Ids, places: Ids, out: Longs) -> None:
    """Read one entry for each id."""
    for k in range(places.size):
        fetch_to_read(words, places[min(k + 16, places.size - 1)])
        out[k] = words[places[k]] + words[places[k] + 1]


_module = functools.cache(functools.partial(plain, (limit,)))


def _made(rows: int, named: int, cache_dir: str | None) -> tuple[RowIndex, WordsLog]:
    """Return an index in shared memory whose pages come as they are used."""
    sides = 2 * (_FIRST * 4 + _ROOM * (rows + 4 * named))
    sizes = [at.N_HEAD, rows + named, rows + named, sides, sides]
    starts = np.cumsum([0, *sizes])
    words = np.frombuffer(mmap(-1, 8 * int(starts[-1])), np.int64)
    places = np.stack([starts[:-1], sizes], 1).reshape(-1)
    index = RowIndex(words, places, cache_dir=cache_dir)
    index.begin(seed=1, rows=rows + named, slots=max(_FIRST, 2 * named))
    return index, WordsLog(
        np.zeros(32 * named + 64, np.int64), np.zeros(1, np.int64), 0
    )


def _push(index: RowIndex, log: WordsLog, ids: Array) -> tuple[float, float]:
    """Make rows of new ids; return the seconds of the CPU and of the clock."""
    rows = np.empty(len(ids), np.int64)
    began = time.thread_time(), time.perf_counter()
    n = len(ids)
    slots = int(index.head[at.SLOTS_0 + int(index.head[at.SIDE])])
    is_full = 8 * (int(index.head[at.USED]) + n) > 7 * slots
    wanted = max(index.slots_wanted, 4 * n * is_full)
    if wanted and not index.is_building:
        index.start(wanted)
    if index.is_building and index.build(slots if is_full else _PACE * n):
        log = log._replace(begin=index.switch(log))
    index.look_up(ids, rows)
    index.take(ids, rows, log)
    took = time.thread_time() - began[0], time.perf_counter() - began[1]
    if log.begin:
        _clear(index)
    return took


def _clear(index: RowIndex) -> None:
    """Give a side that is not in force back: it reads as zeros."""
    start, n = index.places[2 * (at.SIDE_0 + 1 - int(index.head[at.SIDE])) :][:2]
    index.words[start : start + n] = 0


def _looks(
    index: RowIndex, log: WordsLog, ids: Array, options: Namespace
) -> Iterator[tuple[str, Side]]:
    """Yield looks: at ids that are there, at others, bare reads, and later pushes."""
    rng = np.random.default_rng(0)
    n, out = min(options.named, len(ids)), np.empty(options.named, np.int64)[: len(ids)]
    side = at.SIDE_0 + int(index.head[at.SIDE])
    start, slots = int(index.places[2 * side]), int(index.head[side + at.SLOTS_0 - 3])
    loop, clocks = _module(options.cache_dir).function("limit"), itertools.count(1)

    def entries() -> Array:
        return start + 2 * rng.integers(0, slots, n)

    def known() -> Array:
        return rng.choice(ids, n)

    acts: dict[str, tuple[Callable[[], Array], Callable[[Array], object]]] = {
        "found": (known, lambda named: index.look_up(named, out)),
        "bare read": (entries, lambda places: loop(index.words, places, out)),
        "absent": (known, lambda named: index.look_up(named ^ 1, out)),
        "later push": (known, lambda named: _again(index, log, named, next(clocks))),
    }
    for name, (make, act) in acts.items():
        yield name, functools.partial(_look, make, act, n)


def _look(make: Callable[[], Array], act: Callable[[Array], object], n: int) -> float:
    named = make()
    return seconds(lambda: act(named), 1, time.thread_time) / n


def _again(index: RowIndex, log: WordsLog, ids: Array, clock: int) -> None:
    """Push ids that have rows, in a table that keeps when each was pushed."""
    rows = np.empty(len(ids), np.int64)
    index.look_up(ids, rows)
    index.take(ids, rows, log, stamp=clock)


def _rebuild(index: RowIndex, slots: int) -> float:
    """Return the seconds that it takes to move all entries to a larger index at once."""
    index.start(0)
    _clear(index)
    index.start(slots + slots // 2)
    began = time.perf_counter()
    index.build(slots)
    return time.perf_counter() - began


@benchmark(
    "index",
    "rows by id: to find them, to make them, to grow",
    numbers("--rows", [1_000_000, 10_000_000], "of the tables"),
    number("--named", 10_000, "ids of a push and of a look-up"),
    ("--cache-dir", {"help": "of compiled kernels [in memory]"}),
    pairs=61,
)
def index(options: Namespace) -> Iterator[Job | str]:
    """Yield what an id takes; then the longest push, and the index."""
    for rows in options.rows:
        named = min(options.named, rows)
        made, log = _made(rows, named, options.cache_dir)
        # Odd numbers times the number of a row: all different, and in no order.
        ids = np.arange(1, rows + 1) * 0x5851F42D4C957F2D
        _push(made, log, ids[:named] ^ 1)
        made.remove(ids[:named] ^ 1, log)
        pushes = [
            _push(made, log, ids[low : low + named]) for low in range(0, rows, named)
        ]
        cpu, clock = zip(*pushes, strict=True)
        yield Job(f"an id of {rows:,}", dict(_looks(made, log, ids, options)), warm=3)
        slots = int(made.head[at.SLOTS_0 + int(made.head[at.SIDE])])
        yield (
            f"  a new row takes {1e9 * sum(cpu) / rows:.0f} ns, the longest push "
            f"{1e3 * max(clock):.0f} ms, a rebuild {1e3 * _rebuild(made, slots):.0f} ms; "
            f"the index has {16 * slots / rows:.1f} bytes a row"
        )
