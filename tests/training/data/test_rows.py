from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.training.data.rows import (
    SCHEMES,
    batches,
    n_rows,
    partition,
    rows,
    split_batch,
)

WEIGHTS = st.lists(
    st.integers(0, 50) | st.floats(0, 1e6, allow_subnormal=False),
    min_size=1,
    max_size=12,
).filter(any)


def sizes(parts: Any) -> list[int]:
    return [part.stop - part.start for part in parts]


def first_of(parts: Any) -> list[int]:
    return list(parts[0])


def numbers(part: Any, n: int) -> list[int]:
    """Return row numbers as a list."""
    return list(np.arange(n)[part])


@given(st.integers(0, 10_000), WEIGHTS)
def test_split_batch_covers_every_row_once(n: int, weights: list[float]) -> None:
    parts = split_batch(n, weights)
    assert len(parts) == len(weights)
    assert [i for part in parts for i in range(n)[part]] == list(range(n))


@given(st.integers(0, 10_000), WEIGHTS)
def test_split_batch_is_within_one_row_of_the_share(
    n: int, weights: list[float]
) -> None:
    total = sum(map(Fraction, weights))
    for size, weight in zip(sizes(split_batch(n, weights)), weights, strict=True):
        assert abs(size - n * Fraction(weight) / total) < 1


@given(st.integers(0, 500), st.integers(1, 20))
def test_split_batch_with_equal_weights_is_array_split(n: int, k: int) -> None:
    expected = [len(part) for part in np.array_split(np.arange(n), k)]
    assert sizes(split_batch(n, [3] * k)) == expected


@pytest.mark.parametrize(
    ("n", "weights", "expected"),
    [
        (16, [1] * 10, [2] * 6 + [1] * 4),
        (5, [1, 1], [3, 2]),
        (2, [1] * 3, [1, 1, 0]),
        (1, [1, 1], [1, 0]),
        (20, [1, 3], [5, 15]),
        (23, [10, 10, 3], [10, 10, 3]),
        (100, [5, 1.5, 5], [44, 13, 43]),
        (10, [0, 1, 0], [0, 10, 0]),
        (0, [1, 2], [0, 0]),
        (3, np.array([1, 1], "int8"), [2, 1]),
        (10**6, np.full(3, 2**62), [333_334, 333_333, 333_333]),
    ],
)
def test_split_batch_by_largest_remainder(
    n: int, weights: Any, expected: list[int]
) -> None:
    assert sizes(split_batch(n, weights)) == expected


def test_split_batch_gives_no_row_to_a_weight_of_zero() -> None:
    assert sizes(split_batch(7, [1, 0, 1, 0, 1])) == [3, 0, 2, 0, 2]


@pytest.mark.parametrize(
    ("n", "weights"),
    [
        (-1, [1]),
        (3, []),
        (3, [0, 0]),
        (3, [1, -1]),
        (3, [math.nan]),
        (3, [math.inf, 1]),
    ],
)
def test_split_batch_refuses_values(n: int, weights: list[float]) -> None:
    with pytest.raises(ValueError, match=r"at least|finite|negative"):
        split_batch(n, weights)


@pytest.mark.parametrize(("n", "weights"), [(1.5, [1]), (True, [1]), (3, ["a"])])
def test_split_batch_refuses_types(n: Any, weights: Any) -> None:
    with pytest.raises(TypeError, match=r"is an int|no number"):
        split_batch(n, weights)


def test_d1_contiguous() -> None:
    X = np.arange(2_000_000).reshape(2000, 1000)
    y = np.arange(2000)
    (X_0, y_0), (X_1, y_1) = partition(X, y, 2)
    np.testing.assert_array_equal(X_0, X[:1000])
    np.testing.assert_array_equal(X_1, X[1000:])
    np.testing.assert_array_equal(y_0, np.arange(1000))
    np.testing.assert_array_equal(y_1, np.arange(1000, 2000))
    assert np.shares_memory(X_0, X)


