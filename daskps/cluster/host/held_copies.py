"""A shard that a save reads in place, while a cut holds back all changes of it.

Saves use it if there is no room for a copy: pushes wait until all is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from daskps.errors import ConsistencyError
from daskps.kernels.id_hash import hashes
from daskps.layout.spans import (
    CANDIDATES,
    COUNTS,
    IDS,
    ROWS,
    TOUCHED,
    slot_area,
)
from daskps.shards.installing import Counted
from daskps.shards.memory.format import ROWS_SEQUENCE

if TYPE_CHECKING:
    from daskps.layout.spans import Span
    from daskps.shards.memory.segment import Segment
    from daskps.shards.memory.tables import TableMemory
    from daskps.typing import Array


class HeldShard:
    """The values of a shard at one flip, at which a cut holds it.

    It has all of :class:`~daskps.cluster.host.shard_copies.ShardCopy` but the values.

    Parameters
    ----------
    segment : Segment
        The shard's memory.
    flip : int
        The flip.
    nbytes : int
        Bytes of a copy of it.
    """

    def __init__(self, segment: Segment, flip: int, nbytes: int) -> None:
        self._segment, self._flip, self.nbytes = segment, flip, nbytes
        self._sequence = segment.header[ROWS_SEQUENCE]
        self.counted = Counted.of(segment, flip)
        #: For tables of any ids: their rows, and the ids that are only counted, by
        #: hash.
        self._rows: dict[int, Array] = {}
        self._candidates: dict[int, Array] = {}
        for position, table in enumerate(segment.tables, len(segment.pieces)):
            if (any_rows := table.any_rows) is not None:
                lowest = table.since(segment.record(flip))
                rows = any_rows.index.rows(since=lowest)
                order = np.argsort(hashes(any_rows.keys[rows], any_rows.hash_seed))
                self._rows[position] = rows[order]
                pair = any_rows.index.candidates(by_hash=True)
                self._candidates[position] = np.stack(pair)
        self._check()

    @property
    def memory_nbytes(self) -> int:
        """Bytes that this object takes itself."""
        arrays = (*self._rows.values(), *self._candidates.values())
        return sum(array.nbytes for array in arrays)

    @property
    def n_rows(self) -> list[int]:
        """Number of rows of each table of any ids."""
        return [len(rows) for rows in self._rows.values()]

    @property
    def n_candidates(self) -> list[int]:
        """Number of ids without a row of each table of any ids."""
        return [pair.shape[1] for pair in self._candidates.values()]

    def get(self, span: Span) -> Array:
        """Return a copy of elements.

        Raises
        ------
        ConsistencyError
            If the shard has changed since the cut.
        LookupError
            If the shard does not have these elements.
        """
        segment, (area, position, start, stop) = self._segment, span
        if position in self._candidates and area in (CANDIDATES, COUNTS):
            return self._candidates[position][int(area == COUNTS), start:stop]
        if position in self._rows:
            table = segment.tables[position - len(segment.pieces)]
            array, rows = _of_rows(table)[area], self._rows[position]
            width = array.shape[1]
            first, last = start // width, -(-stop // width)
            part = array[rows[first:last]].reshape(-1)
            at = start - first * width
            found = part[at : at + stop - start]
        else:
            now = segment.view(segment.record(self._flip), span)
            found = np.empty_like(now)
            segment.payload.copy(found, now)
        if len(found) != stop - start:
            raise IndexError(
                f"elements {span} of a shard that has {len(found)} of them"
            )
        self._check()
        return found

    def _check(self) -> None:
        """Raise if the shard has changed since the cut."""
        segment = self._segment
        now = segment.flip, segment.writing, segment.header[ROWS_SEQUENCE]
        if now != (self._flip, self._flip, self._sequence) or self._sequence & 1:
            raise ConsistencyError(
                "a shard went on while a save without room for copies held it: a run "
                "began or ended, or another snapshot was taken; save again"
            )


def _of_rows(table: TableMemory) -> dict[str, Array]:
    """Return the rows of a table of any ids by area, each of two dimensions."""
    found = {ROWS: table.rows}
    found |= {slot_area(i): slot for i, slot in enumerate(table.slots)}
    if table.any_rows is not None:
        found[IDS] = table.any_rows.keys.reshape(-1, 1)
        found[TOUCHED] = table.any_rows.state.reshape(-1, 1)
    return found
