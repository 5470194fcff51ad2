from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.training.data.parts import runs_of_chunks
from daskps.training.data.row_blocks import Blocks, joined, rows_of
from daskps.training.data.rows import batches

HEIGHTS = st.lists(st.integers(0, 9), min_size=1, max_size=8)


def cut(array, heights):
    return np.split(array, np.cumsum(heights)[:-1])


@given(HEIGHTS, st.integers(0, 80), st.integers(0, 80), st.integers(1, 5))
def test_slices_are_those_of_the_whole(heights, start, stop, step):
    whole = np.arange(sum(heights) * 2.0).reshape(-1, 2)
    view = Blocks(cut(whole, heights))
    assert view.shape == whole.shape
    assert len(view) == len(whole)
    found = view[start:stop:step]
    assert type(found) is np.ndarray
    np.testing.assert_array_equal(found, whole[start:stop:step])


@given(HEIGHTS.filter(any), st.data())
def test_any_row_numbers_are_those_of_the_whole(heights, data):
    n = sum(heights)
    whole = np.arange(n * 6, dtype="f4").reshape(n, 3, 2)
    index = np.array(data.draw(st.lists(st.integers(-n, n - 1), max_size=20)), int)
    found = Blocks(cut(whole, heights))[index]
    assert found.dtype == "f4"
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(found, whole[index])


@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_cover_every_row_once(shuffle):
    view = Blocks(cut(np.arange(23), [5, 0, 10, 8]))
    found = [view[b] for b in batches(23, 4, seed=1, epoch=0, rank=0, shuffle=shuffle)]
    assert [len(batch) for batch in found] == [4] * 5 + [3]
    assert sorted(np.concatenate(found)) == list(range(23))


def laid_out(block, order):
    """Return the same rows, otherwise laid out in memory."""
    wide = np.empty((len(block), 2, *block.shape[1:]), block.dtype)
    wide[:, 1] = block
    return {
        "C": np.ascontiguousarray(block),
        "F": np.asfortranarray(block),
        "strided": wide[:, 1],
        "reversed": np.ascontiguousarray(block[::-1])[::-1],
        "transposed": np.ascontiguousarray(block.swapaxes(1, -1)).swapaxes(1, -1),
    }[order]


@pytest.mark.parametrize("order", ["C", "F", "strided", "reversed", "transposed"])
@pytest.mark.parametrize("dtype", ["f4", "?", "S3", "M8[s]", ">i2", "O", [("a", "i1")]])
def test_rows_are_the_same_however_blocks_lie_in_memory(order, dtype):
    whole = np.arange(60).reshape(10, 3, 2).astype(dtype)
    blocks = [laid_out(block, order) for block in cut(whole, [3, 0, 6, 1])]
    if order == "C":
        blocks[0].flags.writeable = False
    index = np.random.default_rng(0).permutation(10)[:9]
    found = Blocks(blocks)[index]
    assert found.dtype == whole.dtype
    assert found.flags.carray
    np.testing.assert_array_equal(found, whole[index])


def test_rows_of_blocks_of_several_dtypes_have_one():
    """NumPy's common one, whichever rows they are; blocks that have it are not copied."""
    blocks = [np.ones(3, "f4"), np.ones(3, "f4"), np.ones(3)]
    view = Blocks(blocks)
    for rows in (np.array([0, 3]), np.array([1, 0]), slice(0, 3), slice(2, 5)):
        assert view[rows].dtype == "f8"
    assert np.shares_memory(view[6:9], blocks[2])


@pytest.mark.parametrize("dtype", ["f4", "O"])
@pytest.mark.parametrize("row", [6, -7])
def test_rows_that_are_not_there(row, dtype):
    view = Blocks(cut(np.ones(6, dtype), [4, 2]))
    with pytest.raises(IndexError):
        view[np.array([1, row])]


@pytest.mark.parametrize("order", ["C", "F", "mixed"])
@pytest.mark.parametrize("rows", [np.arange(0, 10**6, 10**5), slice(3, 900_003, 10**5)])
def test_a_batch_takes_the_memory_of_its_rows_only(order, rows):
    dtypes = ["f4", "f8"] if order == "mixed" else ["f4", "f4"]
    blocks = [np.zeros((500_000, 4), d, "F" if order == "F" else "C") for d in dtypes]
    view = Blocks(blocks)
    view[np.array([0])]
    tracemalloc.start()
    try:
        view[rows]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20_000  # a number for every row would be 8 MB


