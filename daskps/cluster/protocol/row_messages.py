"""Rows in messages: those that a call brings, and those that it asks for.

Ids travel as they are in the table. They are looked at here, where they arrive, and
once more by the shard: what reads memory by them comes from another process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps import errors
from daskps.cluster.protocol.packing import pack_array, unpack_array
from daskps.config import cache_dir
from daskps.layout.arrays import FLOATS, compute_dtype
from daskps.limits import MOST_ROWS, MOST_ROWS_NBYTES
from daskps.shards.steps import GRADIENT, MODEL, REMOVE, Item

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.codecs import Codec
    from daskps.layout.arrays import Layout
    from daskps.layout.tables import Table, TablePiece
    from daskps.typing import Array


class RowRequest(NamedTuple):
    """Rows of one table that a shard is asked for."""

    #: Position of the table's piece in the shard.
    position: int
    #: By their numbers in the table.
    ids: Array
    #: Length and dtype of a row; a length of 0 where only marks are asked for.
    dim: int
    dtype: str
    #: Whether some may be absent: then the answer has a mark for each, 1 where it is
    #: there, behind the rows of all tables.
    is_marked: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the answer."""
        marks = len(self.ids) if self.is_marked else 0
        return len(self.ids) * self.dim * np.dtype(self.dtype).itemsize + marks


def given_to(table: Table, kind: str) -> tuple[str, int]:
    """Return dtype and number of the elements that go to a table with each id."""
    computed = kind == GRADIENT and table.dtype in FLOATS
    dtype = compute_dtype(table.dtype) if computed else table.dtype
    return dtype, 0 if kind == REMOVE else table.dim


def most_rows(table: Table) -> int:
    """Return how many rows one call may read of a shard: others go with the next one.

    They are read under one look at the shard's sequence, and are one answer.
    """
    return max(1, min(MOST_ROWS, MOST_ROWS_NBYTES // table.row_nbytes))


def pack_rows(asked: RowRequest) -> list[Any]:
    """Return what asks for rows as a message has it."""
    return [asked.position, pack_array(asked.ids), not asked.dim]


def unpack_rows(layout: Layout, shard: int, packed: Sequence[Any]) -> RowRequest:
    """Rebuild what asks for rows.

    Raises
    ------
    ProtocolError
        For rows that the shard does not have, or more than one call may read.
    """
    position, data, finds = packed
    piece = _piece(layout, shard, position)
    if piece is None:
        raise errors.ProtocolError(
            f"a read of rows of piece {position!r:.60} of shard {shard}, which is no "
            f"table"
        )
    ids, table = unpack_array(data, "int64"), piece.table
    if ids.ndim != 1 or len(ids) > most_rows(table) or not _holds(piece, ids):
        raise errors.ProtocolError(
            f"a read of {ids.size:,} rows of shard {shard}, which has {piece} and gives "
            f"{most_rows(table):,} at once"
        )
    return asked_of(table, position, ids, finds=finds)


def asked_of(
    table: Table, position: int, ids: Array, *, finds: bool = False
) -> RowRequest:
    """Return what asks for rows of a table, or with `finds` which of them there are.

    Raises
    ------
    ProtocolError
        For a look for rows of a table that has a number of them.
    """
    if finds and table.is_bounded:
        raise errors.ProtocolError(
            f"a look for rows of table {table.name[:60]!r}, which has {table.told}"
        )
    dim = 0 if finds else table.dim
    return RowRequest(position, ids, dim, table.dtype, not table.is_bounded)


def unpack_rows_item(
    layout: Layout,
    shard: int,
    packed: Sequence[Any],
    kind: str,
    *,
    codec: Codec | None = None,
) -> Item:
    """Rebuild rows that go to a table, from (position, start, data, ids).

    Of a codec they are words.

    Raises
    ------
    PushRejectedError
        For rows that do not fit their table.
    """
    position, start, data, given = packed
    piece = _piece(layout, shard, position)
    if piece is None or start != 0 or kind == MODEL:
        raise errors.PushRejectedError(
            f"a {kind} of rows for piece {position!r:.60} of shard {shard}, from "
            f"{start!r:.60} on, which is no table"
        )
    dtype, dim = given_to(piece.table, kind)
    ids = unpack_array(given, "int64")
    rows = unpack_array(data, codec.dtype if codec else dtype)
    fits, n = ids.ndim == rows.ndim == 1, ids.size * dim
    if codec and n:
        fits = fits and codec.of_rows(dim).fits(len(rows), n)
    else:
        fits = fits and len(rows) == n
    if not (fits and _holds(piece, ids)):
        raise errors.PushRejectedError(
            f"{ids.size:,} ids with {rows.size:,} elements do not fit shard {shard}, "
            f"which has {piece}, each of {dim} elements"
        )
    return Item(position, 0, rows, ids)


def _holds(piece: TablePiece, ids: Array) -> bool:
    return piece.holds(ids, cache_dir=cache_dir())


def _piece(layout: Layout, shard: int, position: Any) -> TablePiece | None:
    """Return the table's piece at a position; None where there is none."""
    pieces, n = layout.table_pieces[shard], len(layout.pieces[shard])
    if type(position) is not int or not n <= position < n + len(pieces):
        return None
    return pieces[position - n]
