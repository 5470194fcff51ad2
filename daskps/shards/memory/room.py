"""Room for unbounded rows: what a push takes, and whether there is memory for it.

The addresses of a segment are reserved for all rows that there may ever be; memory is
there for some. How much there is stands in the memory itself, in words that no
publication rolls back. More is taken by :mod:`daskps.shards.memory.growth`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from daskps.kernels import index_probe
from daskps.kernels.index_memory import SWEPT_WORDS, WORDS_OF_AN_ID
from daskps.layout.arrays import compute_dtype
from daskps.layout.buckets import n_buckets
from daskps.layout.slots import width
from daskps.layout.tables import UnboundedTable
from daskps.shards.arrays.unbounded_rows import (
    LOG_ROOM,
    SIDE_ROOM,
    WORDS_ROOM,
)
from daskps.shards.memory import areas
from daskps.shards.memory.areas import (
    MORE_WORDS,
    first_log,
    first_rows,
    first_words,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.layout.tables import Table
    from daskps.shards.arrays.row_operations import RowUpdate
    from daskps.shards.arrays.unbounded_rows import UnboundedRows
    from daskps.shards.memory.table_memory import TableMemory
    from daskps.typing import Array

#: Entries of an index that is made at once, for each id.
IDS_SLOTS = 3


class Memory(Protocol):
    """Gives parts of a segment memory, and takes it back."""

    def take(self, parts: Sequence[Array]) -> None:
        """Have memory behind these, all zeros; LayoutError where there is none."""

    def clear(self, part: Array) -> None:
        """Make zeros of it."""

    def give(self, part: Array) -> None:
        """Do without its memory; it is zeros when it is taken again."""


class Own:
    """Memory of one process that is all there from the beginning."""

    def take(self, parts: Sequence[Array]) -> None:
        """Do nothing."""

    def clear(self, part: Array) -> None:
        """Make zeros of it."""
        part[...] = 0

    def give(self, part: Array) -> None:
        """Make zeros of it."""
        part[...] = 0


class Need(NamedTuple):
    """The room that updates of a table take: their rows, and those that are new."""

    n: int
    n_new: int
    #: Those that are forgotten, which are not among the others.
    n_gone: int
    #: Entries of the log of rows.
    n_logged: int

    @classmethod
    def of(cls, updates: Sequence[RowUpdate], table: TableMemory) -> Need:
        """Return what they take one after the other, at most."""
        n, new, gone, logged = 0, 0, 0, 0
        # A row that another id had is logged before its first values, and after.
        most = 2 * len(table.rows)
        for update in updates:
            k, rows = len(update.ids), update.rows
            if update.forget:
                gone += k
                continue
            fresh = 0 if rows is None else int(np.count_nonzero(rows < 0))
            n, new, logged = n + k, new + fresh, logged + min(k + fresh, most)
        return cls(n, new, gone, logged)


def has_room(table: TableMemory, need: Need) -> bool:
    """Return whether a publication has room for updates of a table."""
    unbounded = table.unbounded
    if unbounded is None:
        return need.n <= table.room
    head, own = unbounded.head, unbounded.own
    has_rows = head[index_probe.USED] + need.n_new <= head[index_probe.ROWS]
    return (
        need.n_logged <= own[LOG_ROOM]
        and words_of(unbounded, need) <= own[WORDS_ROOM]
        and bool(has_rows or unbounded.of.max_rows)
        and fits(unbounded, need, unbounded.slots[unbounded.is_built])
    )


def begin_rows(table: TableMemory) -> None:
    """Make an unbounded table one without rows, in memory that is all zeros."""
    unbounded = table.unbounded
    if unbounded is None:
        return
    rows, log = first_rows(unbounded.piece), first_log(unbounded.piece)
    own, slots = unbounded.own, areas.FEWEST_SLOTS
    own[LOG_ROOM], own[WORDS_ROOM] = log, first_words(unbounded.piece)
    own[SIDE_ROOM] = slots
    buckets: dict[str, int] = {}
    if most := unbounded.of.max_rows:
        buckets = {"max_rows": most, "buckets": n_buckets(most)}
        buckets["first_bucket"] = unbounded.piece.first_bucket
    unbounded.index.begin(seed=unbounded.hash_seed, rows=rows, slots=slots, **buckets)


def held_nbytes(table: TableMemory) -> int:
    """Return how much memory there is for unbounded rows, beside what is always there."""
    unbounded = table.unbounded
    if unbounded is None:
        return 0
    own, (w, slots, _), log = unbounded.own, table.buffers.table, table.buffers.log
    of_row = sum(a.strides[0] for a in (w, *slots, unbounded.keys, unbounded.state))
    of_entry = sum(a.strides[0] for a in (log.rows, log.w, *log.slots))
    words = own[WORDS_ROOM] + own[SIDE_ROOM] + own[SIDE_ROOM + 1]
    rows, feed = unbounded.head[index_probe.ROWS], table.feed.nbytes
    return int(rows * of_row + own[LOG_ROOM] * of_entry + 16 * words + feed)


def rows_nbytes(
    table: Table, slots: Sequence[float], n_rows: int, n_candidates: int
) -> int:
    """Return how many bytes so many unbounded rows take, whose slots begin with these.

    Of memory that a segment does not have to begin with.
    """
    if isinstance(table, UnboundedTable) and table.of.max_rows:
        return 16 * IDS_SLOTS * (n_rows + n_candidates)
    of_row = table.row_nbytes + 2 * 8
    computed = np.dtype(compute_dtype(table.dtype)).itemsize
    of_row += sum(computed * width(v, table.dim) for v in slots)
    return of_row * n_rows + 16 * IDS_SLOTS * (n_rows + n_candidates)


def words_of(unbounded: UnboundedRows, need: Need) -> int:
    """Return how many entries the log of words takes at most, about."""
    swept = SWEPT_WORDS if unbounded.of.ttl else 0
    return MORE_WORDS + need.n + (need.n_new + need.n_gone) * WORDS_OF_AN_ID + swept


def ids_after(unbounded: UnboundedRows, need: Need) -> int:
    """Return how many ids the index has at most, after updates."""
    of, head = unbounded.of, unbounded.head
    rows = int(head[index_probe.USED]) + need.n_new
    if of.max_rows:
        rows = min(rows, unbounded.piece.room)
    # Some of these may be counted only, some of those that are counted get rows.
    more = need.n_new if of.admit_after > 1 and of.max_rows else 0
    return rows + int(head[index_probe.CANDIDATES]) + more


def fits(unbounded: UnboundedRows, need: Need, slots: int) -> bool:
    """Return whether an index of so many entries takes the new ids, with an eighth left."""
    return 8 * (ids_after(unbounded, need) + 1) <= 7 * slots
