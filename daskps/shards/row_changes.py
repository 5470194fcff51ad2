"""The changes of a shard's table since a version: ids, and their rows as they are.

A process that has the memory of the shard looks without the lock first
(:func:`changes`); the owner of the shard says the rest under it
(:func:`changes_locked`): what is too new for a look, and that the past is gone. It is
also the owner who begins to keep it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from daskps.shards.memory.undo import roll_back
from daskps.shards.reader import RowsAtRest, RowsRead, ShardReader, table_at

if TYPE_CHECKING:
    from daskps.shards.memory.format import Record
    from daskps.shards.memory.segment import Segment
    from daskps.shards.memory.table_memory import TableMemory
    from daskps.typing import Array

#: In place of a version: all rows are wanted.
NEVER = -1


class ChangesRequest(NamedTuple):
    """The question to a shard about one of its tables."""

    #: Of its piece in the shard.
    position: int
    #: The version that the caller knows, or NEVER.
    since: int
    #: How many rows come with the answer at most.
    most: int
    #: The producer whose own changes are left out, 0 for none.
    by: int = 0


class Changed(NamedTuple):
    """The answer of one shard."""

    #: All changes up to this version are told.
    version: int
    #: False where these are all ids that there are.
    complete: bool
    #: Ascending. None where there are more than rows come with, of a table whose ids
    #: are known; else then only rows are missing.
    ids: Array | None = None
    #: As they are at that version, flat.
    rows: Array | None = None
    #: Of an unbounded table 1 for each id that has a row, uint8; others have no values.
    found: Array | None = None


def changes(segment: Segment, asked: ChangesRequest) -> Changed | None:
    """Return what has changed, without the lock.

    None where rows were being changed, for more rows than come with an answer, and
    where only the owner of the shard can say.
    """
    rest = RowsAtRest(segment)
    if not rest.holds():
        return None
    table, record = table_at(segment, asked.position), segment.record(rest.flip)
    version = record.version
    ids = _changed(table, record, asked)
    if ids is None or len(ids) > asked.most:
        return None
    found = _with_rows(table, asked.position, Changed(version, complete=True, ids=ids))
    wanted = [_read(asked.position, found)]
    is_read = ShardReader(segment).read_at(rest.flip, (), wanted)
    return found if is_read and rest.holds() else None


def changes_locked(segment: Segment, asked: ChangesRequest) -> Changed:
    """Return what has changed, or all rows; under the lock, as the owner of the shard."""
    roll_back(segment)
    table, record = table_at(segment, asked.position), segment.current
    ids = _changed(table, record, asked)
    complete, unbounded = ids is not None, table.unbounded
    if ids is None:
        table.feed.follow(record, table.n_rows, segment.memory)
        first = table.piece.first_row
        if unbounded is not None:
            ids, _ = unbounded.ids(table.since(record))
        elif table.n_rows <= asked.most:
            ids = np.arange(first, first + table.n_rows)
    found = Changed(record.version, complete, ids)
    if ids is None or len(ids) > asked.most:
        return found
    found = _with_rows(table, asked.position, found)
    wanted = [_read(asked.position, found)]
    ShardReader(segment).read_at(segment.flip, (), wanted, locked=True)
    return found


def _changed(table: TableMemory, record: Record, asked: ChangesRequest) -> Array | None:
    """Return the ids of what has changed; None where that is gone.

    No publication tells of a row whose time is over before its place is taken back. Of
    these it is known how many pushes ago they were there: no more than versions.
    """
    ids, unbounded = table.feed.read(record, asked.since, asked.by), table.unbounded
    if ids is None or unbounded is None or not (now := table.since(record)):
        return ids
    clock = record.clocks[table.ordinal] - (record.version - asked.since)
    state = unbounded.state[: unbounded.end]
    is_over = (state >= max(1, unbounded.since(clock))) & (state < now)
    return np.union1d(ids, unbounded.keys[: unbounded.end][is_over])


def _with_rows(table: TableMemory, position: int, changed: Changed) -> Changed:
    """Return the same with room for rows."""
    n = 0 if changed.ids is None else len(changed.ids)
    rows = np.zeros(n * table.piece.table.dim, table.rows.dtype)
    found = None if table.unbounded is None else np.zeros(n, np.uint8)
    return changed._replace(rows=rows, found=found)


def _read(position: int, changed: Changed) -> RowsRead:
    """Return the read of its rows."""
    ids, rows = changed.ids, changed.rows
    if ids is None or rows is None:
        raise TypeError(f"no rows are read of piece {position}")
    return RowsRead(position, ids, rows, None, changed.found)
