"""A shard at one flip, which snapshots and checkpoints read: copied, or held in place.

A copy is made while a cut holds the shard back, in memory that was taken before. A save
without room for copies reads the shard where it is, and pushes wait until it is
written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from daskps.backend.host import private
from daskps.errors import ConsistencyError
from daskps.layout.arrays import align
from daskps.layout.chunks import ARRAYS, WHOLE
from daskps.layout.spans import ROWS, TOUCHED, WEIGHTS, Span, slot_area
from daskps.shards.frozen_rows import (
    FrozenRows,
    check_span,
    copy_all_rows,
    held_rows,
    room_for,
)
from daskps.shards.installation import Counted
from daskps.shards.memory.undo import roll_back
from daskps.shards.producers import noted
from daskps.shards.reader import RowsAtRest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from daskps.shards.memory.segment import Segment
    from daskps.shards.memory.table_memory import TableMemory
    from daskps.shards.producers import KnownPushes
    from daskps.typing import Array

    #: Elements to read into a copy, and their memory there.
    Parts: TypeAlias = list[tuple[Span, Array]]

#: Most growth of an unbounded table between the beginning of a cut and its copy, before
#: pushes have to wait for memory: half as many rows, and so many bytes.
MORE_NBYTES = 2**22

#: Place of a piece's elements in a copy's memory: dtype, how many, the first byte.
CopyPlace = tuple[str, int, int]


class FrozenShard:
    """Values of one shard at one version; nothing changes it.

    Parameters
    ----------
    memory : ndarray, shape (nbytes,), uint8
        Memory of all values.
    places : mapping of (str, int) to CopyPlace
        Place of each piece in it, by area and position.
    tables : sequence of FrozenRows
        The unbounded tables, which have memory of their own.
    counted : Counted, optional
        The counters of the shard, where it has everything.
    """

    def __init__(
        self,
        memory: Array,
        places: Mapping[tuple[str, int], CopyPlace],
        tables: Sequence[FrozenRows] = (),
        counted: Counted | None = None,
    ) -> None:
        self._memory, self._places = memory, dict(places)
        self.counted = counted
        self._tables = {of.position: of for of in tables}
        for array in self._arrays:
            array.flags.writeable = False

    def __reduce__(self) -> Any:
        tables = [*self._tables.values()]
        return type(self), (self._memory, self._places, tables, self.counted)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.nbytes} bytes>"

    @property
    def _arrays(self) -> list[Array]:
        of_tables = (of.arrays for of in self._tables.values())
        return [self._memory, *(array for of in of_tables for array in of)]

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.memory_nbytes

    @property
    def memory_nbytes(self) -> int:
        """Bytes of memory that this object takes."""
        return sum(array.nbytes for array in self._arrays)

    @property
    def n_rows(self) -> list[int]:
        """Number of rows of each unbounded table."""
        return [len(of) for of in self._tables.values()]

    @property
    def n_candidates(self) -> list[int]:
        """Number of ids without a row, by unbounded table; where it has everything."""
        return [of.candidates.shape[1] for of in self._tables.values()]

    @property
    def counts(self) -> list[int]:
        """The numbers of rows, then of candidates, by unbounded table."""
        return self.n_rows + self.n_candidates

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + self.memory_nbytes

    def get(self, span: Span) -> Array:
        """Return elements of the shard, a view; of unbounded tables it may be a copy.

        Raises
        ------
        LookupError
            If it does not have these elements.
        """
        if (table := self._tables.get(span.position)) is not None:
            return table.get(span)
        dtype, n, at = self._places[span.area, span.position]
        check_span(span, n)
        size = np.dtype(dtype).itemsize
        at += span.start * size
        return self._memory[at : at + (span.stop - span.start) * size].view(dtype)


class HeldShard(FrozenShard):
    """The same, read in place while a cut holds the shard.

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
        self._segment, self._flip, self._nbytes = segment, flip, nbytes
        self._rest = RowsAtRest(segment)
        tables = [held_rows(segment, flip, at) for at, _ in unbounded_of(segment)]
        counted = Counted.of(segment, flip)
        super().__init__(np.empty(0, np.uint8), {}, tables, counted)
        self.check()

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self._nbytes

    def get(self, span: Span) -> Array:
        """Return a copy of elements.

        Raises
        ------
        ConsistencyError
            If the shard has changed since the cut.
        LookupError
            If the shard does not have these elements.
        """
        segment = self._segment
        if span.position in self._tables:
            found = super().get(span)
        else:
            now = segment.view(segment.record(self._flip), span)
            check_span(span, span.start + len(now))
            found = np.empty(now.shape, now.dtype)
            segment.payload.read([(found, now)])
        self.check()
        return found

    @property
    def applied(self) -> KnownPushes:
        """All that the shard knows of the pushes that it has applied."""
        return noted(self._segment.record(self._flip))

    def check(self) -> None:
        """Raise if the shard has changed since the cut."""
        segment = self._segment
        now = segment.flip, segment.writing
        if now != (self._flip, self._flip) or not self._rest.holds():
            raise ConsistencyError(
                "a shard went on while a save without room for copies, or a reshard, held "
                "it: a run began or ended, or another snapshot was taken; try again"
            )


