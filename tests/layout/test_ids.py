"""Ids of rows, from whatever users hold them in, and what is refused."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from daskps.errors import LayoutError
from daskps.layout.ids import as_ids, check_ids

pd = pytest.importorskip("pandas")
pa = pytest.importorskip("pyarrow")


def taken(value: Any) -> tuple[Any, tuple[int, ...]]:
    ids, shape = as_ids(value, "table 'emb'", LayoutError)
    assert ids.dtype == np.int64
    assert ids.ndim == 1
    assert ids.flags.c_contiguous
    return ids, shape


@given(
    hnp.arrays(
        hnp.integer_dtypes(endianness="?"), hnp.array_shapes(min_dims=0, min_side=0)
    ),
    st.booleans(),
)
def test_arrays_of_any_integers_and_shape(a: Any, turned: bool) -> None:
    a = a.T if turned else a
    if a.size and int(a.max()) > np.iinfo(np.int64).max:
        with pytest.raises(LayoutError, match="beyond int64"):
            taken(a)
        return
    ids, shape = taken(a)
    assert shape == a.shape
    np.testing.assert_array_equal(ids.reshape(shape), a)


def test_int64_is_not_copied() -> None:
    a = np.arange(6)
    for held in (a, a.reshape(2, 3), pd.Series(a, copy=False), pd.Index(a)):
        assert np.shares_memory(taken(held)[0], np.asarray(held))
    held = pa.array(a)
    assert np.shares_memory(taken(held)[0], held.to_numpy())


@pytest.mark.parametrize(
    "made",
    [
        list,
        tuple,
        lambda a: range(3, 0, -1),
        lambda a: [np.int8(3), 2, np.uint16(1)],
        pd.Index,
        pd.Series,
        lambda a: pd.Series(a, index=list("abc")),
        lambda a: pd.Series(a, dtype="Int64"),
        lambda a: pd.Series(a, dtype="UInt8"),
        lambda a: pd.Series(a, dtype="int64[pyarrow]"),
        lambda a: pd.Index(a, dtype="uint32[pyarrow]"),
        lambda a: pd.RangeIndex(3, 0, -1),
        lambda a: pd.Series(a, dtype="category"),
        pa.array,
        lambda a: pa.array(a, pa.uint64()),
        lambda a: pa.chunked_array([a[:1], a[1:]]),
        np.ma.masked_array,
        lambda a: np.array(a).data,
    ],
)
def test_the_holders_of_ids(made: Any) -> None:
    ids, shape = taken(made([3, 2, 1]))
    assert shape == (3,)
    assert ids.tolist() == [3, 2, 1]


@pytest.mark.parametrize("empty", [[], (), [[], []], pa.array([], pa.int8())])
def test_no_ids(empty: Any) -> None:
    ids, shape = taken(empty)
    assert ids.size == 0
    assert shape == np.shape(empty)


def test_one_id_has_no_axes() -> None:
    for one in (5, np.int8(5), np.array(5)):
        ids, shape = taken(one)
        assert (ids.tolist(), shape) == ([5], ())


#: Deeper than Python follows.
NESTED: list[Any] = [1]
for _ in range(5000):
    NESTED = [NESTED]


class Odd:
    """Whose repr and conversion both fail."""

    def __repr__(self) -> str:
        raise RuntimeError

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("not me")


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (np.ones(2), "float64.*whole"),
        (np.ones(0), "float64.*whole"),
        ([1.0, 2], "float"),
        (2.5, "float"),
        (np.array([True, False]), "bool"),
        (True, "bool"),
        ([1, True], "a bool among them"),
        ([[1], [np.True_]], "a bool among them"),
        ([np.array([True]), np.array([2])], "a bool among them"),
        (["a", "b"], "text.*hash_ids"),
        ("12", "text.*hash_ids"),
        (b"12", "text.*hash_ids"),
        (np.array([1, 2], object), "object"),
        (np.array([1, 2], object), "astype"),
        ([1, None], "missing"),
        ([[1], [1, 2]], "a list of 2"),
        ([2**63], "beyond int64"),
        ([2**64], "beyond int64; hash"),
        ([1, -(2**63) - 1], "-9223372036854775809 is beyond int64"),
        (pd.Series([1, float("nan")], dtype=object), "missing"),
        (pd.Series([1, pd.NA], dtype=object), "missing"),
        ([-1, 2**63], "integer|float|object"),
        (np.array([2**63], "u8"), "beyond int64"),
        ({1, 2}, "set"),
        (None, "NoneType"),
        (np.array(["2020"], "M8[D]"), "datetime64"),
        (np.array([1j]), "complex"),
        (np.ma.masked_array([1, 2], [False, True]), "masked"),
        (pd.Series([1.0, 2.0]), "float"),
        (pd.Series([1, None], dtype="Int64"), "missing"),
        (pd.Series([1, None], dtype="int64[pyarrow]"), "missing"),
        (pd.Series([True], dtype="boolean"), "bool"),
        (pd.Series([True], dtype="bool[pyarrow]"), "bool"),
        (pd.Series(["a"]), "pandas.*text.*hash_ids"),
        (pd.Series(["a"], dtype="category"), "text.*hash_ids"),
        (pd.Series([2**63], dtype="UInt64"), "beyond int64"),
        (pd.MultiIndex.from_tuples([(1, 2)]), "object"),
        (pa.array([1, None]), "1 are null"),
        (pa.array([1.0]), "float"),
        (pa.array(["a"]), "pyarrow.*text.*hash_ids"),
        (pa.array([True]), "bool"),
        (pa.array([2**63], pa.uint64()), "beyond int64"),
        (Odd(), "not me"),
        (
            Future(),
            r"it is a Future; give .*client.gather\(...\) or .result\(\), or make",
        ),
        (NESTED, "a list of 1: lists in lists, more than 64 levels"),
    ],
)
def test_what_is_no_id_is_refused_by_name(bad: Any, why: str) -> None:
    with pytest.raises(LayoutError, match=f"(?s)table 'emb' takes ids.*{why}"):
        taken(bad)


def test_a_collection_is_not_computed() -> None:
    da = pytest.importorskip("dask.array")
    with pytest.raises(LayoutError, match="not computed yet"):
        taken(da.arange(3))


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.integers(0, 2**63 - 1))
def test_ids_outside_are_refused(ids: list[int], rows: int) -> None:
    a = np.array(ids, np.int64)
    outside = [i for i in ids if not 0 <= i < rows]
    if not outside:
        check_ids(a, rows, "table 'emb'", LayoutError)
        return
    with pytest.raises(LayoutError, match=f"'emb' has .*found id {outside[0]} at"):
        check_ids(a, rows, "table 'emb'", LayoutError)
