"""Runs: where elements are in the shards; chunks: whole rows near shards' borders.

A row that ends in another shard is put together where most of it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from daskps.layout.spans import IDS, ROWS, WEIGHTS, Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from daskps.layout.arrays import Layout
    from daskps.layout.parameters import Parameter
    from daskps.layout.tables import Table


class Run(NamedTuple):
    """Elements [start, stop) that lie one behind the other in a shard's piece."""

    shard: int
    position: int
    start: int
    stop: int

    def span(self, area: str, start: int, stop: int) -> Span:
        """Return where some of them are in the shard."""
        return Span(area, self.position, start - self.start, stop - self.start)


def runs_of(
    layout: Layout,
    index: int,
    *,
    width: int = 1,
    first: int = 0,
    shard: int | None = None,
    n_rows: Mapping[int, int] | None = None,
) -> Iterator[Run]:
    """Give where the elements of a parameter or table are, in order; none is empty.

    Parameters
    ----------
    layout : Layout
        The store's.
    index : int
        Of the parameter or table.
    width : int
        Elements of a row of a table.
    first : int
        The number of the first element.
    shard : int, optional
        The only shard to look at; all by default.
    n_rows : mapping of int to int, optional
        For an unbounded table how many rows each shard has, as nothing but the shard
        can say.
    """
    n, every = len(layout.parameters), range(layout.n_shards)
    if index < n:
        pieces = layout.pieces_of.get(index, ())
        if shard is not None:
            position = layout.positions.get((shard, index))
            pieces = () if position is None else (layout.pieces[shard][position],)
        for one in pieces:
            position = layout.positions[one.shard, index]
            yield Run(one.shard, position, first + one.start, first + one.stop)
        return
    for number in every if shard is None else (shard,):
        piece = layout.table_pieces[number][index - n]
        if n_rows is None:
            start, rows = first + piece.first_row * width, piece.n_rows
        else:
            start, rows = first, n_rows.get(number, 0)
            first += rows * width
        if rows:
            position = layout.table_position(number, index)
            yield Run(number, position, start, start + rows * width)


def parts_of(
    runs: Iterable[Run], area: str, start: int, stop: int
) -> tuple[tuple[int, Span], ...]:
    """Return the shard and span of each part of elements [start, stop)."""
    parts = []
    for run in runs:
        a, b = max(start, run.start), min(stop, run.stop)
        if a < b:
            parts.append((run.shard, run.span(area, a, b)))
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some rows of a parameter, and where their elements are."""

    rows: int
    #: Shard and span of each part, in order.
    parts: tuple[tuple[int, Span], ...]

    @property
    def home(self) -> int:
        """Shard of the largest part, on whose owner the chunk is put together."""
        return max(self.parts, key=lambda part: part[1].stop - part[1].start)[0]


def chunks_of(layout: Layout, parameter: Parameter) -> list[Chunk]:
    """Cut a parameter into whole rows near its shards' borders; an empty one has none."""
    pieces, shape = layout.pieces_of.get(parameter.index, ()), parameter.shape
    if not pieces:
        return []
    rows = shape[0] if shape else 1
    width = pieces[-1].stop // rows
    runs = [*runs_of(layout, parameter.index)]
    found, first = [], 0
    for piece in pieces:
        last = rows if piece is pieces[-1] else round(piece.stop / width)
        if last > first:
            parts = parts_of(runs, WEIGHTS, first * width, last * width)
            found.append(Chunk(last - first, parts))
            first = last
    return found


#: In place of an index: all arrays, but no table.
ARRAYS = -1
#: In place of an index: everything, also slots and what is counted, as a checkpoint has
#: it.
WHOLE = -2


def shards_of(layout: Layout, index: int | None) -> list[int]:
    """Return the shards that have any of a parameter or table; all for all of them."""
    n = len(layout.parameters)
    if index in (None, ARRAYS, WHOLE):
        return list(range(layout.n_shards))
    if index < n:
        return [piece.shard for piece in layout.pieces_of.get(index, ())]
    every = enumerate(layout.table_pieces)
    return [s for s, of in every if index - n < len(of) and not of[index - n].is_empty]


def unbounded_tables(layout: Layout, index: int | None) -> list[Table]:
    """Return the unbounded tables among what is copied: all, or the one of an index."""
    wanted = None if index == WHOLE else index
    return [t for t in layout.tables if not t.is_bounded and wanted in (None, t.index)]


def chunks_of_table(
    layout: Layout,
    table: Table,
    n_rows: Mapping[int, int] | None = None,
    area: str = ROWS,
) -> list[Chunk]:
    """Return the rows, or the ids, of each shard that has any; none is ever cut.

    `n_rows` has for an unbounded table the number of each shard's rows.
    """
    width, index = 1 if area == IDS else table.dim, table.index
    return [
        Chunk(
            (run.stop - run.start) // width,
            ((run.shard, run.span(area, run.start, run.stop)),),
        )
        for run in runs_of(layout, index, width=width, n_rows=n_rows)
    ]
