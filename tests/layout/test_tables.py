"""Tables in a layout: rows are cut, never split, and numbered after the arrays."""

from __future__ import annotations

import numpy as np
import pytest

from daskps.errors import LayoutError
from daskps.layout.arrays import Layout
from daskps.layout.tables import Table, TablePiece

ARRAYS = {"w": ((5, 3), "float32"), "b": ((3,), "float64")}
TABLES = {"emb": (10, 4, "float32"), "few": (2, 7, "int64")}


@pytest.mark.parametrize("n_shards", [1, 2, 3, 5, 12])
def test_rows_are_cut_like_array_split(n_shards):
    layout = Layout.build(ARRAYS, n_shards, TABLES)
    for ordinal, table in enumerate(layout.tables):
        parts = np.array_split(np.arange(table.rows), n_shards)
        for shard, rows in enumerate(parts):
            piece = layout.table_pieces[shard][ordinal]
            assert piece == TablePiece(table, shard, piece.first_row, len(rows))
            assert [*range(piece.first_row, piece.first_row + piece.n_rows)] == [*rows]
            assert piece.size == len(rows) * table.dim
            assert piece.nbytes == piece.size * np.dtype(table.dtype).itemsize


def test_tables_are_numbered_after_the_arrays():
    layout = Layout.build(ARRAYS, 3, TABLES)
    assert layout.tables == (
        Table(2, "emb", 10, 4, "float32"),
        Table(3, "few", 2, 7, "int64"),
    )
    assert layout.table_by_name["few"].index == 3
    assert [*map(layout.dtype_of, range(4))] == [
        "float32",
        "float64",
        "float32",
        "int64",
    ]
    # Not every shard has a piece of every array, but all have one of every table.
    assert [*map(len, layout.pieces)] == [2, 2, 2]
    assert [layout.table_position(0, i) for i in (2, 3)] == [2, 3]
    lean = Layout.build({"b": ((1,), "float64")}, 3, TABLES)
    assert [lean.table_position(s, 1) for s in range(3)] == [1, 0, 0]


@pytest.mark.parametrize("arrays", [{}, ARRAYS])
@pytest.mark.parametrize("tables", [{}, TABLES])
def test_bytes_and_the_wire(arrays, tables):
    layout = Layout.build(arrays, 3, tables)
    assert Layout.from_wire(layout.to_wire()) == layout
    values = [np.empty(*about) for about in arrays.values()]
    values += [np.empty((n, dim), d) for n, dim, d in tables.values()]
    assert layout.nbytes == sum(v.nbytes for v in values)
    assert sum(map(layout.shard_nbytes, range(3))) == layout.nbytes


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"w": (3, 4, "float32")}, "of an array and of a table"),
        ({"t": (0, 4, "float32")}, "0 rows"),
        ({"t": (3, 0, "float32")}, "3 rows of 0 numbers"),
        ({"t": (3, 4, "complex64")}, "cannot hold"),
    ],
)
def test_tables_that_cannot_be(tables, said):
    with pytest.raises(LayoutError, match=said):
        Layout.build(ARRAYS, 2, tables)
