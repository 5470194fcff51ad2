"""Ids split by owner and their repeats, against plain Python."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.kernels import row_repeats, row_split
from daskps.layout.arrays import DTYPES
from daskps.layout.bounds import bounds
from tests.kernels.compiling import kept

split = partial(row_split.split, cache_dir=kept())
are_distinct = partial(row_repeats.are_distinct, cache_dir=kept())
repeats = partial(row_repeats.repeats, cache_dir=kept())

INT64 = st.integers(-(2**63), 2**63 - 1)


def as_ids(values: Any) -> Any:
    return np.array(values, np.int64)


@st.composite
def edges_and_ids(draw: Any) -> Any:
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
    low = draw(st.sampled_from([0, 7, -3, 2**62]))
    edges = low + np.cumsum([0, *lengths])
    inside = st.integers(low, max(low, int(edges[-1]) - 1))
    ids = draw(st.lists(inside | inside | inside | INT64, max_size=40))
    return as_ids(edges), as_ids(ids)


@given(edges_and_ids())
def test_ids_are_split_by_owner_in_order(case: Any) -> None:
    edges, ids = case
    found = split(ids, edges)
    if any(not edges[0] <= i < edges[-1] for i in ids):
        assert found is None
        return
    assert found is not None
    pos = np.arange(len(ids)) if found.pos is None else found.pos
    for s in range(len(edges) - 1):
        expected = [k for k, i in enumerate(ids) if edges[s] <= i < edges[s + 1]]
        part = slice(found.starts[s], found.starts[s + 1])
        assert pos[part].tolist() == expected
        assert found.ids[part].tolist() == ids[expected].tolist()
    assert found.starts[-1] == len(ids)


@pytest.mark.parametrize(("rows", "shards"), [(10, 3), (3, 7), (1_000, 64), (5, 1)])
def test_every_row_has_the_owner_that_the_layout_says(rows: int, shards: int) -> None:
    edges = as_ids([0, *(bounds(rows, shards, i)[1] for i in range(shards))])
    found = split(np.arange(rows)[::-1].copy(), edges)
    assert found is not None
    assert found.starts == edges.tolist()


def test_ids_of_one_shard_stay_where_they_are() -> None:
    ids = as_ids([3, 1, 3])
    found = split(ids, as_ids([0, 4]))
    assert found == (ids, None, [0, 3])
    for outside in (4, -1):
        assert split(as_ids([3, outside]), as_ids([0, 4])) is None


few = st.lists(st.integers(-3, 12), max_size=50)


@given(few, st.sampled_from([1, 1_000_000]))
def test_repeats_and_ids_outside_are_seen(values: list[int], factor: int) -> None:
    # With a bit for each row, and with a table of hashes.
    ids, n_rows = as_ids(values) * factor, 10 * factor
    if any(not 0 <= i < n_rows for i in ids):
        with pytest.raises(ValueError, match="no row from 0 to"):
            are_distinct(ids, 0, n_rows)
        return
    distinct = len(set(values)) == len(values)
    assert are_distinct(ids, 0, n_rows) is distinct
    assert are_distinct(ids + 5, 5, n_rows) is distinct


@given(st.lists(st.sampled_from([-(2**63), 2**63 - 1, -1, 1000, 2**62])))
def test_no_id_is_near_enough_to_wrap_around(values: list[int]) -> None:
    ids = as_ids([1, *values])
    for first, n_rows in ((0, 1000), (1, 2**40), (-5, 1000)):
        if values and not all(first <= i < first + n_rows for i in values):
            with pytest.raises(ValueError, match="no row"):
                are_distinct(ids, first, n_rows)


@given(st.lists(st.integers(0, 6) | INT64, max_size=60), st.data())
def test_repeats_are_numbered_by_first_appearance(values: Any, data: Any) -> None:
    found = repeats(as_ids(values))
    expected = list(dict.fromkeys(values))
    assert found.ids.tolist() == expected
    last = {value: k for k, value in enumerate(values)}
    assert found.last().tolist() == [last[value] for value in expected]
    n = len(values)
    at = data.draw(st.lists(st.integers(0, 8), min_size=n, max_size=n))
    assert found.last(as_ids(at)).tolist() == [at[last[v]] for v in expected]
    rows = np.random.default_rng(n).standard_normal((9, 3))
    sums: dict[int, Any] = {}
    for value, k in zip(values, at, strict=True):
        sums[value] = sums[value] + rows[k] if value in sums else rows[k]
    np.testing.assert_array_equal(
        found.sum(rows, as_ids(at)), np.reshape(list(sums.values()), (-1, 3))
    )


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "float16"])
def test_rows_of_any_dtype_are_summed_in_order(dtype: str) -> None:
    ids = as_ids([5, 9, 5, 5, 9, 1])
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (6, 7 * np.dtype(dtype).itemsize), np.uint8)
    rows = rows.view(dtype) if dtype != "bool" else rows < 100
    if np.dtype(dtype).kind == "f":
        rows = rng.standard_normal((6, 7)).astype(dtype)
    rows[5, 0] = -0.0 if np.dtype(dtype).kind == "f" else 0
    with np.errstate(over="ignore"):
        expected = [(rows[0] + rows[2]) + rows[3], rows[1] + rows[4], rows[5]]
    found = repeats(ids).sum(rows)
    assert found.dtype == dtype
    assert found.tobytes() == np.array(expected).tobytes()


def test_sums_refuse_what_does_not_fit() -> None:
    found, rows = repeats(as_ids([1, 1])), np.ones((2, 3), "f4")
    for bad in (rows.astype("f2"), rows.T, rows[0], rows[:, ::2]):
        with pytest.raises(ValueError, match="contiguous rows"):
            found.sum(bad, as_ids([0, 0]))
    for at in ([0, 2], [0, -1], [0, 2**62]):
        with pytest.raises(ValueError, match="none of 2 rows"):
            found.sum(rows, as_ids(at))
    with pytest.raises(
        ValueError, match=r"expected a contiguous int64 array of shape \(2,\)"
    ):
        found.sum(rows, as_ids([0]))
    with pytest.raises(
        ValueError, match=r"expected a contiguous int64 array of shape \(2,\)"
    ):
        repeats(np.arange(2, dtype="i4"))
    with pytest.raises(
        ValueError, match=r"expected a contiguous int64 array of shape \(2,\)"
    ):
        are_distinct(np.arange(4)[::2], 0, 9)


def test_all_ids_may_be_read_only() -> None:
    ids = as_ids([4, 2, 4])
    ids.flags.writeable = False
    assert repeats(ids).ids.tolist() == [4, 2]
    assert not are_distinct(ids, 0, 10)
    found = split(ids, as_ids([0, 3, 5]))
    assert found is not None
    assert found.starts == [0, 1, 3]
