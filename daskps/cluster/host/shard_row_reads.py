"""Lock-free reads of table rows of one shard for socket requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.kernels.row_moves import FixedGather
from daskps.shards.memory.format import FLIP, ROWS_SEQUENCE
from daskps.shards.memory.undo import LOGGED, UNTOLD, is_logged
from daskps.shards.reads import ASK, LatestReads, TrainerReads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.layout.tables import Table
    from daskps.shards.memory.segment import Segment
    from daskps.shards.memory.tables import TableMemory
    from daskps.shards.steps import Step
    from daskps.typing import Array


class ShardRowRead:
    """The tables of one shard that a form reads rows of.

    Parameters
    ----------
    segment : Segment
        The memory of the shard.
    step : Step
        The form's step for this shard; its run and rank decide which reads it makes.
    tables : sequence of Table
        The tables, all bounded.
    """

    def __init__(self, segment: Segment, step: Step, tables: Sequence[Table]) -> None:
        self._header, self._cache_dir = segment.header, segment.cache_dir
        looks = TrainerReads if step.run else LatestReads
        self.looks = looks(segment, step.run, step.rank)
        of = {memory.piece.table.index: memory for memory in segment.tables}
        self._tables = [
            (
                memory,
                _gather_of(memory, segment.cache_dir),
                (table.dtype, table.dim, table.row_nbytes),
            )
            for table in tables
            for memory in (of[table.index],)
        ]

    def read(
        self, bound: int, asked: Sequence[Array], out: Array, at: int
    ) -> tuple[int, int]:
        """Copy rows, unless more updates change them meanwhile than their logs record.

        Parameters
        ----------
        bound : int
            The clock of the trainer; outside runs the least version.
        asked : sequence of ndarray, shape (k,), int64
            Ids of each table.
        out : ndarray, shape (n,), uint8
            Buffer for the rows.
        at : int
            First byte of the rows in it.

        Returns
        -------
        version, at : int
            The version that was read, below 0 if the shard must be asked; and the end
            of the rows in the buffer.
        """
        header = self._header
        sequence = header[ROWS_SEQUENCE]
        flip = self.looks.find_flip(bound)
        version = self.looks.version(flip)
        # In this order: the flip shows all that was published before the sequence was
        # read.
        if sequence & UNTOLD == UNTOLD or flip < 0 or header[FLIP] != flip:
            return ASK, at
        gathered = []
        for ids, (memory, gather, of) in zip(asked, self._tables, strict=True):
            dtype, dim, row_nbytes = of
            end = at + len(ids) * row_nbytes
            rows = out[at:end].view(dtype).reshape(-1, dim)
            if not gather(ids, rows):
                return ASK, at
            gathered.append((memory, ids, rows))
            at = end
        if header[ROWS_SEQUENCE] == sequence and not sequence & LOGGED:
            return version, at
        for memory, ids, rows in gathered:
            memory.put_back(flip, ids, rows, None, cache_dir=self._cache_dir)
        return (version if is_logged(sequence, header[ROWS_SEQUENCE]) else ASK), at


def _gather_of(memory: TableMemory, cache_dir: str | None) -> FixedGather:
    """Return the routine that copies rows out of a table."""
    return FixedGather(memory.rows, memory.piece.first_row, cache_dir=cache_dir)
