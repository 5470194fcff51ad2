"""Reads of rows: without the lock, under it, and of the publication before.

Rows have one buffer, and a log of what the last publication has changed. A reader without
the lock (:func:`copy_rows`) puts that over what it has gathered, where one publication ran
into it; where two did, or rows of any ids were changed, it takes the lock
(:func:`copy_rows_locked`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from daskps.errors import ProtocolError
from daskps.kernels.row_moves import gather
from daskps.shards.arrays.rows import flip_of
from daskps.shards.memory.format import FLIP, ROWS_SEQUENCE, WITHDRAWS, WRITING
from daskps.shards.memory.undo import LOGGED, UNTOLD, is_logged, settle

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
    #: Where they go: flat, in C order; of no elements where only `found` is wanted.
    out: Array
    #: The row of `out` that is meant for each, None for one after the other.
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
        The rows, of pieces that have them.

    Returns
    -------
    bool
        False where more was changed meanwhile than the logs tell, or the flip is not
        the last one: then `wanted` holds anything.

    Raises
    ------
    ProtocolError
        For an id that the piece does not have, or another length.
    """
    header = segment.header
    sequence = header[ROWS_SEQUENCE]
    # Looked at after the sequence: what was published before that would not change it.
    if sequence & UNTOLD == UNTOLD or header[FLIP] != flip:
        return False
    gathered, has_any_ids = [], False
    for one in wanted:
        table = table_at(segment, one.position)
        if table.any_rows is not None:
            has_any_ids = True
            one = _by_row(table, one, table.since(segment.record(flip)))
        gathered.append((table, one, _gather(table, one, segment.cache_dir)))
    if header[ROWS_SEQUENCE] == sequence and not sequence & LOGGED:
        return True
    if has_any_ids or not is_logged(sequence, header[ROWS_SEQUENCE]):
        return False
    for table, one, rows in gathered:
        table.put_back(flip, one.ids, rows, one.at, cache_dir=segment.cache_dir)
    return is_logged(sequence, header[ROWS_SEQUENCE])


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
        # A row that has not changed in the last publication is as it was before.
        has_log = not is_last and flip_of(word) == now
        one = _by_row(table, one, table.since(segment.record(flip)), before=has_log)
        rows = _gather(table, one, segment.cache_dir)
        if has_log:
            table.put_back(flip, one.ids, rows, one.at, cache_dir=segment.cache_dir)
    return True


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
        raise not_any(table)
    wanted.found[:] = there
    if not wanted.out.size:
        return wanted._replace(ids=rows[:0], at=None)
    if there.all():
        return wanted._replace(ids=rows)
    at = np.arange(len(ids)) if wanted.at is None else wanted.at
    return wanted._replace(ids=rows[there], at=at[there])


def not_any(table: TableMemory) -> ProtocolError:
    """Return what is said where rows are asked for as those of another kind."""
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
