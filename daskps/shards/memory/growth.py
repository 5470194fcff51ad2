"""Growth of unbounded tables: memory comes before the push that needs it.

It is taken a part at a time, always before a publication and never in one, and only by
the owner of the segment: a deputy hands over the push that needs some.

The index of a table grows on its other side: when it is half full, memory for a larger
one is taken and cleared over several pushes, then each of them copies some entries, and
the publication after the last puts it in force.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from daskps.errors import LayoutError, PushRejectedError
from daskps.kernels import index_probe
from daskps.shards.arrays.operations import PieceUpdate
from daskps.shards.arrays.row_operations import RowUpdate
from daskps.shards.arrays.unbounded_rows import (
    LOG_ROOM,
    READY,
    SIDE_ROOM,
    SWITCHED,
    WORDS_ROOM,
)
from daskps.shards.memory.format import ROWS_SEQUENCE
from daskps.shards.memory.room import (
    IDS_SLOTS,
    Need,
    fits,
    has_room,
    ids_after,
    words_of,
)

if TYPE_CHECKING:
    from daskps.shards.arrays.unbounded_rows import UnboundedRows
    from daskps.shards.memory.room import Memory
    from daskps.shards.memory.segment import Segment
    from daskps.shards.memory.table_memory import TableMemory
    from daskps.typing import Array

#: Memory is taken in parts of about so many bytes: to make and clear 64 MiB took 80 ms.
STEP_NBYTES: Final = 2**26
#: And of rows at least so many.
_LEAST_NBYTES: Final = 2**16
#: Entries of an index that are copied with each push, and with each new id in it: 5
#: would do, from two thirds full to seven eighths, but memory for the next one comes
#: first.
_COPIED: Final = 1024
_COPIED_AN_ID: Final = 8
#: Operations, each with the position of its piece; those of tables come after the
#: others.
Operations = list[tuple[int, PieceUpdate | RowUpdate]]


class OwnerOnlyError(Exception):
    """A push needs memory that only the owner of the shard takes; nothing was changed."""


def look_up(segment: Segment, table: TableMemory, ids: Array) -> Array:
    """Return the row of each id in an unbounded table, -1 for none; under the lock."""
    if (unbounded := table.unbounded) is None:
        raise TypeError(f"table {table.piece.table.name!r} has a number of rows")
    now = table.since(segment.current), segment.header[ROWS_SEQUENCE]
    return unbounded.find_again(ids, *now)


def _table(segment: Segment, position: int) -> TableMemory:
    """Return the table of an operation on rows; positions of arrays come first."""
    return segment.tables[position - len(segment.pieces)]


def make_room(segment: Segment, operations: Operations) -> None:
    """Take the memory that a publication of these operations needs, before it begins.

    Raises
    ------
    OwnerOnlyError
        On a deputy, where there is not enough.
    PushRejectedError
        Where no more is to be had; what there is has not changed.
    """
    for position, operation in operations:
        if not isinstance(operation, RowUpdate):
            continue
        table = _table(segment, position)
        if table.unbounded is None:
            continue
        need = Need.of([operation], table)
        try:
            provide(segment, table, table.unbounded, need)
        except LayoutError as error:
            piece, forget = table.piece, operation.forget
            new = "" if forget else f", {need.n_new:,} of them new"
            raise PushRejectedError(
                f"shard {piece.shard} has no room for a {'removal' if forget else 'push'} "
                f"of {len(operation.ids):,} rows of table {piece.table.name[:60]!r}{new}: "
                f"{error}; it has applied nothing of it"
            ) from error


def provide(
    segment: Segment, table: TableMemory, unbounded: UnboundedRows, need: Need
) -> None:
    """Take the memory that updates of an unbounded table need.

    Also do the next part of what its index needs to grow, where it does.

    Raises
    ------
    OwnerOnlyError
        On a deputy, where there is not enough.
    LayoutError
        Where no more is to be had; what there is has not changed.
    """
    index, own = unbounded.index, unbounded.own
    other = 1 - unbounded.side
    if index.is_building:
        if not unbounded.is_built:
            _copy(unbounded, _COPIED + _COPIED_AN_ID * need.n_new)
    elif need.n_new and (slots := index.slots_wanted):
        if segment.memory is None:
            raise OwnerOnlyError
        if _prepare(segment.memory, unbounded, slots, STEP_NBYTES // 16):
            own[READY] = 0
            index.start(slots)
    elif (
        own[SIDE_ROOM + other]
        and segment.memory is not None
        and segment.flip > own[SWITCHED]
    ):
        # Nobody goes back behind the publication that has left it.
        own[READY] = 0
        segment.memory.give(unbounded.entries(other)[: 2 * int(own[SIDE_ROOM + other])])
        own[SIDE_ROOM + other] = 0
    if not has_room(table, need):
        if segment.memory is None:
            raise OwnerOnlyError
        _grow(segment.memory, table, unbounded, need)


def _copy(unbounded: UnboundedRows, n: int) -> None:
    """Copy entries to the side that is being built; a side left half-way is given up."""
    index = unbounded.index
    if unbounded.head[index_probe.BUILT] & 1:
        unbounded.own[READY] = 0
        index.start(0)
    else:
        index.build(n)


def _prepare(
    memory: Memory, unbounded: UnboundedRows, slots: int, at_most: int
) -> bool:
    """Have zeros for a side of an index, some entries at a time; whether it has all."""
    own, other = unbounded.own, 1 - unbounded.side
    entries, ready = unbounded.entries(other), int(own[READY])
    if 2 * slots > len(entries):
        raise _no_more(unbounded, f"an index of {slots:,} entries")
    stop, there = min(slots, ready + at_most), int(own[SIDE_ROOM + other])
    if stop > there:
        memory.take([entries[2 * there : 2 * stop]])
        own[SIDE_ROOM + other] = stop
    if ready < there:
        memory.clear(entries[2 * ready : 2 * min(stop, there)])
    own[READY] = stop
    return stop == slots


def _grow(
    memory: Memory, table: TableMemory, unbounded: UnboundedRows, need: Need
) -> None:
    """Take all that a publication lacks."""
    _grow_rows(memory, table, unbounded, need)
    _grow_logs(memory, table, unbounded, need)
    if not fits(unbounded, need, unbounded.slots[unbounded.is_built]):
        head, index = unbounded.head, unbounded.index
        if index.is_building and not head[index_probe.BUILT] & 1:
            index.build(unbounded.slots[0])
            if fits(unbounded, need, unbounded.slots[1]):
                return
        unbounded.own[READY] = 0
        index.start(0)
        slots = max(index.slots_wanted, 3 * ids_after(unbounded, need))
        _prepare(memory, unbounded, slots, slots)
        unbounded.own[READY] = 0
        index.start(slots)
        index.build(unbounded.slots[0])


def _grow_rows(
    memory: Memory, table: TableMemory, unbounded: UnboundedRows, need: Need
) -> None:
    head, (w, slots, _) = unbounded.head, table.buffers.table
    now, room = int(head[index_probe.ROWS]), len(w)
    wanted = int(head[index_probe.USED]) + need.n_new
    if wanted <= now or unbounded.of.max_rows:
        return
    if wanted > room:
        raise _no_more(unbounded, f"{wanted:,} rows")
    nbytes = sum(a.strides[0] for a in (w, *slots, unbounded.keys, unbounded.state))
    more = max(_LEAST_NBYTES // nbytes, min(now // 8, STEP_NBYTES // nbytes))
    stop = min(room, max(wanted, now + more))
    arrays = w, *slots, unbounded.keys, unbounded.state
    memory.take([a[now:stop] for a in arrays])
    head[index_probe.ROWS] = stop


def _grow_logs(
    memory: Memory, table: TableMemory, unbounded: UnboundedRows, need: Need
) -> None:
    own, log = unbounded.own, table.buffers.log
    now, wanted = int(own[LOG_ROOM]), need.n_logged
    if wanted > now:
        stop = min(len(log.rows), max(wanted, 2 * now))
        memory.take([a[now:stop] for a in (log.rows, log.w, *log.slots)])
        own[LOG_ROOM] = stop
    now, wanted = int(own[WORDS_ROOM]), words_of(unbounded, need)
    words = unbounded.log
    if wanted > now:
        stop = min(len(words) // 2, max(wanted, 2 * now))
        memory.take([words[2 * now : 2 * stop]])
        own[WORDS_ROOM] = stop


def reserve(
    memory: Memory,
    table: TableMemory,
    unbounded: UnboundedRows,
    *,
    n_rows: int,
    n_ids: int,
) -> None:
    """Take the memory of so many rows and ids at once, in a table that has none yet.

    Raises
    ------
    LayoutError
        Where there is not so much; nobody has seen what was taken.
    """
    head, own, (w, slots, _) = unbounded.head, unbounded.own, table.buffers.table
    now = int(head[index_probe.ROWS])
    if n_rows > now:
        if n_rows > len(w):
            raise _no_more(unbounded, f"{n_rows:,} rows")
        arrays = w, *slots, unbounded.keys, unbounded.state
        memory.take([a[now:n_rows] for a in arrays])
        head[index_probe.ROWS] = n_rows
    entries, there, wanted = (
        unbounded.entries(0),
        int(own[SIDE_ROOM]),
        IDS_SLOTS * n_ids,
    )
    if wanted > there:
        if 2 * wanted > len(entries):
            raise _no_more(unbounded, f"an index of {wanted:,} entries")
        memory.take([entries[2 * there : 2 * wanted]])
        own[SIDE_ROOM] = head[index_probe.SLOTS_0] = wanted


def _no_more(unbounded: UnboundedRows, what: str) -> LayoutError:
    piece = unbounded.piece
    return LayoutError(
        f"shard {piece.shard} has addresses for {piece.room:,} rows of table "
        f"{piece.table.name[:60]!r}, and {what} are needed; nothing was applied there, "
        f"use more shards"
    )
