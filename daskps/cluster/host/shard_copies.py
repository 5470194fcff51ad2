"""The copy that a cut makes of one shard: its memory, and how a host fills it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from daskps.layout.arrays import align
from daskps.layout.chunks import ARRAYS, WHOLE, any_tables
from daskps.layout.spans import ROWS, WEIGHTS, Span, slot_area
from daskps.shards.installing import Counted
from daskps.shards.memory.areas import private
from daskps.shards.table_copies import AllRows, copy_all_rows, place_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from daskps.layout.arrays import Layout
    from daskps.layout.tables import Table
    from daskps.shards.memory.segment import Segment
    from daskps.typing import Array

    #: Elements to read into a copy, and their memory there.
    Parts: TypeAlias = list[tuple[Span, Array]]

#: Most growth of a table of any ids between the beginning of a cut and its copy, before
#: pushes have to wait for memory: half as many rows, and so many bytes.
MORE_NBYTES = 2**22


#: Place of a piece's elements in a copy's memory: dtype, the first, the end, the byte.
CopyPlace = tuple[str, int, int, int]


class ShardCopy:
    """Values of one shard at one version; nothing changes it.

    Parameters
    ----------
    memory : ndarray, shape (nbytes,), uint8
        Memory of all values.
    places : mapping of (str, int) to CopyPlace
        Place of each piece in it, by area and position.
    tables : sequence of AllRows
        The tables of any ids, which have memory of their own.
    counted : Counted, optional
        The counters of the shard.
    """

    def __init__(
        self,
        memory: Array,
        places: Mapping[tuple[str, int], CopyPlace],
        tables: Sequence[AllRows] = (),
        counted: Counted | None = None,
    ) -> None:
        self._memory, self._places = memory, dict(places)
        #: The counters of the shard, in a copy of everything.
        self.counted = counted
        self._tables = {of.position: of for of in tables}
        for array in (memory, *self._of_tables):
            array.flags.writeable = False

    @classmethod
    def begin(cls, spans: Sequence[tuple[Span, str]]) -> tuple[ShardCopy, Parts]:
        """Return a copy for elements, each with its dtype, and the places to fill.

        Its memory is touched before a push must wait for it.
        """
        memory, at = private(nbytes_of(spans)), 0
        parts: Parts = []
        places = {}
        for span, dtype in spans:
            size = (span.stop - span.start) * np.dtype(dtype).itemsize
            parts.append((span, memory[at : at + size].view(dtype)))
            places[span.area, span.position] = dtype, span.start, span.stop, at
            at += align(size)
        return cls(memory, places), parts

    def __reduce__(self) -> Any:
        tables = [*self._tables.values()]
        return type(self), (self._memory, self._places, tables, self.counted)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.nbytes} bytes>"

    @property
    def _of_tables(self) -> list[Array]:
        return [array for of in self._tables.values() for array in of.arrays]

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self._memory.nbytes + sum(array.nbytes for array in self._of_tables)

    @property
    def memory_nbytes(self) -> int:
        """Bytes of memory that the copy takes."""
        return self.nbytes

    @property
    def n_rows(self) -> list[int]:
        """Number of rows of each table of any ids."""
        return [len(of.ids) for of in self._tables.values()]

    @property
    def n_candidates(self) -> list[int]:
        """Number of ids without a row, by table of any ids; in a copy of everything."""
        found = [of.candidates for of in self._tables.values()]
        return [0 if of is None else of.shape[1] for of in found]

    def with_tables(
        self, tables: Sequence[AllRows], counted: Counted | None
    ) -> ShardCopy:
        """Return the same with tables of any ids, and the counters of the shard."""
        return type(self)(self._memory, self._places, tables, counted)

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + self.nbytes

    def get(self, span: Span) -> Array:
        """Return elements of the shard, a view; of tables of any ids it may be a copy.

        Raises
        ------
        LookupError
            If the copy does not have these elements.
        """
        if (table := self._tables.get(span.position)) is not None:
            return table.get(span)
        dtype, first, end, at = self._places[span.area, span.position]
        _check(span, first, end)
        size = np.dtype(dtype).itemsize
        at += (span.start - first) * size
        return self._memory[at : at + (span.stop - span.start) * size].view(dtype)


def _check(span: Span, first: int, end: int) -> None:
    if not first <= span.start <= span.stop <= end:
        raise IndexError(f"elements {span} of a copy that has {first} to {end}")


@dataclass(frozen=True, slots=True)
class BegunCopy:
    """A copy of a shard that is still to be filled."""

    copy: ShardCopy
    #: The elements whose number is known beforehand.
    parts: Parts
    #: Memory for the rows of tables of any ids, and for some more.
    tables: Sequence[AllRows]
    #: Bytes that the shard has now.
    nbytes: int
    #: Whether it copies everything.
    whole: bool = False

    @staticmethod
    def needed_nbytes(
        segment: Segment, layout: Layout, shard: int, index: int | None
    ) -> int:
        """Return about how many bytes a copy takes, without one; see :meth:`of`."""
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

    @classmethod
    def of(
        cls, segment: Segment, layout: Layout, shard: int, index: int | None
    ) -> BegunCopy:
        """Take memory for a copy of a shard, or of the part that an index names.

        WHOLE names everything: a shard's state can be made of such a copy again.
        """
        whole = index == WHOLE
        spans = spans_of(layout, shard, index)
        if whole:
            spans += slots_of(segment)
        copy, parts = ShardCopy.begin(spans)
        tables, nbytes = [], copy.nbytes
        for table in any_tables(layout, index):
            position = layout.table_position(shard, table.index)
            now = segment.tables[position - len(segment.pieces)].n_rows
            more = now // 2 + MORE_NBYTES // table.row_nbytes
            place = place_for(segment, position, more, whole=whole)
            tables.append(place)
            nbytes += sum(array.nbytes for array in place.cut(now).arrays)
        return cls(copy, parts, tables, nbytes, whole)

    def read(self, segment: Segment, flip: int) -> ShardCopy | None:
        """Return the shard at a flip; None if updates overwrote it during the copy."""
        counted = Counted.of(segment, flip) if self.whole else None
        tables = copy_all_rows(segment, flip, self.tables) if self.tables else []
        if tables is None or not segment.copy(flip, self.parts):
            return None
        return self.copy.with_tables(tables, counted)


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


def rows_nbytes(tables: Iterable[Table], n_rows: Iterable[int]) -> int:
    """Return how many bytes the copies of tables of any ids take, with their ids."""
    return sum((8 + t.row_nbytes) * n for t, n in zip(tables, n_rows, strict=True))
