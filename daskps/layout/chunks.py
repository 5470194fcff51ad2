"""Cuts of a parameter into whole rows near the borders of its shards.

A row that ends in another shard is put together where most of it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from daskps.layout.spans import IDS, ROWS, WEIGHTS, Span

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.layout.arrays import Layout
    from daskps.layout.parameters import Parameter, Piece
    from daskps.layout.tables import Table


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
    """Cut a parameter that is not empty into whole rows near its shards' borders."""
    pieces, shape = layout.pieces_of[parameter.index], parameter.shape
    rows = shape[0] if shape else 1
    width = pieces[-1].stop // rows
    found, first = [], 0
    for piece in pieces:
        last = rows if piece is pieces[-1] else round(piece.stop / width)
        if last > first:
            parts = _parts(layout, pieces, first * width, last * width)
            found.append(Chunk(last - first, parts))
            first = last
    return found


#: In place of an index: all arrays, but no table.
ARRAYS = -1
#: In place of an index: everything, also slots and what is counted, as a checkpoint has it.
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


def any_tables(layout: Layout, index: int | None) -> list[Table]:
    """Return the tables of any ids among what is copied: all, or the one of an index."""
    wanted = None if index == WHOLE else index
    return [t for t in layout.tables if not t.is_bounded and wanted in (None, t.index)]


def chunks_of_table(layout: Layout, table: Table) -> list[Chunk]:
    """Return the rows of each shard that has any; of these none is ever cut."""
    found = []
    for shard, pieces in enumerate(layout.table_pieces):
        piece = pieces[table.index - len(layout.parameters)]
        if piece.n_rows:
            position = layout.table_position(shard, table.index)
            found.append(
                Chunk(piece.n_rows, ((shard, Span(ROWS, position, 0, piece.size)),))
            )
    return found


def chunks_of_ids(
    layout: Layout, table: Table, n_rows: Mapping[int, int]
) -> list[tuple[Chunk, Chunk]]:
    """Return ids and rows of each shard that has any, of a table of any ids.

    Parameters
    ----------
    layout : Layout
        The store's.
    table : Table
        The table.
    n_rows : mapping of int to int
        How many rows each shard has, as nothing but the shard can say.

    Returns
    -------
    list of (Chunk, Chunk)
        In the order of the shards.
    """
    found = []
    for shard, n in sorted(n_rows.items()):
        position = layout.table_position(shard, table.index)
        ids, rows = Span(IDS, position, 0, n), Span(ROWS, position, 0, n * table.dim)
        if n:
            found.append((Chunk(n, ((shard, ids),)), Chunk(n, ((shard, rows),))))
    return found


def _parts(
    layout: Layout, pieces: Sequence[Piece], start: int, stop: int
) -> tuple[tuple[int, Span], ...]:
    parts = []
    for piece in pieces:
        a, b = max(start, piece.start), min(stop, piece.stop)
        if a < b:
            position = layout.positions[piece.shard, piece.parameter.index]
            span = Span(WEIGHTS, position, a - piece.start, b - piece.start)
            parts.append((piece.shard, span))
    return tuple(parts)
