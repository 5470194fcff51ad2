"""Rows in messages: those that a call brings, and those that it asks for.

Ids travel as they are in the table. They are looked at where they arrive, and once more
by the shard: what reads memory by them comes from another process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from daskps.layout.arrays import FLOATS, compute_dtype
from daskps.limits import MOST_ROWS, MOST_ROWS_NBYTES
from daskps.shards.steps import GRADIENT, REMOVE

if TYPE_CHECKING:
    from daskps.layout.tables import Table
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


def asked_of(
    table: Table, position: int, ids: Array, *, finds: bool = False
) -> RowRequest:
    """Return what asks for rows of a table, or with `finds` which of them there are."""
    dim = 0 if finds else table.dim
    return RowRequest(position, ids, dim, table.dtype, not table.is_bounded)
