"""Room for rows of any ids: what a push takes, and whether there is memory for it.

The addresses of a segment are reserved for all rows that there may ever be; memory is there
for some. How much there is stands in the memory itself, in words that no publication rolls
back. More is taken by :mod:`daskps.shards.memory.growth`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from daskps.kernels import index_probe
from daskps.shards.arrays.any_rows import LOG_ROOM, SIDE_ROOM, WORDS_ROOM
from daskps.shards.memory import areas
from daskps.shards.memory.areas import (
    MORE_WORDS,
    WORDS_OF_AN_ID,
    first_log,
    first_rows,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.shards.arrays.any_rows import AnyRows
    from daskps.shards.arrays.rows import RowUpdate
    from daskps.shards.memory.tables import TableMemory
    from daskps.typing import Array


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
    """What updates of a table take: rows that are named, and those that are not there."""

    n: int
    n_new: int

    @classmethod
    def of(cls, updates: Sequence[RowUpdate]) -> Need:
        """Return what they take one after the other, or less."""
        new = sum(int((u.rows < 0).sum()) for u in updates if u.rows is not None)
        return cls(sum(len(u.ids) for u in updates), new)


def has_room(table: TableMemory, need: Need) -> bool:
    """Return whether a publication has room for updates of a table."""
    any_rows = table.any_rows
    if any_rows is None:
        return need.n <= table.room
    head, own = any_rows.head, any_rows.own
    return (
        logged(any_rows, need) <= own[LOG_ROOM]
        and words_of(need) <= own[WORDS_ROOM]
        and head[index_probe.USED] + need.n_new <= head[index_probe.ROWS]
        and fits(any_rows, need, any_rows.slots[any_rows.is_built])
    )


def begin_rows(table: TableMemory) -> None:
    """Make a table of any ids one without rows, in memory that is all zeros."""
    any_rows = table.any_rows
    if any_rows is None:
        return
    rows, log = first_rows(any_rows.piece), first_log(any_rows.piece)
    own, slots = any_rows.own, areas.FEWEST_SLOTS
    own[LOG_ROOM], own[WORDS_ROOM] = log, MORE_WORDS + log * WORDS_OF_AN_ID
    own[SIDE_ROOM] = slots
    any_rows.index.begin(seed=any_rows.hash_seed, rows=rows, slots=slots)


def held_nbytes(table: TableMemory) -> int:
    """Return how much memory there is for rows of any ids, beside what is always there."""
    any_rows = table.any_rows
    if any_rows is None:
        return 0
    own, (w, slots, _), log = any_rows.own, table.buffers.table, table.buffers.log
    of_row = sum(a.strides[0] for a in (w, *slots, any_rows.keys, any_rows.state))
    of_entry = sum(a.strides[0] for a in (log.rows, log.w, *log.slots))
    words = own[WORDS_ROOM] + own[SIDE_ROOM] + own[SIDE_ROOM + 1]
    rows = any_rows.head[index_probe.ROWS]
    return int(rows * of_row + own[LOG_ROOM] * of_entry + 16 * words)


def logged(any_rows: AnyRows, need: Need) -> int:
    """Return how many entries the log of rows takes at most."""
    return min(need.n + need.n_new, 2 * any_rows.piece.room)


def words_of(need: Need) -> int:
    """Return how many entries the log of words takes at most, about."""
    return MORE_WORDS + need.n + need.n_new * WORDS_OF_AN_ID


def fits(any_rows: AnyRows, need: Need, slots: int) -> bool:
    """Return whether an index of so many entries takes the new ids, with an eighth left."""
    head = any_rows.head
    used = int(head[index_probe.USED] + head[index_probe.CANDIDATES]) + need.n_new
    return 8 * (used + 1) <= 7 * slots
