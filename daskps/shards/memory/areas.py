"""Where everything is in the memory of a shard: one table, from which all else follows."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from daskps.kernels import index_probe
from daskps.layout.arrays import ALIGN_NBYTES, align, compute_dtype
from daskps.layout.spans import ROWS, WEIGHTS, slot_area
from daskps.layout.tables import UnboundedPiece
from daskps.limits import MOST_PUSHED_ROWS
from daskps.shards.memory.format import HEADER_WORDS, Record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.layout.arrays import Layout
    from daskps.typing import Array

#: Weights begin at a page: copies into fresh memory, which does too, took 9 ms for
#: 64 MiB then, and 12 to 17 ms from other places within a page.
PAGE_NBYTES = 4096
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
#: Words that a table has for itself.
_UNDO_WORDS = 8
#: Words that change with an id that comes or goes, at most about, and entries of the log
#: that they take at a time beside those.
WORDS_OF_AN_ID = 40
MORE_WORDS = 64
#: Entries of an index: at least, and for each row that there may ever be.
FEWEST_SLOTS = 1024
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
        each table its undo word, rows, slots and the log of them; where it has any ids,
        also the log of words and the areas of its index.
    """
    areas: list[Area] = []
    at = 0

    def add(name: str, dtype: str, *shape: int, buffers: int = 1) -> None:
        nonlocal at
        to = PAGE_NBYTES if name in (WEIGHTS, ROWS) else ALIGN_NBYTES
        at, stride = align(at, to), align(math.prod(shape) * _itemsize(dtype), to)
        areas.append(Area(name, dtype, shape, buffers, at, stride))
        at += buffers * stride

    pieces, tables = layout.pieces[shard], layout.table_pieces[shard]
    add(HEADER, "int64", HEADER_WORDS)
    add(RECORD, "int64", Record.n_words(len(pieces), len(tables)), buffers=2)
    for dtype in layout.lengths:
        start, stop = layout.extent(shard, dtype)
        add(WEIGHTS, dtype, stop - start, buffers=2)
    for piece in pieces:
        dtype = compute_dtype(piece.parameter.dtype)
        for slot in range(len(slots.get(piece.parameter.index, ()))):
            add(slot_area(slot), dtype, piece.size, buffers=1 + durable)
    for of in tables:
        table, n_slots = of.table, len(slots.get(of.table.index, ()))
        is_any = isinstance(of, UnboundedPiece)
        n = of.room if isinstance(of, UnboundedPiece) else of.n_rows
        # A row that another id had is logged before its first values, and after.
        n_log = min(n, MOST_PUSHED_ROWS) * (1 + is_any)
        add(UNDO, "int64", _UNDO_WORDS)
        add(ROWS, table.dtype, n, table.dim)
        for slot in range(n_slots):
            add(slot_area(slot), compute_dtype(table.dtype), n, table.dim)
        add(LOG_IDS, "int64", n_log)
        add(LOG, table.dtype, n_log, table.dim)
        for slot in range(n_slots):
            add(
                f"{LOG} {slot_area(slot)}", compute_dtype(table.dtype), n_log, table.dim
            )
        if is_any:
            add(WORDS_LOG, "int64", 2 * (n_log * WORDS_OF_AN_ID + MORE_WORDS))
            add(INDEX_HEAD, "int64", index_probe.N_HEAD)
            add(KEYS, "int64", n)
            add(STATE, "int64", n)
            add(f"{INDEX} 0", "int64", 2 * MOST_SLOTS * n + 2 * FEWEST_SLOTS)
            add(f"{INDEX} 1", "int64", 2 * MOST_SLOTS * n + 2 * FEWEST_SLOTS)
    return areas


def untouched(nbytes: int) -> Array:
    """Return zeroed private memory, aligned to a page, whose pages are taken as they fill."""
    raw = np.zeros(nbytes + PAGE_NBYTES, dtype=np.uint8)
    start = -raw.ctypes.data % PAGE_NBYTES
    return raw[start : start + nbytes]


def private(nbytes: int) -> Array:
    """Return zeroed private memory whose pages exist, aligned to a page.

    Writing the zeros takes the page faults here instead of in the first update.
    """
    memory = untouched(nbytes)
    memory[:] = 0
    return memory