class LiveShard(HeldShard):
    """The same while the shard goes on: each part is as it was when it was read.

    For a copy that gets all changes since before the first of them; under the lock.
    """

    def __init__(self, segment: Segment) -> None:
        super().__init__(segment, segment.flip, 0)
        # Rows that other ids get meanwhile are read for these, and changed later.
        self._tables = {at: of.with_its_ids() for at, of in self._tables.items()}

    def get(self, span: Span) -> Array:
        """Return a copy of elements."""
        roll_back(self._segment)
        self._flip = self._segment.flip
        found = super().get(span)
        # A row that has lost its id meanwhile is one until a state says so.
        return np.maximum(found, 1) if span.area == TOUCHED else found

    def check(self) -> None:
        """Let the shard go on."""


@dataclass(frozen=True, slots=True)
class BegunCopy:
    """Memory for a copy of a shard, touched before a push must wait for it."""

    memory: Array
    places: Mapping[tuple[str, int], CopyPlace]
    #: The elements whose number is known beforehand.
    parts: Parts
    #: Memory for the rows of unbounded tables, and for some more.
    tables: Sequence[FrozenRows]
    #: Bytes that the shard has now.
    nbytes: int
    #: Whether it copies everything.
    whole: bool = False

    @classmethod
    def of(cls, segment: Segment, index: int | None) -> BegunCopy:
        """Take memory for a copy of a shard, or of the part that an index names.

        WHOLE names everything: a shard's state can be made of such a copy again.
        """
        spans, whole = spans_of(segment, index), index == WHOLE
        memory, at = private(_nbytes_of(spans)), 0
        parts: Parts = []
        places = {}
        for span, dtype in spans:
            size = span.stop * np.dtype(dtype).itemsize
            parts.append((span, memory[at : at + size].view(dtype)))
            places[span.area, span.position] = dtype, span.stop, at
            at += align(size)
        tables, nbytes = [], memory.nbytes
        for position, table in unbounded_of(segment, index):
            more = table.n_rows // 2 + MORE_NBYTES // table.piece.table.row_nbytes
            room = room_for(segment, position, more, whole=whole)
            tables.append(room)
            nbytes += sum(array.nbytes for array in room.cut(table.n_rows).arrays)
        return cls(memory, places, parts, tables, nbytes, whole)

    def read(self, segment: Segment, flip: int) -> FrozenShard | None:
        """Return the shard at a flip; None if updates overwrote it during the copy."""
        counted = Counted.of(segment, flip) if self.whole else None
        tables = copy_all_rows(segment, flip, self.tables) if self.tables else []
        if tables is None or not segment.copy(flip, self.parts):
            return None
        return FrozenShard(self.memory, self.places, tables, counted)


def needed_nbytes(segment: Segment, index: int | None) -> int:
    """Return about how many bytes a copy takes, without one; see :meth:`BegunCopy.of`."""
    found = _nbytes_of(spans_of(segment, index))
    for _, table in unbounded_of(segment, index):
        of_row = 2 * 8 + table.piece.table.row_nbytes
        if index == WHOLE and table.unbounded is not None:
            of_row += sum(slot.strides[0] for slot in table.slots)
            found += 16 * table.unbounded.counts()["candidates"]
        found += of_row * table.n_rows
    return found


def unbounded_of(
    segment: Segment, index: int | None = WHOLE
) -> Iterator[tuple[int, TableMemory]]:
    """Give the unbounded tables among what an index names, with their positions."""
    for position, table in enumerate(segment.tables, len(segment.pieces)):
        is_named = index in (None, WHOLE, table.piece.table.index)
        if table.unbounded is not None and is_named:
            yield position, table


def spans_of(segment: Segment, index: int | None) -> list[tuple[Span, str]]:
    """Return the elements of a shard that a copy has, with dtypes.

    With WHOLE all of them, slots too; else all values, with ARRAYS no table, or those
    of one parameter or table. Elements of unbounded tables are left out: their number
    is not known beforehand.
    """
    areas: list[tuple[str, int, Array]] = []
    whole = index == WHOLE
    for position, piece in enumerate(segment.pieces):
        if index in (None, WHOLE, ARRAYS, piece.parameter.index):
            slots = enumerate(segment.slots[0][position] if whole else ())
            areas.append((WEIGHTS, position, segment.weights[0][position]))
            areas += [(slot_area(j), position, slot) for j, slot in slots]
    for position, table in enumerate(segment.tables, len(segment.pieces)):
        is_named = index in (None, WHOLE, table.piece.table.index)
        if table.unbounded is None and table.piece.n_rows and is_named:
            rows = table.by_area if whole else {ROWS: table.rows}
            areas += [(area, position, array) for area, array in rows.items()]
    return [
        (Span(area, position, 0, array.size), array.dtype.name)
        for area, position, array in areas
    ]


def _nbytes_of(spans: Sequence[tuple[Span, str]]) -> int:
    """Return how many bytes a copy of elements takes."""
    return sum(align(span.stop * np.dtype(dtype).itemsize) for span, dtype in spans)
