"""Sources of rows: shards read without their locks, each looked up once.

A read finds rows of any ids in the index of the shard first; it knows which ids have no
row when it knows that its copy is whole. It then keeps the rows found for a push of the
same ids, the next call of a trainer as a rule. An update spoils such a copy; for a
table of n rows a log has the old values of the rows that the update has changed
meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from daskps.cluster.caller.absent_rows import AbsentIds
from daskps.cluster.caller.looks import wait
from daskps.kernels import scratch
from daskps.kernels.row_moves import FixedGather
from daskps.layout.tables import UnboundedTable
from daskps.shards.arrays.any_rows import FEWEST_LOOKED, MOST_LOOKED, Looked
from daskps.shards.memory.format import FLIP, ROWS_SEQUENCE
from daskps.shards.memory.undo import LOGGED, UNTOLD, is_logged
from daskps.shards.reads import NOT_YET

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.host.near_shards import NearShards
    from daskps.shards.arrays.any_rows import AnyRows
    from daskps.shards.memory.segment import Segment
    from daskps.shards.reads import TrainerReads
    from daskps.typing import Array


class RowCopy(NamedTuple):
    """Rows to copy out of a shard, of one table."""

    #: Number of the table in the store.
    ordinal: int
    ids: Array
    #: The array of shape (n, dim) that they go to, and the rows there; None for one
    #: after another.
    out: Array
    at: Array | None


#: Outcomes of a copy: all of it is of one version, an update is under way or has run
#: into it, the shard must be asked.
DONE, BUSY, SPOILED, NEVER = range(4)


class RowSource(NamedTuple):
    """One shard that rows are read of."""

    segment: Segment
    looks: TrainerReads
    serving: NearShards
    header: memoryview[int]
    #: By table the kernel that copies rows out of it.
    gathers: Sequence[FixedGather]
    #: By table whether it has rows of any ids.
    any_ids: Sequence[bool]

    @classmethod
    def of(
        cls, segment: Segment, looks: TrainerReads, serving: NearShards
    ) -> RowSource:
        """Return the source of a segment."""
        gathers, any_ids = [], []
        for table in segment.tables:
            first, kept = table.piece.first_row, segment.cache_dir
            gathers.append(FixedGather(table.rows, first, cache_dir=kept))
            any_ids.append(table.any_rows is not None)
        return cls(segment, looks, serving, segment.header, gathers, any_ids)

    def read(
        self, copies: Sequence[RowCopy], clock: int, absent: list[AbsentIds]
    ) -> int:
        """Copy rows out; return the outcome.

        If it is DONE, `absent` gets the ids that the shard does not have.
        """
        if (flip := self.find_flip(clock)) < 0:
            return NEVER
        header = self.header
        sequence = header[ROWS_SEQUENCE]
        # In this order: the second load sees all that was published before the first.
        if sequence & UNTOLD == UNTOLD or header[FLIP] != flip:
            return BUSY
        missing: list[AbsentIds] = []
        found: list[tuple[AnyRows, Array, Array, int]] = []
        for copy in copies:
            ordinal, ids, out, at = copy
            if self.any_ids[ordinal]:
                if sequence & LOGGED:
                    return BUSY
                ids, at = self._find_rows(copy, flip, missing, found)
            if not self.gathers[ordinal](ids, out, at):
                return NEVER
        if header[ROWS_SEQUENCE] != sequence or sequence & LOGGED:
            return DONE if self._put_back(copies, flip, sequence) else SPOILED
        absent += missing
        for any_rows, named, rows, since in found:
            any_rows.looked = Looked(sequence, named, rows, since)
        return DONE

    def _put_back(self, copies: Sequence[RowCopy], flip: int, sequence: int) -> bool:
        """Put old values of a flip over changed rows of a copy; False if it cannot."""
        segment, header = self.segment, self.header
        if not is_logged(sequence, header[ROWS_SEQUENCE]):
            return False
        for ordinal, ids, out, at in copies:
            if self.any_ids[ordinal]:
                return False
            segment.tables[ordinal].put_back(
                flip, ids, out, at, cache_dir=segment.cache_dir
            )
        return is_logged(sequence, header[ROWS_SEQUENCE])

    def _find_rows(
        self,
        copy: RowCopy,
        flip: int,
        missing: list[AbsentIds],
        found: list[tuple[AnyRows, Array, Array, int]],
    ) -> tuple[Array, Array | None]:
        """Return the numbers of the rows of ids, and the places that they go to."""
        ordinal, ids, out, at = copy
        keeps = FEWEST_LOOKED <= len(ids) <= MOST_LOOKED
        if keeps:
            # Copied before the lookup: another thread may write into the caller's
            # array.
            kept = scratch.empty(len(ids), np.int64)
            kept[:] = ids
            ids = kept
        table, rows, n_absent, since = self._look_up(ordinal, ids, flip)
        if keeps and (any_rows := self.segment.tables[ordinal].any_rows) is not None:
            found.append((any_rows, ids, rows, since))
        if not n_absent:
            return rows, at
        there, gone = np.flatnonzero(rows >= 0), np.flatnonzero(rows < 0)
        where = gone if at is None else at[gone]
        missing.append(AbsentIds(table, ids[gone], out, where))
        return rows[there], there if at is None else at[there]

    def _look_up(
        self, ordinal: int, ids: Array, flip: int
    ) -> tuple[UnboundedTable, Array, int, int]:
        """Return a table, each id's row or -1, how many have none, and since when."""
        memory = self.segment.tables[ordinal]
        table, any_rows = memory.piece.table, memory.any_rows
        if any_rows is None or not isinstance(table, UnboundedTable):
            raise TypeError(f"table {table.name!r} has a number of rows")
        rows = scratch.empty(len(ids), np.int64)
        since = memory.since(self.segment.record(flip))
        return table, rows, any_rows.index.look_up(ids, rows, since=since), since

    def contains(self, ordinal: int, ids: Array) -> Array | None:
        """Return which ids have rows; None where an update is under way."""
        header, flip = self.header, self.find_flip(0)
        sequence = header[ROWS_SEQUENCE]
        if sequence & 1 or flip < 0 or header[FLIP] != flip:
            return None
        _, rows, *_ = self._look_up(ordinal, ids, flip)
        found: Array = rows >= 0
        return found if header[ROWS_SEQUENCE] == sequence else None

    def find_flip(self, clock: int) -> int:
        """Return the flip that may be read, maybe after a short wait; else below 0."""
        flip = self.looks.find_flip(clock)
        return wait(self.looks, clock) if flip == NOT_YET else flip
