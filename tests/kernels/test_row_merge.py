"""Rows of several ranks, added up by id: the bits of the recursive tree."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from daskps.kernels import row_merge
from daskps.kernels.row_merge import Brought
from daskps.reduction import fold
from tests.kernels.compiling import kept

merge_rows = partial(row_merge.merge_rows, cache_dir=kept())
BodyItem = dict[int, tuple[Any, Any]]


def given(rng: Any, size: int, dtype: str, dim: int = 3, most: int = 12) -> BodyItem:
    """What some of the ranks bring: rows of numbers whose sums round."""
    found = {}
    for rank in range(size):
        if rng.random() < 0.8:
            ids = rng.permutation(most)[: rng.integers(0, most + 1)] - 3
            rows = rng.standard_normal((len(ids), dim)) * 10.0 ** rng.integers(-3, 4)
            found[rank] = ids.astype(np.int64), rows.astype(dtype)
    return found


def laid_out(
    found: BodyItem, dtype: str, dim: int = 3
) -> tuple[Any, Any, list[Brought]]:
    """The same in one place, later ranks first, as they may have come."""
    ids, rows, at = [np.zeros(2, np.int64)], [np.zeros((2, dim))], 2
    brought = list[Brought]()
    for rank in sorted(found, reverse=True):
        of, values = found[rank]
        brought.append(Brought(at, len(of), rank))
        ids.append(of)
        rows.append(values)
        at += len(of)
    return np.concatenate(ids), np.concatenate(rows).astype(dtype), brought[::-1]


def expected(found: BodyItem, size: int, divisor: float) -> dict[int, Any]:
    """Each id by itself, by the tree that arrays are summed along."""
    sums = {}
    for row in {int(i) for ids, _ in found.values() for i in ids}:
        leaves: Any = {
            (rank, rank + 1): ({0: values[ids == row][0].copy()}, {0: 1.0})
            for rank, (ids, values) in found.items()
            if row in ids
        }
        total = fold(leaves, 0, size)
        assert total is not None
        sums[row] = total[0][0] / total[0][0].dtype.type(divisor)
    return sums


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 11, 16, 23])
def test_sums_have_the_bits_of_the_tree(size, dtype):
    rng = np.random.default_rng(size)
    for divisor in (1.0, 7.0, 0.3):
        found = given(rng, size, dtype)
        ids, rows, brought = laid_out(found, dtype)
        merged, sums = merge_rows(brought, ids, rows, size, divisor)
        wanted = expected(found, size, divisor)
        assert sorted(merged.tolist()) == sorted(wanted)
        for row, value in zip(merged.tolist(), sums, strict=True):
            assert value.tobytes() == wanted[row].tobytes()


def test_ids_come_in_the_order_of_ranks():
    ids = np.array([5, 2, 9, 5, 1], np.int64)
    rows = np.arange(5, dtype="f4")[:, None]
    brought = [Brought(2, 3, 0), Brought(0, 2, 4)]
    merged, sums = merge_rows(brought, ids, rows, 5)
    assert merged.tolist() == [9, 5, 1, 2]
    assert sums[:, 0].tolist() == [2, 3 + 0, 4, 1]


def test_many_ranks_are_summed_without_a_node_too_many():
    size = 1024
    ids, rows = np.zeros(size, np.int64), np.ones((size, 1), "f8")
    brought = [Brought(rank, 1, rank) for rank in range(size)]
    merged, sums = merge_rows(brought, ids, rows, size)
    assert (merged.tolist(), sums.tolist()) == ([0], [[1024]])


def test_nobody_brings_anything():
    nothing = np.empty(0, np.int64), np.empty((0, 4), "f4")
    for brought in ([], [Brought(0, 0, 1)]):
        merged, sums = merge_rows(brought, *nothing, 2)
        assert (merged.shape, sums.shape) == ((0,), (0, 4))


@pytest.mark.parametrize(
    "brought",
    [
        [Brought(0, 4, 0)],
        [Brought(-1, 1, 0)],
        [Brought(0, -1, 0)],
        [Brought(0, 1, 2)],
        [Brought(0, 1, -1)],
        [Brought(0, 1, 1), Brought(1, 1, 0)],
        [Brought(0, 1, 1), Brought(1, 1, 1)],
    ],
)
def test_rows_that_are_not_there_are_refused(brought):
    with pytest.raises(ValueError, match="contributions"):
        merge_rows(brought, np.arange(3), np.ones((3, 1), "f4"), 2)


@pytest.mark.parametrize(
    ("ids", "rows"),
    [
        (np.arange(3, dtype="i4"), np.ones((3, 1), "f4")),
        (np.arange(3), np.ones((3, 1), "f2")),
        (np.arange(3), np.ones((2, 1), "f4")),
        (np.arange(6)[::2], np.ones((3, 1), "f4")),
        (np.arange(3), np.ones((3, 4), "f4")[:, ::2]),
    ],
)
def test_other_arrays_are_refused(ids, rows):
    with pytest.raises(ValueError, match="contributions"):
        merge_rows([Brought(0, 1, 0)], ids, rows, 2)
