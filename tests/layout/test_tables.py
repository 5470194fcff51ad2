"""Tables in a layout: rows are cut, never split, and numbered after the arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskps import init
from daskps.errors import LayoutError
from daskps.kernels.id_hash import buckets
from daskps.layout.arrays import Layout
from daskps.layout.tables import Table, TablePiece, UnboundedIds, UnboundedTable
from tests.kernels.compiling import kept

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


ANY = np.array([7, -1, 2**63 - 1, -(2**63), 0, 7, 123_456_789], np.int64)


@pytest.mark.parametrize("n_shards", [1, 2, 3, 5, 12])
def test_unbounded_rows_are_cut_by_their_hash(n_shards):
    """Each id falls to one shard, whatever it is, and its piece says so."""
    given: Any = {"emb": (0, 4, "float32", UnboundedIds(init.normal(), 3))}
    layout = Layout.build(ARRAYS, n_shards, given)
    table: Any = layout.tables[0]
    split = table.split(ANY, n_shards)
    pieces: list[Any] = [of[0] for of in layout.table_pieces]
    assert split.starts[-1] == len(ANY)
    at = np.arange(len(ANY)) if split.pos is None else split.pos
    np.testing.assert_array_equal(split.ids, ANY[at])
    for shard, piece in enumerate(pieces):
        own = split.ids[split.starts[shard] : split.starts[shard + 1]]
        assert piece.holds(own, cache_dir=kept())
        assert piece.holds(ANY, cache_dir=kept()) == (len(own) == len(ANY))
        assert (piece.size, piece.nbytes, piece.first_row) == (0, 0, 0)
        assert f"{piece.first_bucket:,}" in str(piece)
    assert [p.stop_bucket for p in pieces] == [
        *(p.first_bucket for p in pieces[1:]),
        table.n_buckets,
    ]
    found = buckets(ANY, table.hash_seed, table.n_buckets)
    assert len(np.unique(found)) == len(np.unique(ANY))


@pytest.mark.parametrize("seed", [0, 7, 2**200])
@pytest.mark.parametrize(
    "first", [init.constant(2), init.normal(1, 0.5), init.uniform(-2, 3)]
)
def test_what_unbounded_rows_begin_with_travels(seed, first):
    given: Any = {**TABLES, "any": (0, 4, "float32", UnboundedIds(first, seed))}
    given["more"] = 1, 1, "float32"
    layout = Layout.build(ARRAYS, 3, given)
    again = Layout.from_wire(layout.to_wire())
    assert again == layout
    assert again.names[2:] == ("emb", "few", "any", "more")
    table = again.table_by_name["any"]
    assert isinstance(table, UnboundedTable)
    assert table.of == UnboundedIds(first, seed)
    assert table == layout.table_by_name["any"]
    assert (
        again.nbytes
        == Layout.build(ARRAYS, 3, {**TABLES, "m": (1, 1, "float32")}).nbytes
    )


def test_unbounded_tables_are_told_apart():
    """By seed and name: what is far away in one is anywhere in the other."""
    made = [
        UnboundedTable(
            0, name, 0, 1, "float32", UnboundedIds(init.zeros(), seed)
        ).hash_seed
        for name, seed in [("a", 0), ("b", 0), ("a", 1)]
    ]
    assert len(set(made)) == 3
    assert max(made) < 2**64


@pytest.mark.parametrize("shards", [(0,), (3,), (1, 2), (0, 4), (0, 1, 2, 3, 4)])
def test_rows_of_a_placed_table_are_cut_over_its_shards(shards):
    """Those of other shards are none, in pieces, edges and splits of ids alike."""
    unbounded: Any = (0, 4, "float32", UnboundedIds(init.normal(), 3))
    given: Any = {"emb": (10, 4, "float32"), "any": unbounded}
    placed = [([*shards], [2, 3])]
    layout = Layout.build(ARRAYS, 5, given, placed)
    assert Layout.from_wire(layout.to_wire()) == layout
    assert sum(map(layout.shard_nbytes, range(5))) == layout.nbytes
    parts = np.array_split(np.arange(10), len(shards))
    for shard in range(5):
        rows, unbounded = layout.table_pieces[shard]
        want = parts[shards.index(shard)] if shard in shards else []
        assert [*range(rows.first_row, rows.first_row + rows.n_rows)] == [*want]
        assert rows.is_empty == unbounded.is_empty == (shard not in shards)
    ids = np.array([9, 0, 3, 3, 7, 5], np.int64)
    for table, some in zip(layout.tables, (ids, ANY), strict=True):
        split: Any = table.split(some, 5)
        at = np.arange(len(some)) if split.pos is None else split.pos
        np.testing.assert_array_equal(split.ids, some[at])
        assert (len(split.starts), split.starts[-1]) == (6, len(some))
        for shard, of in enumerate(layout.table_pieces):
            own = split.ids[split.starts[shard] : split.starts[shard + 1]]
            assert of[table.index - 2].holds(own, cache_dir=kept())
            assert shard in shards or not len(own)
    emb: Any = layout.tables[0]
    assert emb.split(np.array([10], np.int64), 5) is None
    assert emb.whole.n_rows == 10
    assert layout.tables[1].whole.holds(ANY, cache_dir=kept())
