"""The areas of a shard's memory: one table, from which all else follows."""

from __future__ import annotations

import math
from collections import deque
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from daskps.backend.host import PAGE_NBYTES
from daskps.kernels import index_probe
from daskps.kernels.index_memory import SWEPT_WORDS, WORDS_OF_AN_ID
from daskps.layout.arrays import ALIGN_NBYTES, align, compute_dtype
from daskps.layout.slots import slot_dtype, width
from daskps.layout.spans import ROWS, WEIGHTS, slot_area
from daskps.layout.tables import UnboundedPiece
from daskps.limits import MOST_PUSHED_ROWS, MOST_REMOVED_ROWS
from daskps.shards.memory import feed
from daskps.shards.memory.format import HEADER_WORDS, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from daskps.layout.arrays import Layout
    from daskps.layout.tables import TablePiece
    from daskps.typing import Array

#: Second buffers of so many bytes may get their pages after the rest of a segment.
SPARE_NBYTES = 2**20
#: Names of areas, beside those of :mod:`daskps.layout.spans`.
HEADER: Final = "header"
RECORD: Final = "record"
UNDO: Final = "undo"
LOG_IDS: Final = "log ids"
LOG: Final = "log"
WORDS_LOG: Final = "log words"
INDEX_HEAD: Final = "index head"
KEYS: Final = "keys"
STATE: Final = "state"
INDEX: Final = "index"
FEED_HEAD: Final = "feed head"
FEED_ENTRIES: Final = "feed entries"
FEED_IDS: Final = "feed ids"
#: Of those in every segment the ones that are in host memory always.
_WORDS: Final = {HEADER, RECORD, UNDO, LOG_IDS, FEED_HEAD, FEED_ENTRIES, FEED_IDS}
#: Words that a table has for itself.
_UNDO_WORDS = 8
#: Entries of the log of words that a push takes beside those of its ids.
MORE_WORDS = 64
#: Entries of an index: at least, and for each row that there may ever be.
FEWEST_SLOTS = 1024
#: The first size of an unbounded table: bytes of rows, and entries of its log.
FIRST_NBYTES = 2**16
FIRST_LOG = 256
MOST_SLOTS = 4


