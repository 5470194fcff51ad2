"""How a parameter of a snapshot is cut into chunks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.layout.arrays import Layout
from daskps.layout.chunks import chunks_of
from daskps.layout.spans import WEIGHTS


def joined(shapes, n_shards, name):
    """Rows of each chunk, and the elements its parts name, as positions in `name`."""
    layout = Layout.build({n: (s, "float64") for n, s in shapes.items()}, n_shards)
    p = layout[name]
    chunks = chunks_of(layout, p)
    found: list[int] = []
    for chunk in chunks:
        for shard, (area, position, a, b) in chunk.parts:
            piece = layout.pieces[shard][position]
            assert (area, piece.parameter) == (WEIGHTS, p)
            found += range(piece.start + a, piece.start + b)
    return chunks, found


@given(
    st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=4),
    st.integers(1, 9),
)
def test_chunks_hold_every_element_once_in_order(shapes, n_shards):
    named = {f"p{i}": tuple(s) for i, s in enumerate(shapes)}
    for name, shape in named.items():
        size = int(np.prod(shape, dtype=int))
        if not size:
            continue
        chunks, found = joined(named, n_shards, name)
        assert found == list(range(size))
        assert sum(c.rows for c in chunks) == (shape[0] if shape else 1)
        for chunk in chunks:
            assert chunk.rows > 0
            total = sum(b - a for _, (_, _, a, b) in chunk.parts)
            assert total == chunk.rows * size // (shape[0] if shape else 1)


def test_chunks_end_near_the_borders():
    """Ten rows of three over four shards of 7 or 8: half a row at most travels."""
    chunks, _ = joined({"w": (10, 3)}, 4, "w")
    assert [c.rows for c in chunks] == [3, 2, 3, 2]
    assert [c.home for c in chunks] == [0, 1, 2, 3]
    assert max(len(c.parts) for c in chunks) == 3
    edges = [
        b - a for c in chunks for shard, (_, _, a, b) in c.parts if shard != c.home
    ]
    assert edges == [1, 1, 1]


@pytest.mark.parametrize("n_shards", [1, 2, 3, 8])
def test_more_shards_than_rows(n_shards):
    chunks, found = joined({"w": (2, 9)}, n_shards, "w")
    assert [c.rows for c in chunks] == ([2] if n_shards == 1 else [1, 1])
    assert found == list(range(18))
