"""Chunks of arrays: contiguous, each element once, of no more than so many bytes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.checkpoint import grid
from daskps.checkpoint.grid import CHUNK_NBYTES, Grid, chunk_shape

MIB = 2**20


@pytest.mark.parametrize(
    ("shape", "itemsize", "chunk"),
    [
        ((), 4, ()),
        ((0,), 8, (1,)),
        ((3, 0), 8, (3, 1)),
        ((10, 10), 4, (10, 10)),
        ((4 * MIB,), 4, (4 * MIB,)),
        ((4 * MIB + 1,), 4, (2 * MIB + 1,)),
        ((9, 2 * MIB), 4, (2, 2 * MIB)),
        ((9, 8 * MIB), 4, (1, 4 * MIB)),
        ((2, 9, 2 * MIB), 4, (1, 2, 2 * MIB)),
        ((3, 5, 64 * MIB), 1, (1, 1, 16 * MIB)),
    ],
)
def test_shape_of_chunks(shape, itemsize, chunk):
    assert chunk_shape(shape, itemsize) == chunk


def test_rows_of_a_chunk_may_be_limited():
    assert chunk_shape((1_000_000, 64), 4, 65_536) == (62_500, 64)
    assert chunk_shape((1_000_000, 1), 8, 65_536) == (62_500, 1)
    assert chunk_shape((1_000_000,), 8, 65_536) == (62_500,)
    assert chunk_shape((0, 64), 4, 65_536) == (1, 64)


@given(st.lists(st.integers(0, 7), max_size=4), st.integers(1, 40), st.data())
def test_chunks_are_those_of_an_array(shape, most, data):
    """Beside the same array cut by NumPy: the elements of each chunk, by its place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "CHUNK_NBYTES", most)
        chunk = chunk_shape(tuple(shape), 1)
    assert math.prod(chunk) <= most
    cut = Grid(tuple(shape), chunk)
    whole = np.arange(cut.size).reshape(shape)
    chunks = [*cut.chunks()]
    assert len(chunks) == cut.n_chunks
    assert [e for c in chunks for e in range(c.start, c.stop)] == [*range(cut.size)]
    for index, start, stop in chunks:
        at = tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, chunk, strict=True))
        assert whole[at].reshape(-1).tolist() == [*range(start, stop)]
    if cut.size:
        a = data.draw(st.integers(0, cut.size - 1))
        b = data.draw(st.integers(a, cut.size))
        some = [c for c in chunks if c.start < b and a < c.stop and a < b]
        assert [*cut.chunks(a, b)] == some


@given(st.lists(st.integers(1, 2**24), min_size=1, max_size=4), st.sampled_from([1, 8]))
def test_a_chunk_is_never_too_large_nor_mostly_zeros(shape, itemsize):
    chunk = chunk_shape(tuple(shape), itemsize)
    nbytes = math.prod(chunk) * itemsize
    assert nbytes <= CHUNK_NBYTES
    n = Grid(tuple(shape), chunk).n_chunks
    # Where there are several, only one element of each is ever filled up per block.
    assert n == 1 or nbytes * n <= 2 * math.prod(shape) * itemsize
