"""The copy that a cut makes of one shard: its memory, and how that is filled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from daskps.layout.arrays import align
from daskps.layout.chunks import ARRAYS, any_tables
from daskps.layout.spans import IDS, ROWS, WEIGHTS, Span
from daskps.shards.memory.areas import private
from daskps.shards.row_reads import AllRows, copy_all_rows, place_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from daskps.layout.arrays import Layout
    from daskps.layout.tables import Table
    from daskps.shards.memory.segment import Segment
    from daskps.typing import Array

    #: What is read into a copy, and where it goes.
    Parts: TypeAlias = list[tuple[Span, Array]]

#: By how much a table of any ids may grow between the beginning of a cut and its copy,
#: before pushes have to wait until there is memory: half as many rows, and so many bytes.
MORE_NBYTES = 2**22


#: Where elements of a piece are in a copy's memory: dtype, the first, the end, the byte.
CopyPlace = tuple[str, int, int, int]


class ShardCopy:
    """Values of one shard at one version; nothing changes it.

    Parameters
    ----------
    memory : ndarray, shape (nbytes,), uint8
        All of them.
    places : mapping of (str, int) to CopyPlace
        By area and position what of it is where.
    tables : sequence of AllRows
        The tables of any ids, whose memory is their own.
    """

    def __init__(
        self,
        memory: Array,
        places: Mapping[tuple[str, int], CopyPlace],
        tables: Sequence[AllRows] = (),
    ) -> None:
        self._memory, self._places = memory, dict(places)
        self._tables = {of.position: of for of in tables}
        for array in (memory, *self._of_tables):
            array.flags.writeable = False

    @classmethod
    def begin(cls, spans: Sequence[tuple[Span, str]]) -> tuple[ShardCopy, Parts]:
        """Return a copy of elements, each with their dtype, and where they are to go.

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
        return type(self), (self._memory, self._places, [*self._tables.values()])

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.nbytes} bytes>"

    @property
    def _of_tables(self) -> list[Array]:
        return [array for of in self._tables.values() for array in (of.ids, of.rows)]

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self._memory.nbytes + sum(array.nbytes for array in self._of_tables)

    @property
    def n_rows(self) -> list[int]:
        """How many rows each table of any ids has."""
        return [len(of.ids) for of in self._tables.values()]

    def with_tables(self, tables: Sequence[AllRows]) -> ShardCopy:
        """Return the same with tables of any ids."""
        return type(self)(self._memory, self._places, tables)

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + self.nbytes

    def get(self, span: Span) -> Array:
        """Return elements of the shard, a view.

        Raises
        ------
        LookupError
            For elements that it has not.
        """
        if (table := self._tables.get(span.position)) is not None:
            whole = {IDS: table.ids, ROWS: table.rows.reshape(-1)}[span.area]
            _check(span, 0, len(whole))
            return whole[span.start : span.stop]
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
    """A copy of a shard that is to be filled."""

    copy: ShardCopy
    #: What is known beforehand.
    parts: Parts
    #: Memory for the rows of tables of any ids, and for some more.
    tables: Sequence[AllRows]
    #: Of what is there now.
    nbytes: int

    @classmethod
    def of(
        cls, segment: Segment, layout: Layout, shard: int, index: int | None
    ) -> BegunCopy:
        """Take memory for a copy of a shard, or of what is meant by an index."""
        copy, parts = ShardCopy.begin(spans_of(layout, shard, index))
        tables, nbytes = [], copy.nbytes
        for table in any_tables(layout, index):
            position = layout.table_position(shard, table.index)
            now = segment.tables[position - len(segment.pieces)].n_rows
            more = now // 2 + MORE_NBYTES // table.row_nbytes
            tables.append(place_for(segment, position, more))
            nbytes += rows_nbytes([table], [now])
        return cls(copy, parts, tables, nbytes)

    def read(self, segment: Segment, flip: int) -> ShardCopy | None:
        """Return the shard at a flip; None where updates ran into the copy."""
        tables = copy_all_rows(segment, flip, self.tables) if self.tables else []
        if tables is None or not segment.copy(flip, self.parts):
            return None
        return self.copy.with_tables(tables)


def spans_of(layout: Layout, shard: int, index: int | None) -> list[tuple[Span, str]]:
    """Return what a snapshot copies of a shard, with dtypes.

    All of it, or one parameter or table, or with ARRAYS no table. What a table of any
    ids has nobody knows beforehand.
    """
    found = [
        (Span(WEIGHTS, position, 0, p.size), p.parameter.dtype)
        for position, p in enumerate(layout.pieces[shard])
        if index in (None, ARRAYS, p.parameter.index)
    ]
    for piece in layout.table_pieces[shard]:
        table = piece.table
        if table.is_bounded and piece.n_rows and index in (None, table.index):
            position = layout.table_position(shard, table.index)
            found.append((Span(ROWS, position, 0, piece.size), table.dtype))
    return found


def nbytes_of(spans: Sequence[tuple[Span, str]]) -> int:
    """Return how many bytes a copy of elements takes."""
    sizes = ((s.stop - s.start) * np.dtype(dtype).itemsize for s, dtype in spans)
    return sum(map(align, sizes))


def rows_nbytes(tables: Iterable[Table], n_rows: Iterable[int]) -> int:
    """Return how many bytes the copies of tables of any ids take, with their ids."""
    return sum((8 + t.row_nbytes) * n for t, n in zip(tables, n_rows, strict=True))
