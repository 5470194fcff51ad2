"""What frames of a lane read of the rows of one shard, without its lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.kernels.row_moves import FixedGather
from daskps.shards.memory.format import FLIP, ROWS_SEQUENCE
from daskps.shards.reads import ASK, LatestReads, TrainerReads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.layout.tables import Table
    from daskps.shards.memory.segment import Segment
    from daskps.shards.steps import Step
    from daskps.typing import Array


class ShardRowRead:
    """The tables of one shard that a form reads rows of.

    Parameters
    ----------
    segment : Segment
        The memory of the shard.
    step : Step
        What the form says to it: whose reads these are.
    tables : sequence of Table
        Bounded ones.
    """

    def __init__(self, segment: Segment, step: Step, tables: Sequence[Table]) -> None:
        self._header = segment.header
        looks = TrainerReads if step.run else LatestReads
        self.looks = looks(segment, step.run, step.rank)
        of = {memory.piece.table.index: memory for memory in segment.tables}
        self._gathers = [
            (
                FixedGather(
                    of[table.index].rows,
                    of[table.index].piece.first_row,
                    cache_dir=segment.cache_dir,
                ),
                table.dim,
                table.dtype,
                table.row_nbytes,
            )
            for table in tables
        ]

    def read(
        self, bound: int, asked: Sequence[Array], out: Array, at: int
    ) -> tuple[int, int]:
        """Read rows, if no update is at them.

        Parameters
        ----------
        bound : int
            The clock of the trainer; outside runs the least version.
        asked : sequence of ndarray, shape (k,), int64
            Ids by table.
        out : ndarray, shape (n,), uint8
            Where the rows go.
        at : int
            And from which byte on.

        Returns
        -------
        version, at : int
            The version that was read, below 0 where the shard must be asked; and where
            the rows end.
        """
        header = self._header
        sequence = header[ROWS_SEQUENCE]
        flip = self.looks.find_flip(bound)
        # In this order: what is published before the one is seen by the other.
        if sequence & 1 or flip < 0 or header[FLIP] != flip:
            return ASK, at
        for ids, (gather, dim, dtype, nbytes) in zip(asked, self._gathers, strict=True):
            end = at + len(ids) * nbytes
            if not gather(ids, out[at:end].view(dtype).reshape(-1, dim)):
                return ASK, at
            at = end
        version = self.looks.version(flip)
        return (version if header[ROWS_SEQUENCE] == sequence else ASK), at
