"""Copies of all rows of tables of any ids, and, for checkpoints, of all that belongs to them.

Nobody knows beforehand how many rows there will be: memory is taken for those that are there
and for some more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from daskps.kernels.id_hash import hashes
from daskps.kernels.row_moves import gather
from daskps.layout.spans import CANDIDATES, COUNTS, IDS, ROWS, TOUCHED, slot_area
from daskps.shards.memory.areas import untouched
from daskps.shards.memory.format import FLIP, ROWS_SEQUENCE
from daskps.shards.memory.undo import settle
from daskps.shards.row_reads import not_any, table_at

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.layout.spans import Span
    from daskps.shards.memory.segment import Segment
    from daskps.shards.memory.tables import TableMemory
    from daskps.typing import Array


@dataclass(frozen=True)
class AllRows:
    """The ids and rows of a table of any ids, of its piece in a shard.

    Its fields are read once it is copied; before that they are memory for it.
    """

    position: int
    ids: Array
    #: Of shape (n, dim).
    rows: Array
    #: Of a whole copy what else a row has: each slot, of shape (n, width), and the clock
    #: of its last push where that counts, of shape (n, 1).
    beside: Mapping[str, Array] | None = None
    #: Of a whole copy the ids without rows, and how often each was pushed, as rows.
    candidates: Array | None = None
    #: Of a whole copy the seed of the hash that it is read in the order of.
    seed: int = 0

    def cut(self, n: int) -> AllRows:
        """Return the first of them."""
        beside = self.beside
        if beside is not None:
            beside = {area: array[:n] for area, array in beside.items()}
        return replace(self, ids=self.ids[:n], rows=self.rows[:n], beside=beside)

    @property
    def arrays(self) -> list[Array]:
        """All that it consists of."""
        found = [self.ids, self.rows, *(self.beside or {}).values()]
        return found if self.candidates is None else [*found, self.candidates]

    @cached_property
    def _order(self) -> Array:
        """The order of the hashes, found when it is first asked for."""
        return np.argsort(hashes(self.ids, self.seed))

    def get(self, span: Span) -> Array:
        """Return elements: by id ascending, of a whole copy by the hash of the id.

        Raises
        ------
        LookupError
            For elements that it has not.
        """
        if self.candidates is not None and span.area in (CANDIDATES, COUNTS):
            return _part(self.candidates[int(span.area == COUNTS)], span)
        of_rows = {IDS: self.ids, ROWS: self.rows, **(self.beside or {})}
        array = of_rows[span.area]
        if self.beside is None:
            return _part(array.reshape(-1), span)
        width = 1 if array.ndim == 1 else array.shape[1]
        _check(span, array.size)
        # Sorted as it is read: one more copy of everything would take as much memory.
        first, last = span.start // width, -(-span.stop // width)
        found = array[self._order[first:last]].reshape(-1)
        start = span.start - first * width
        return found[start : start + span.stop - span.start]


def _part(array: Array, span: Span) -> Array:
    _check(span, len(array))
    return array[span.start : span.stop]


def _check(span: Span, n: int) -> None:
    if not 0 <= span.start <= span.stop <= n:
        raise IndexError(f"elements {span} of a copy that has 0 to {n}")


def all_rows(segment: Segment, position: int) -> tuple[Array, Array]:
    """Return the ids of a table of any ids, ascending, and their rows; under the lock."""
    settle(segment)
    found = _copy_all(segment, place_for(segment, position, 0))
    return found.ids, found.rows


def place_for(
    segment: Segment, position: int, more: int, *, whole: bool = False
) -> AllRows:
    """Return memory for all rows of a table of any ids, and some that may come yet.

    The memory for these is taken when it fills. With `whole` there is also place for
    all else that belongs to rows.

    Raises
    ------
    ProtocolError
        If it is no table of any ids.
    """
    table = table_at(segment, position)
    if (any_rows := table.any_rows) is None:
        raise not_any(table)
    now, room = any_rows.n_rows, any_rows.n_rows + more

    def place(like: Array) -> Array:
        nbytes = room * like.dtype.itemsize * like.shape[1]
        array = untouched(nbytes).view(like.dtype).reshape(room, like.shape[1])
        array[:now] = 0
        return array

    ids = place(any_rows.keys.reshape(-1, 1)).reshape(-1)
    if not whole:
        return AllRows(position, ids, place(table.rows))
    beside = {area: place(of) for area, of in _beside(table).items()}
    nobody, seed = np.empty((2, 0), np.int64), any_rows.hash_seed
    return AllRows(position, ids, place(table.rows), beside, nobody, seed)


def _beside(table: TableMemory) -> dict[str, Array]:
    """Return what rows of any ids have beside their elements, each of two dimensions."""
    found = {slot_area(i): slot for i, slot in enumerate(table.slots)}
    if table.any_rows is not None and table.any_rows.is_stamped:
        found[TOUCHED] = table.any_rows.state.reshape(-1, 1)
    return found


def copy_all_rows(
    segment: Segment, flip: int, wanted: Sequence[AllRows]
) -> list[AllRows] | None:
    """Copy all rows of tables of any ids out, without the lock.

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
        The copies; None where rows were being changed, or the flip is not the
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
    if (any_rows := table.any_rows) is None:
        raise not_any(table)
    whole, lowest = wanted.beside is not None, table.since(segment.current)
    if whole:
        # In the order of memory: pushes wait for this, and not for what sorts it.
        numbers = any_rows.index.rows(since=lowest)
        ids = any_rows.keys[numbers]
    else:
        ids, numbers = any_rows.ids(lowest)
    if len(ids) > len(wanted.ids):
        wanted = place_for(segment, wanted.position, len(ids), whole=whole)
    found = wanted.cut(len(ids))
    found.ids[:] = ids
    gather(table.rows, numbers, found.rows, cache_dir=segment.cache_dir)
    if found.beside is None:
        return found
    for area, array in _beside(table).items():
        gather(array, numbers, found.beside[area], cache_dir=segment.cache_dir)
    return replace(found, candidates=np.stack(any_rows.index.candidates(by_hash=True)))


def all_ids(segment: Segment, position: int) -> Array:
    """Return the ids of a table of any ids that have rows, ascending; under the lock."""
    settle(segment)
    table = table_at(segment, position)
    if table.any_rows is None:
        raise not_any(table)
    ids, _ = table.any_rows.ids(table.since(segment.current))
    return ids