def test_d2_round_robin() -> None:
    X = np.arange(2_000_000).reshape(2000, 1000)
    y = np.arange(2000)
    (X_0, y_0), (X_1, y_1) = partition(X, y, 2, scheme="round_robin")
    np.testing.assert_array_equal(X_0, X[::2])
    np.testing.assert_array_equal(X_1, X[1::2])
    np.testing.assert_array_equal(y_0, np.arange(0, 2000, 2))
    np.testing.assert_array_equal(y_1, np.arange(1, 2000, 2))


def test_d3_random_is_one_permutation_of_both() -> None:
    X = np.arange(2_000_000).reshape(2000, 1000)
    y = np.arange(2000)
    recorded = np.concatenate(
        [np.arange(2000)[part] for part in rows(2000, 2, "random", seed=5)]
    )
    assert recorded[:5].tolist() == [737, 1133, 356, 1531, 1626]
    assert sorted(recorded) == list(range(2000))
    (X_0, y_0), (X_1, y_1) = partition(X, y, 2, scheme="random", seed=5)
    np.testing.assert_array_equal(np.concatenate([X_0, X_1]), X[recorded])
    np.testing.assert_array_equal(np.concatenate([y_0, y_1]), y[recorded])
    assert len(X_0) == len(X_1) == 1000


def test_d4_reshuffle_gives_everyone_all_rows() -> None:
    X = np.arange(2000)
    parts = partition(X, X, 3, scheme="reshuffle", seed=5)
    again = partition(X, X, 3, scheme="reshuffle", seed=5)
    for (X_i, y_i), (X_j, _) in zip(parts, again, strict=True):
        assert sorted(X_i) == list(range(2000))
        np.testing.assert_array_equal(X_i, y_i)
        np.testing.assert_array_equal(X_i, X_j)
    for i, j in [(0, 1), (0, 2), (1, 2)]:
        assert (parts[i][0] != parts[j][0]).any()


@pytest.mark.parametrize("scheme", ["random", "reshuffle"])
def test_without_a_seed_every_call_differs(scheme: str) -> None:
    first, second = (rows(1000, 2, scheme) for _ in range(2))
    assert first_of(first) != first_of(second)


@pytest.mark.parametrize("scheme", ["random", "reshuffle"])
def test_another_seed_gives_another_order(scheme: str) -> None:
    first, second = (rows(1000, 2, scheme, seed=s) for s in (0, 1))
    assert first_of(first) != first_of(second)


@pytest.mark.parametrize(
    ("n", "k", "expected"),
    [(10, 4, [3, 3, 2, 2]), (7, 3, [3, 2, 2]), (2, 4, [1, 1, 0, 0])],
)
@pytest.mark.parametrize("scheme", ["contiguous", "round_robin", "random"])
def test_no_row_is_lost(scheme: str, n: int, k: int, expected: list[int]) -> None:
    X = np.arange(n)
    parts = partition(X, X, k, scheme=scheme, seed=0)
    assert [len(X_i) for X_i, _ in parts] == expected
    assert sorted(np.concatenate([X_i for X_i, _ in parts])) == list(range(n))


@given(
    n=st.integers(0, 300),
    k=st.integers(1, 12),
    scheme=st.sampled_from(SCHEMES),
    seed=st.integers(0, 2**70),
)
def test_rows_cover_exactly_once(n: int, k: int, scheme: str, seed: int) -> None:
    parts = [numbers(part, n) for part in rows(n, k, scheme, seed=seed)]
    every = sorted(itertools.chain.from_iterable(parts))
    assert len(parts) == k
    if scheme == "reshuffle":
        assert all(sorted(part) == list(range(n)) for part in parts)
    else:
        assert every == list(range(n))


@pytest.mark.parametrize("scheme", ["contiguous", "random"])
def test_weights_set_the_sizes(scheme: str) -> None:
    parts = partition(np.arange(10), None, 3, scheme=scheme, weights=[1, 0, 4])
    assert [len(X_i) for X_i, _ in parts] == [2, 0, 8]
    assert [y_i for _, y_i in parts] == [None] * 3