def test_rows_inside_one_block_are_a_view():
    blocks = [np.arange(4), np.arange(4, 10)]
    assert np.shares_memory(Blocks(blocks)[5:9], blocks[1])
    assert not np.shares_memory(Blocks(blocks)[3:9], blocks[1])


def test_one_block_is_itself():
    block = np.arange(3)
    assert joined([block]) is block
    assert joined([block[:0], block, block[:0]]) is block
    assert joined([block[:0], block[:0]]).shape == (0,)
    assert joined([[1, 2]]).tolist() == [1, 2]


@pytest.mark.parametrize("kind", ["csr_matrix", "masked"])
def test_blocks_of_other_types_keep_their_type(kind):
    whole = np.arange(20.0).reshape(10, 2)
    make: Any = np.ma.masked_array
    if kind == "csr_matrix":
        make = pytest.importorskip("scipy.sparse").csr_matrix
    view = Blocks([make(block) for block in cut(whole, [3, 4, 3])])
    index = np.array([9, 0, 4, 4, 2])
    for rows in (slice(2, 8), slice(3, 5), index):
        found = view[rows]
        assert isinstance(found, type(make(whole)))
        dense = found.toarray() if kind == "csr_matrix" else np.asarray(found)
        np.testing.assert_array_equal(dense, whole[rows])


def test_blocks_that_do_not_fit():
    with pytest.raises(ValueError, match=r"\(2,\), \(3,\).*must agree"):
        Blocks([np.ones((2, 2)), np.ones((2, 3))])
    with pytest.raises(ValueError, match="3 rows of X and 2 of y"):
        rows_of(([np.ones(3)], [np.ones(1), np.ones(1)]))


# -- which chunks go to whom ---------------------------------------------------


@given(HEIGHTS, st.integers(1, 12))
def test_runs_cover_every_row_once_in_order(heights, k):
    begins = np.cumsum([0, *heights])
    runs = runs_of_chunks(heights, k)
    assert len(runs) == k
    assert all(runs)
    seen = [
        int(begins[i]) + row
        for run in runs
        for i, part in run
        for row in range(heights[i])[part]
    ]
    assert seen == list(range(sum(heights)))


@given(HEIGHTS.filter(any), st.integers(1, 12))
def test_chunks_are_cut_only_where_there_are_too_few(heights, k):
    runs = runs_of_chunks(heights, k)
    full = [h for h in heights if h]
    cut = [p for run in runs for i, p in run if p != slice(0, heights[i])]
    assert bool(cut) == (k > len(full))
    if not cut:
        return
    assert all(len(run) == 1 for run in runs)
    most = max(part.stop - part.start for run in runs for _, part in run)
    # No smaller largest part is possible: with parts of most - 1 rows, each within
    # one chunk, more than k would be needed.
    if most > 1:
        assert sum(-(-h // (most - 1)) for h in full) > k


@given(HEIGHTS.filter(any), st.data())
def test_borders_are_the_nearest_to_an_even_split(heights, data):
    full = [h for h in heights if h]
    k = data.draw(st.integers(1, len(full)))
    runs = runs_of_chunks(heights, k)
    ends = [0, *np.cumsum(full).tolist()]
    used = 0
    for rank, run in enumerate(runs[:-1], 1):
        least, used = used + 1, used + len(run)
        free = range(least, len(full) - (k - rank) + 1)
        best = min(free, key=lambda n: (abs(ends[n] * k - ends[-1] * rank), n))
        assert used == best


@pytest.mark.parametrize(
    ("heights", "k", "expected"),
    [
        ([5, 5, 5, 5], 2, [10, 10]),
        ([5, 5, 5, 5, 3], 3, [10, 5, 8]),
        ([1000, 1, 1, 1], 2, [1000, 3]),
        ([1, 1, 1, 1000], 4, [1, 1, 1, 1000]),
        ([9, 9, 9, 9, 4], 4, [9, 9, 9, 13]),
        ([100, 10], 5, [25, 25, 25, 25, 10]),
        ([3], 5, [1, 1, 1, 0, 0]),
        ([0, 0], 2, [0, 0]),
        ([0, 4, 0], 1, [4]),
    ],
)
def test_runs_of_chunks(heights, k, expected):
    runs = runs_of_chunks(heights, k)
    assert [sum(p.stop - p.start for _, p in run) for run in runs] == expected
