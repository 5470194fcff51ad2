"""Tables: named sets of rows by number, and which shard has which of them.

The rows of a table are cut into contiguous ranges like ``np.array_split``; no row is ever
split. Every shard has a piece of every table, of no rows where there are fewer rows than
shards: a push of a table goes to all of them, and so each counts the table's steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from daskps.layout.bounds import bounds


@dataclass(frozen=True, slots=True)
class Table:
    """One table; its rows are numbered from 0."""

    #: Among parameters and tables together, which come after them.
    index: int
    name: str
    rows: int
    #: Length of a row.
    dim: int
    dtype: str

    @property
    def row_nbytes(self) -> int:
        """Number of bytes of one row."""
        return self.dim * np.dtype(self.dtype).itemsize

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.rows * self.dim

    @property
    def nbytes(self) -> int:
        """Number of bytes of one copy of the rows."""
        return self.rows * self.row_nbytes


@dataclass(frozen=True, slots=True)
class TablePiece:
    """The rows of one table that one shard owns."""

    table: Table
    shard: int
    first_row: int
    n_rows: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.n_rows * self.table.dim

    @property
    def nbytes(self) -> int:
        """Number of bytes of one copy of the rows."""
        return self.n_rows * self.table.row_nbytes


def cut(table: Table, n_shards: int, shard: int) -> TablePiece:
    """Return the piece of a table that one of its shards has."""
    start, stop = bounds(table.rows, n_shards, shard)
    return TablePiece(table, shard, start, stop - start)