@pytest.mark.parametrize("scheme", ["round_robin", "reshuffle"])
def test_weights_without_a_meaning_are_refused(scheme: str) -> None:
    with pytest.raises(ValueError, match="have no meaning for scheme="):
        partition(np.arange(4), None, 2, scheme=scheme, weights=[1, 2])


def test_bad_arguments_of_partition() -> None:
    X = np.arange(4)
    with pytest.raises(ValueError, match="contiguous, round_robin, random, reshuffle"):
        partition(X, X, 2, scheme="alphabetic")
    with pytest.raises(ValueError, match="at least 1"):
        partition(X, X, 0)
    with pytest.raises(TypeError, match=r"k is an int, found 2\.0"):
        partition(X, X, 2.0)  # type: ignore[arg-type]  # refused
    with pytest.raises(ValueError, match="X has 4 rows and y 3"):
        partition(X, X[:3], 2)
    with pytest.raises(ValueError, match="3 weights for 2 parts"):
        partition(X, X, 2, weights=[1, 2, 3])
    with pytest.raises(TypeError, match="has no rows"):
        partition(np.float64(3), None, 2)
    with pytest.raises(TypeError, match="has no rows"):
        partition(3, None, 2)
    with pytest.raises(ValueError, match="seed must be at least 0, found -1"):
        partition(X, X, 2, scheme="random", seed=-1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_partition_takes_what_has_rows(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(dask.config.config, "scheduler", "synchronous")
    array = np.arange(10).reshape(5, 2)
    expected = partition(array, array, 2, scheme=scheme, seed=0)
    for X in (array.tolist(), da.from_array(array, chunks=2), Frame(array)):
        for got, (X_i, _) in zip(
            partition(X, array, 2, scheme=scheme, seed=0), expected, strict=True
        ):
            np.testing.assert_array_equal(np.asarray(got[0]), X_i)


class Frame:
    """A data frame as far as rows go: [] means columns."""

    def __init__(self, array: Any) -> None:
        self.iloc = array
        self.shape = array.shape


def test_unknown_chunks_say_what_to_do() -> None:
    X = da.arange(10, chunks=5)
    with pytest.raises(ValueError, match="compute_chunk_sizes"):
        n_rows(X[X > 3])


@given(
    n=st.integers(0, 200),
    size=st.integers(1, 50),
    epoch=st.integers(0, 5),
    rank=st.integers(0, 5),
    shuffle=st.booleans(),
)
def test_batches_cover_exactly_once(
    n: int, size: int, epoch: int, rank: int, shuffle: bool
) -> None:
    found = [
        numbers(part, n)
        for part in batches(n, size, seed=1, epoch=epoch, rank=rank, shuffle=shuffle)
    ]
    assert len(found) == -(-n // size)
    assert all(len(part) == size for part in found[:-1])
    assert sorted(itertools.chain.from_iterable(found)) == list(range(n))


def order(seed: int, epoch: int, rank: int) -> list[int]:
    parts = batches(50, 8, seed=seed, epoch=epoch, rank=rank)
    return [int(i) for part in parts for i in np.arange(50)[part]]


def test_batches_are_a_function_of_seed_epoch_and_rank() -> None:
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 1, 0)]
    orders = [order(*key) for key in keys]
    assert orders == [order(*key) for key in keys]
    assert len({tuple(found) for found in orders}) == len(keys)


def test_batches_in_order_are_slices() -> None:
    parts = list(batches(10, 4, seed=0, epoch=3, rank=1, shuffle=False))
    assert parts == [slice(0, 4), slice(4, 8), slice(8, 10)]


def test_partition_names_a_seed_that_is_none() -> None:
    X = np.arange(4)
    seed: Any = "x"
    with pytest.raises(TypeError, match="seed is an int, found 'x'"):
        partition(X, X, 2, seed=seed)


@pytest.mark.parametrize("size", [0, -1])
def test_batches_refuse_at_the_call(size: int) -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        batches(10, size, seed=0, epoch=0, rank=0)
