"""Where everything is in the memory of a shard: one table, from which all else follows."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from daskps.layout.arrays import ALIGN_NBYTES, align, compute_dtype
from daskps.layout.spans import ROWS, WEIGHTS, slot_area
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
#: Words that a table has for itself.
_UNDO_WORDS = 8


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
        each table its undo word, rows, slots and the log of them.
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
        n_log = min(of.n_rows, MOST_PUSHED_ROWS)
        add(UNDO, "int64", _UNDO_WORDS)
        add(ROWS, table.dtype, of.n_rows, table.dim)
        for slot in range(n_slots):
            add(slot_area(slot), compute_dtype(table.dtype), of.n_rows, table.dim)
        add(LOG_IDS, "int64", n_log)
        add(LOG, table.dtype, n_log, table.dim)
        for slot in range(n_slots):
            add(
                f"{LOG} {slot_area(slot)}", compute_dtype(table.dtype), n_log, table.dim
            )
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
