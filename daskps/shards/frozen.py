"""A shard at one flip, which snapshots and checkpoints read: copied, or held in place.

A copy is made while a cut holds the shard back, in memory that was taken before. A save
without room for copies reads the shard where it is, and pushes wait until it is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from daskps.errors import ConsistencyError
from daskps.layout.arrays import align
from daskps.layout.chunks import ARRAYS, WHOLE, any_tables
from daskps.layout.spans import ROWS, WEIGHTS, Span, slot_area
from daskps.shards.frozen_rows import (
    FrozenRows,
    check_span,
    copy_all_rows,
    held_rows,
    room_for,
)
from daskps.shards.installing import Counted
from daskps.shards.memory.areas import private
from daskps.shards.memory.format import ROWS_SEQUENCE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.layout.arrays import Layout
    from daskps.shards.memory.segment import Segment
    from daskps.typing import Array

    #: Elements to read into a copy, and their memory there.
    Parts: TypeAlias = list[tuple[Span, Array]]

#: Most growth of a table of any ids between the beginning of a cut and its copy, before
#: pushes have to wait for memory: half as many rows, and so many bytes.
MORE_NBYTES = 2**22

#: Place of a piece's elements in a copy's memory: dtype, the first, the end, the byte.
CopyPlace = tuple[str, int, int, int]


class FrozenShard:
    """Values of one shard at one version; nothing changes it.

    Parameters
    ----------
    memory : ndarray, shape (nbytes,), uint8
        Memory of all values.
    places : mapping of (str, int) to CopyPlace
        Place of each piece in it, by area and position.
    tables : sequence of FrozenRows
        The tables of any ids, which have memory of their own.
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
        """Number of rows of each table of any ids."""
        return [len(of) for of in self._tables.values()]

    @property
    def n_candidates(self) -> list[int]:
        """Number of ids without a row, by table of any ids; where it has everything."""
        return [of.candidates.shape[1] for of in self._tables.values()]

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + self.memory_nbytes

    def get(self, span: Span) -> Array:
        """Return elements of the shard, a view; of tables of any ids it may be a copy.

        Raises
        ------
        LookupError
            If it does not have these elements.
        """
        if (table := self._tables.get(span.position)) is not None:
            return table.get(span)
        dtype, first, end, at = self._places[span.area, span.position]
        check_span(span, first, end)
        size = np.dtype(dtype).itemsize
        at += (span.start - first) * size
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
        self._sequence = segment.header[ROWS_SEQUENCE]
        tables = [
            held_rows(segment, flip, position)
            for position, table in enumerate(segment.tables, len(segment.pieces))
            if table.any_rows is not None
        ]
        counted = Counted.of(segment, flip)
        super().__init__(np.empty(0, np.uint8), {}, tables, counted)
        self._check()

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
            check_span(span, 0, span.start + len(now))
            found = np.empty_like(now)
            segment.payload.copy(found, now)
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


@dataclass(frozen=True, slots=True)
class BegunCopy:
    """Memory for a copy of a shard, touched before a push must wait for it."""

    memory: Array
    places: Mapping[tuple[str, int], CopyPlace]
    #: The elements whose number is known beforehand.
    parts: Parts
    #: Memory for the rows of tables of any ids, and for some more.
    tables: Sequence[FrozenRows]
    #: Bytes that the shard has now.
    nbytes: int
    #: Whether it copies everything.
    whole: bool = False

    @classmethod
    def of(
        cls, segment: Segment, layout: Layout, shard: int, index: int | None
    ) -> BegunCopy:
        """Take memory for a copy of a shard, or of the part that an index names.

        WHOLE names everything: a shard's state can be made of such a copy again.
        """
        whole = index == WHOLE
        spans = spans_of(layout, shard, index) + (slots_of(segment) if whole else [])
        memory, at = private(nbytes_of(spans)), 0
        parts: Parts = []
        places = {}
        for span, dtype in spans:
            size = (span.stop - span.start) * np.dtype(dtype).itemsize
            parts.append((span, memory[at : at + size].view(dtype)))
            places[span.area, span.position] = dtype, span.start, span.stop, at
            at += align(size)
        tables, nbytes = [], memory.nbytes
        for table in any_tables(layout, index):
            position = layout.table_position(shard, table.index)
            now = segment.tables[position - len(segment.pieces)].n_rows
            more = now // 2 + MORE_NBYTES // table.row_nbytes
            room = room_for(segment, position, more, whole=whole)
            tables.append(room)
            nbytes += sum(array.nbytes for array in room.cut(now).arrays)
        return cls(memory, places, parts, tables, nbytes, whole)

    def read(self, segment: Segment, flip: int) -> FrozenShard | None:
        """Return the shard at a flip; None if updates overwrote it during the copy."""
        counted = Counted.of(segment, flip) if self.whole else None
        tables = copy_all_rows(segment, flip, self.tables) if self.tables else []
        if tables is None or not segment.copy(flip, self.parts):
            return None
        return FrozenShard(self.memory, self.places, tables, counted)


def needed_nbytes(
    segment: Segment, layout: Layout, shard: int, index: int | None
) -> int:
    """Return about how many bytes a copy takes, without one; see :meth:`BegunCopy.of`."""
    whole = index == WHOLE
    found = nbytes_of(spans_of(layout, shard, index))
    found += nbytes_of(slots_of(segment)) if whole else 0
    for table in any_tables(layout, index):
        position = layout.table_position(shard, table.index)
        memory = segment.tables[position - len(segment.pieces)]
        of_row = 2 * 8 + table.row_nbytes
        if whole and memory.any_rows is not None:
            of_row += sum(slot.strides[0] for slot in memory.slots)
            found += 16 * memory.any_rows.counts()["candidates"]
        found += of_row * memory.n_rows
    return found


def spans_of(layout: Layout, shard: int, index: int | None) -> list[tuple[Span, str]]:
    """Return the elements of a shard that a snapshot copies, with dtypes.

    All of them, or one parameter or table, or with ARRAYS no table. Elements of tables
    of any ids are left out: their number is not known beforehand.
    """
    every = index in (None, WHOLE)
    found = [
        (Span(WEIGHTS, position, 0, p.size), p.parameter.dtype)
        for position, p in enumerate(layout.pieces[shard])
        if every or index in (ARRAYS, p.parameter.index)
    ]
    for piece in layout.table_pieces[shard]:
        table = piece.table
        if table.is_bounded and piece.n_rows and (every or index == table.index):
            position = layout.table_position(shard, table.index)
            found.append((Span(ROWS, position, 0, piece.size), table.dtype))
    return found


def slots_of(segment: Segment) -> list[tuple[Span, str]]:
    """Return the slots of a shard, with dtypes, but not those of tables of any ids."""
    found = [
        (Span(slot_area(j), position, 0, slot.size), slot.dtype.name)
        for position, slots in enumerate(segment.slots[0])
        for j, slot in enumerate(slots)
    ]
    for position, table in enumerate(segment.tables, len(segment.pieces)):
        if table.piece.n_rows:
            slots = enumerate(table.slots)
            spans = [(Span(slot_area(j), position, 0, s.size), s) for j, s in slots]
            found += [(span, slot.dtype.name) for span, slot in spans]
    return found


def nbytes_of(spans: Sequence[tuple[Span, str]]) -> int:
    """Return how many bytes a copy of elements takes."""
    sizes = ((s.stop - s.start) * np.dtype(dtype).itemsize for s, dtype in spans)
    return sum(map(align, sizes))
