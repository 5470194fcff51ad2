"""The rows of unbounded tables at one flip: copied, or read where they are.

Nobody knows beforehand how many rows there will be: memory for copies is taken for
those that are there and for some more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from daskps.backend.host import untouched
from daskps.kernels.id_hash import hashes
from daskps.kernels.row_moves import gather
from daskps.layout.spans import CANDIDATES, COUNTS, IDS, ROWS
from daskps.shards.memory.undo import roll_back
from daskps.shards.reader import RowsAtRest, not_any, table_at

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.layout.spans import Span
    from daskps.shards.arrays.unbounded_rows import UnboundedRows
    from daskps.shards.memory.segment import Segment
    from daskps.shards.memory.table_memory import TableMemory
    from daskps.typing import Array


@dataclass(frozen=True)
class FrozenRows:
    """The rows of an unbounded table, of its piece in a shard.

    Before they are copied it is the memory for them.
    """

    position: int
    #: The arrays of its rows by area, the ids among them, each of shape (n, width).
    areas: Mapping[str, Array]
    #: The ids without rows, and how often each was pushed, as rows.
    candidates: Array
    #: The seed of the hash in whose order the rows are read; None for the order that
    #: they have.
    seed: int | None = None
    #: Where a cut holds the shard: which rows of its memory these are.
    numbers: Array | None = None

    def __len__(self) -> int:
        return len(self.areas[IDS] if self.numbers is None else self.numbers)

    def cut(self, n: int) -> FrozenRows:
        """Return the first of them."""
        return replace(self, areas={area: a[:n] for area, a in self.areas.items()})

    def with_its_ids(self) -> FrozenRows:
        """Return the same with a copy of the ids, which the shard may change."""
        end = 0 if self.numbers is None else int(self.numbers.max(initial=-1)) + 1
        ids = np.array(self.areas[IDS][:end])
        return replace(self, areas={**self.areas, IDS: ids})

    @property
    def arrays(self) -> list[Array]:
        """All memory that it has itself."""
        if self.numbers is None:
            return [*self.areas.values(), self.candidates]
        return [self._order, self.candidates]

    @cached_property
    def _order(self) -> Array:
        """The order of the hashes, found when it is first asked for."""
        ids = self.areas[IDS].reshape(-1)
        numbers = np.arange(len(ids)) if self.numbers is None else self.numbers
        found: Array = numbers[np.argsort(hashes(ids[numbers], self.seed or 0))]
        return found

    def get(self, span: Span) -> Array:
        """Return elements: by id ascending, or by the hash of the id.

        Raises
        ------
        LookupError
            For elements that it has not.
        """
        if span.area in (CANDIDATES, COUNTS):
            counted: Array = self.candidates[int(span.area == COUNTS)]
            check_span(span, len(counted))
            return counted[span.start : span.stop]
        array = self.areas[span.area]
        width = array.shape[1]
        check_span(span, len(self) * width)
        if self.seed is None:
            return array.reshape(-1)[span.start : span.stop]
        # Sorted as it is read: one more copy of everything would take as much memory.
        first, last = span.start // width, -(-span.stop // width)
        found = array[self._order[first:last]].reshape(-1)
        start = span.start - first * width
        return found[start : start + span.stop - span.start]


def check_span(span: Span, n: int) -> None:
    """Refuse elements that are not among the first n."""
    if not 0 <= span.start <= span.stop <= n:
        raise IndexError(f"elements {span} of a copy that has {n}")


def unbounded_table_at(
    segment: Segment, position: int
) -> tuple[TableMemory, UnboundedRows]:
    """Return the unbounded table at a position.

    Raises
    ------
    ProtocolError
        If it is no unbounded table.
    """
    table = table_at(segment, position)
    if table.unbounded is None:
        raise not_any(table)
    return table, table.unbounded


def room_for(
    segment: Segment, position: int, more: int, *, whole: bool = False
) -> FrozenRows:
    """Return memory for all rows of an unbounded table, and some that may come yet.

    The memory for these is taken when it fills. With `whole` there is also place for
    all else that belongs to rows.
    """
    table, unbounded = unbounded_table_at(segment, position)
    now, room = unbounded.n_rows, unbounded.n_rows + more

    def place(like: Array) -> Array:
        nbytes = room * like.dtype.itemsize * like.shape[1]
        array = untouched(nbytes).view(like.dtype).reshape(room, like.shape[1])
        array[:now] = 0
        return array

    wanted = table.by_area if whole else (IDS, ROWS)
    areas = {area: place(table.by_area[area]) for area in wanted}
    seed = unbounded.hash_seed if whole else None
    return FrozenRows(position, areas, np.empty((2, 0), np.int64), seed)


def held_rows(segment: Segment, flip: int, position: int) -> FrozenRows:
    """Return all rows of an unbounded table where they are, while a cut holds them."""
    table, unbounded = unbounded_table_at(segment, position)
    numbers = unbounded.index.rows(since=table.since(segment.record(flip)))
    candidates = np.stack(unbounded.index.candidates(by_hash=True))
    return FrozenRows(position, table.by_area, candidates, unbounded.hash_seed, numbers)


def copy_all_rows(
    segment: Segment, flip: int, wanted: Sequence[FrozenRows]
) -> list[FrozenRows] | None:
    """Copy all rows of unbounded tables out, without the lock.

    For who holds back all that changes them: else there would be no end to it.

    Parameters
    ----------
    segment : Segment
        The shard's memory.
    flip : int
        That of which they are.
    wanted : sequence of FrozenRows
        Where they go; a table that has outgrown its memory is given other.

    Returns
    -------
    list of FrozenRows or None
        The copies; None where rows were being changed, or the flip is not the
        last one.
    """
    rest = RowsAtRest(segment)
    if rest.flip != flip or not rest.holds():
        return None
    found = [_copy_all(segment, one) for one in wanted]
    return found if rest.holds() else None


def _copy_all(segment: Segment, wanted: FrozenRows) -> FrozenRows:
    table, unbounded = unbounded_table_at(segment, wanted.position)
    whole, lowest = wanted.seed is not None, table.since(segment.current)
    if whole:
        # In the order of memory: pushes wait for this, and not for what sorts it.
        numbers = unbounded.index.rows(since=lowest)
        ids = unbounded.keys[numbers]
    else:
        ids, numbers = unbounded.ids(lowest)
    if len(ids) > len(wanted):
        wanted = room_for(segment, wanted.position, len(ids), whole=whole)
    found = wanted.cut(len(ids))
    for area, array in found.areas.items():
        if area == IDS:
            array[:, 0] = ids
        else:
            rows = table.by_area[area]
            gather(rows, numbers, array, cache_dir=segment.cache_dir)
    if not whole:
        return found
    return replace(found, candidates=np.stack(unbounded.index.candidates(by_hash=True)))


def all_ids(segment: Segment, position: int) -> Array:
    """Return the ids of an unbounded table that have rows, ascending; under the lock."""
    roll_back(segment)
    table, unbounded = unbounded_table_at(segment, position)
    ids, _ = unbounded.ids(table.since(segment.current))
    return ids
