"""Reads of rows: without the lock, under it, and of the publication before.

Rows have one buffer. Any publication that changes some spoils a read of the table, so a
reader tries once without the lock (:func:`copy_rows`), and takes it then
(:func:`copy_rows_locked`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from daskps.errors import ProtocolError
from daskps.kernels.row_log import overlay
from daskps.kernels.row_moves import gather
from daskps.shards.arrays.rows import entries_of, flip_of
from daskps.shards.memory.areas import untouched
from daskps.shards.memory.format import FLIP, ROWS_SEQUENCE, WITHDRAWS, WRITING
from daskps.shards.memory.undo import settle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.shards.memory.segment import Segment
    from daskps.shards.memory.tables import TableMemory
    from daskps.typing import Array


class RowsRead(NamedTuple):
    """A read of rows of one table, by who has the memory of their shard."""

    #: Of its piece in the shard.
    position: int
    ids: Array
    #: Where they go: flat, in C order.
    out: Array
    #: Which row of `out` is meant for each, None for one after the other.
    at: Array | None = None
    #: Of a table of any ids: becomes 1 for each id that has a row, uint8. Where it is 0,
    #: `out` is left as it is.
    found: Array | None = None


def copy_rows(segment: Segment, flip: int, wanted: Sequence[RowsRead]) -> bool:
    """Copy rows out without the lock; return whether all are of that flip.

    Parameters
    ----------
    segment : Segment
        The shard's memory.
    flip : int
        That which was in force when the read began.
    wanted : sequence of RowsRead
        Which rows, of pieces that have them.

    Returns
    -------
    bool
        False where rows were being changed, or the flip is not the last one: then
        `wanted` holds anything.

    Raises
    ------
    ProtocolError
        For an id that the piece does not have, or another length.
    """
    header = segment.header
    sequence = header[ROWS_SEQUENCE]
    # Looked at after the sequence: what was published before that would not change it.
    if sequence & 1 or header[FLIP] != flip:
        return False
    for one in wanted:
        table = table_at(segment, one.position)
        if table.any_rows is not None:
            one = _by_row(table, one, table.since(segment.record(flip)))
        _gather(table, one, segment.cache_dir)
    return header[ROWS_SEQUENCE] == sequence


def copy_rows_locked(segment: Segment, flip: int, wanted: Sequence[RowsRead]) -> bool:
    """Copy rows out under the lock; return whether they are there at that flip.

    Of the flip in force they are, and of the one before where no later publication has
    begun since, and it was not withdrawn.

    Parameters
    ----------
    segment, flip, wanted
        As of :func:`copy_rows`.

    Returns
    -------
    bool
        False where the rows of that flip are gone.

    Raises
    ------
    ProtocolError
        As of :func:`copy_rows`.
    """
    settle(segment)
    now, is_last = segment.flip, segment.flip == flip
    header = segment.header
    if not is_last and (
        flip != now - 1 or header[WRITING] != now or header[WITHDRAWS] == now
    ):
        return False
    for one in wanted:
        table = table_at(segment, one.position)
        word = table.buffers.undo[0]
        # What has not changed in the last publication is what it was before.
        has_log = not is_last and flip_of(word) == now
        one = _by_row(table, one, table.since(segment.record(flip)), before=has_log)
        rows = _gather(table, one, segment.cache_dir)
        if has_log:
            log, first = table.buffers.log, table.piece.first_row
            overlay(log, entries_of(word), one.ids, rows, one.at, first=first)
    return True


class AllRows(NamedTuple):
    """Where the ids and rows of a table of any ids go, of its piece in a shard."""

    position: int
    ids: Array
    #: Of shape (n, dim).
    rows: Array

    def cut(self, n: int) -> AllRows:
        """Return the first of them."""
        return AllRows(self.position, self.ids[:n], self.rows[:n])


def all_rows(segment: Segment, position: int) -> tuple[Array, Array]:
    """Return the ids of a table of any ids, ascending, and their rows; under the lock."""
    settle(segment)
    rows = place_for(segment, position, 0)
    _, ids, values = _copy_all(segment, rows)
    return ids, values


def place_for(segment: Segment, position: int, more: int) -> AllRows:
    """Return memory for all rows of a table of any ids, and some that may come yet.

    What is for these is taken when it fills.

    Raises
    ------
    ProtocolError
        If it is no table of any ids.
    """
    table = table_at(segment, position)
    if table.any_rows is None:
        raise _not_any(table)
    now, of = table.any_rows.n_rows, table.piece.table
    ids = untouched((now + more) * 8).view(np.int64)
    rows = untouched((now + more) * of.row_nbytes).view(of.dtype).reshape(-1, of.dim)
    ids[:now], rows[:now] = 0, 0
    return AllRows(position, ids, rows)


def copy_all_rows(
    segment: Segment, flip: int, wanted: Sequence[AllRows]
) -> list[AllRows] | None:
    """Copy all rows of tables of any ids out, ascending by id, without the lock.

    For who holds back all that changes them: else there would be no end to it.

    Parameters
    ----------
    segment : Segment
        The shard's memory.
    flip : int
        That of which they are.
    wanted : sequence of AllRows
        Where they go; a table that has outgrown its memory is given other.

    Returns
    -------
    list of AllRows or None
        What was copied; None where rows were being changed, or the flip is not the
        last one.

    Raises
    ------
    ProtocolError
        If one is no table of any ids.
    """
    header = segment.header
    sequence = header[ROWS_SEQUENCE]
    if sequence & 1 or header[FLIP] != flip:
        return None
    found = [_copy_all(segment, one) for one in wanted]
    return found if header[ROWS_SEQUENCE] == sequence else None


def _copy_all(segment: Segment, wanted: AllRows) -> AllRows:
    table = table_at(segment, wanted.position)
    if table.any_rows is None:
        raise _not_any(table)
    ids, numbers = table.any_rows.ids(table.since(segment.current))
    if len(ids) > len(wanted.ids):
        wanted = place_for(segment, wanted.position, len(ids))
    found = wanted.cut(len(ids))
    found.ids[:] = ids
    gather(table.rows, numbers, found.rows, cache_dir=segment.cache_dir)
    return found


def all_ids(segment: Segment, position: int) -> Array:
    """Return the ids of a table of any ids that have rows, ascending; under the lock."""
    settle(segment)
    table = table_at(segment, position)
    if table.any_rows is None:
        raise _not_any(table)
    ids, _ = table.any_rows.ids(table.since(segment.current))
    return ids


def table_at(segment: Segment, position: int) -> TableMemory:
    """Return the table at a position.

    Raises
    ------
    ProtocolError
        If there is none.
    """
    ordinal = position - len(segment.pieces)
    if not 0 <= ordinal < len(segment.tables):
        raise ProtocolError(
            f"rows were asked of piece {position} of a shard, which is no table; run the "
            f"same version of daskps in all processes"
        )
    return segment.tables[ordinal]


def _by_row(
    table: TableMemory, wanted: RowsRead, lowest: int, *, before: bool = False
) -> RowsRead:
    """Return what to read of a table of any ids by numbers of rows, as far as there are.

    Rows whose state is below the `lowest` are not there. With `before`, what there was
    before the last publication.
    """
    any_rows, ids = table.any_rows, wanted.ids
    if any_rows is None:
        return wanted
    find = any_rows.find_before if before else any_rows.find
    rows = find(ids, lowest)
    there = rows >= 0
    if wanted.found is None or wanted.found.shape != there.shape:
        raise _not_any(table)
    wanted.found[:] = there
    if there.all():
        return wanted._replace(ids=rows)
    at = np.arange(len(ids)) if wanted.at is None else wanted.at
    return wanted._replace(ids=rows[there], at=at[there])


def _not_any(table: TableMemory) -> ProtocolError:
    return ProtocolError(
        f"rows of table {table.piece.table.name[:60]!r} were asked as those of another "
        f"kind of table; run the same version of daskps in all processes"
    )


def _gather(table: TableMemory, wanted: RowsRead, cache_dir: str | None) -> Array:
    """Copy rows out; return them by row."""
    piece, (_, ids, out, at, _) = table.piece, wanted
    try:
        rows = out.reshape(-1, piece.table.dim)
        if not out.flags.c_contiguous:
            raise ValueError("they go to an array that is not contiguous")
        gather(table.rows, ids, rows, at, first=piece.first_row, cache_dir=cache_dir)
    except ValueError as error:
        raise ProtocolError(
            f"{len(ids)} rows of table {piece.table.name[:60]!r} were asked of shard "
            f"{piece.shard}, which cannot give them: {error}; run the same version of "
            f"daskps in all processes"
        ) from error
    return rows