class Area(NamedTuple):
    """Arrays of one dtype and shape, one behind the other."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    #: How many there are: two where one is written while the other is read.
    buffers: int
    #: Where the first of them begins, and how far from it the next one does, in bytes.
    offset: int
    stride: int
    #: Of how many of the first dimension there is memory to begin with, None for all:
    #: rows unbounded come later, and their memory with them.
    first: int | None = None

    @property
    def held(self) -> tuple[int, int]:
        """From where to where there is memory to begin with, in bytes."""
        if self.first is None:
            return self.offset, self.stop
        one = math.prod(self.shape[1:]) * _itemsize(self.dtype)
        return self.offset, self.offset + self.first * one

    @property
    def has_values(self) -> bool:
        """Whether these are weights, rows, slots, or what a log keeps of rows and slots."""
        return self.name not in _WORDS

    @property
    def stop(self) -> int:
        """Where the memory behind it begins."""
        return self.offset + self.buffers * self.stride

    def views(self, memory: Array, start: int = 0) -> tuple[Array, ...]:
        """Return its arrays in memory that begins at byte `start` of a segment."""
        nbytes = math.prod(self.shape) * _itemsize(self.dtype)
        at = [self.offset - start + i * self.stride for i in range(self.buffers)]
        return tuple(
            memory[a : a + nbytes].view(self.dtype).reshape(self.shape) for a in at
        )


@cache
def _itemsize(dtype: str) -> int:
    return np.dtype(dtype).itemsize


def areas_of(
    layout: Layout,
    shard: int,
    slots: Mapping[int, Sequence[float]],
    *,
    durable: bool = False,
) -> list[Area]:
    """Return the areas of a segment, in order.

    Parameters
    ----------
    layout : Layout
        The store's layout.
    shard : int
        Index of the shard.
    slots : mapping of int to sequence of float
        For each parameter index the initial value of each optimizer slot.
    durable : bool, default False
        Whether the slots have two buffers.

    Returns
    -------
    list of Area
        Header, record, the weights of each dtype, of each piece its slots, and then of
        each table its undo word, rows, slots and the log of them; where it is
        unbounded, also the log of words and the areas of its index; and its feed.
    """
    areas: list[Area] = []
    at = 0

    def add(
        name: str, dtype: str, *shape: int, buffers: int = 1, first: int | None = None
    ) -> None:
        nonlocal at
        is_paged = name in (WEIGHTS, ROWS) or first is not None
        to = PAGE_NBYTES if is_paged else ALIGN_NBYTES
        at, stride = align(at, to), align(math.prod(shape) * _itemsize(dtype), to)
        areas.append(Area(name, dtype, shape, buffers, at, stride, first))
        at += buffers * stride

    pieces, tables = layout.pieces[shard], layout.table_pieces[shard]
    add(HEADER, "int64", HEADER_WORDS)
    add(RECORD, "int64", Record.n_words(len(pieces), len(tables)), buffers=2)
    for dtype, n in layout.n_elements[shard].items():
        add(WEIGHTS, dtype, n, buffers=2)
    for piece in pieces:
        first_values = slots.get(piece.parameter.index, ())
        dtype = slot_dtype(piece.parameter.dtype, first_values)
        for slot in range(len(first_values)):
            add(slot_area(slot), dtype, piece.size, buffers=1 + durable)
    for of in tables:
        table = of.table
        widths = [width(v, table.dim) for v in slots.get(table.index, ())]
        computed, n, rows, log = compute_dtype(table.dtype), of.n_rows, None, None
        if isinstance(of, UnboundedPiece):
            n, rows, log = of.room, first_rows(of), first_log(of)
        n_log = log_of(of)
        add(UNDO, "int64", _UNDO_WORDS)
        add(ROWS, table.dtype, n, table.dim, first=rows)
        for slot, wide in enumerate(widths):
            add(slot_area(slot), computed, n, wide, first=rows)
        add(LOG_IDS, "int64", n_log, first=log)
        add(LOG, table.dtype, n_log, table.dim, first=log)
        for slot, wide in enumerate(widths):
            add(f"{LOG} {slot_area(slot)}", computed, n_log, wide, first=log)
        if isinstance(of, UnboundedPiece):
            words, n_words = 2 * first_words(of), 2 * most_words(of)
            add(WORDS_LOG, "int64", n_words, first=words)
            add(INDEX_HEAD, "int64", index_probe.N_HEAD)
            add(KEYS, "int64", n, first=rows)
            add(STATE, "int64", n, first=rows)
            slots_of = 2 * MOST_SLOTS * of.most_ids + 2 * FEWEST_SLOTS
            add(f"{INDEX} 0", "int64", slots_of, first=2 * FEWEST_SLOTS)
            add(f"{INDEX} 1", "int64", slots_of, first=0)
        _add_feed(add, of, n)
    return areas


def _add_feed(add: Callable[..., None], piece: TablePiece, n_rows: int) -> None:
    """Add the areas of the feed of a piece that has so many rows at most."""
    n, first = feed.room_of(n_rows), first_feed(piece)
    k, first_k = feed.entries_of(n), feed.entries_of(first)
    is_whole = piece.table.is_bounded
    add(FEED_HEAD, "int64", feed.HEAD_WORDS)
    more = None if is_whole else first_k
    add(FEED_ENTRIES, "int64", k, feed.ENTRY_WORDS, first=more)
    add(FEED_IDS, "int64", n, first=None if is_whole else first)


def first_rows(piece: UnboundedPiece) -> int:
    """Return how many unbounded rows there is memory for to begin with."""
    if piece.of.max_rows:
        return piece.room
    return min(piece.room, max(1, FIRST_NBYTES // max(1, piece.table.row_nbytes)))


def first_log(piece: UnboundedPiece) -> int:
    """Return how many entries of its log of rows there is memory for to begin with."""
    return min(log_of(piece), FIRST_LOG)


def first_feed(piece: TablePiece) -> int:
    """Return how many ids the feed of a piece has memory for to begin with."""
    if isinstance(piece, UnboundedPiece):
        return min(feed.room_of(piece.room), feed.FIRST_IDS)
    return feed.room_of(piece.n_rows)


def first_words(piece: UnboundedPiece) -> int:
    """Return how many entries of its log of words there is memory for to begin with."""
    first = _words(piece, max(first_log(piece), MOST_REMOVED_ROWS))
    return min(first, most_words(piece))


def most_words(piece: UnboundedPiece) -> int:
    """Return how many entries its log of words ever has."""
    # A push may name more ids than there are rows: each makes room for the next.
    n = 2 * MOST_PUSHED_ROWS if piece.of.max_rows else log_of(piece)
    return _words(piece, n)


def _words(piece: UnboundedPiece, n: int) -> int:
    """Return how many words change with so many ids, and with those whose time is over."""
    swept = SWEPT_WORDS if piece.of.ttl else 0
    return n * WORDS_OF_AN_ID + MORE_WORDS + swept


def log_of(piece: TablePiece) -> int:
    """Return how many entries the log of rows of a piece ever has."""
    if isinstance(piece, UnboundedPiece):
        # A row that another id had is logged before its first values, and after.
        return 2 * min(piece.room, MOST_PUSHED_ROWS)
    return min(piece.n_rows, MOST_PUSHED_ROWS)


def held_parts(areas: Sequence[Area]) -> list[tuple[int, int]]:
    """Return from where to where a segment has memory to begin with, in order."""
    found: list[tuple[int, int]] = []
    for area in areas:
        start, stop = area.held
        if found and start - found[-1][1] < PAGE_NBYTES:
            found[-1] = found[-1][0], stop
        elif start < stop:
            found.append((start, stop))
    return found


def spare_parts(areas: Sequence[Area]) -> list[tuple[int, int]]:
    """Return where the pages are that nothing needs before the first publication.

    Those of second buffers, of areas that have many of them; in order.
    """
    found: list[tuple[int, int]] = []
    for area in areas:
        start, stop = area.offset + area.stride, area.stop
        start, stop = align(start, PAGE_NBYTES), stop - stop % PAGE_NBYTES
        if area.buffers > 1 and stop - start >= SPARE_NBYTES:
            found.append((start, stop))
    return found


def without(
    parts: Sequence[tuple[int, int]], holes: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return what is left of parts without holes in them; both are in order.

    Examples
    --------
    >>> without([(0, 10), (20, 30)], [(4, 6), (20, 25)])
    [(0, 4), (6, 10), (25, 30)]
    """
    found, rest = [], deque(holes)
    for start, stop in parts:
        at = start
        while rest and rest[0][0] < stop:
            hole, end = rest.popleft()
            if at < hole:
                found.append((at, hole))
            at = end
        if at < stop:
            found.append((at, stop))
    return found
