from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.reduction import (
    check_reduce,
    cover,
    fold,
    mean,
    reduce_all,
    split,
)
from tests.shards.making import leaf

sizes = st.integers(1, 33)


def node(value, weight=1.0, key=0):
    return leaf([(key, np.array(value, "f4"))], weight, "mean")


def plain(values, lo, hi):
    """The documented tree, without any cleverness; None where nobody delivers."""
    if hi - lo == 1:
        return None if values[lo] is None else values[lo].copy()
    border = split(lo, hi)
    left, right = plain(values, lo, border), plain(values, border, hi)
    return (
        left + right
        if left is not None and right is not None
        else (right if left is None else left)
    )


def rough(n, seed, width=5):
    """Numbers whose float32 sum depends on the order of its additions."""
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(n, width)) * 10.0 ** rng.integers(-4, 5, (n, width))
    ).astype("f4")


@given(st.data(), sizes, st.integers(0, 2**32 - 1))
def test_the_sum_has_the_same_bits_in_whatever_order_ranks_come(data, size, seed):
    values = rough(size, seed)
    absent = data.draw(st.sets(st.integers(0, size - 1)))
    order = data.draw(st.permutations(sorted(set(range(size)) - absent)))
    nodes = {(rank, rank + 1): node(values[rank]) for rank in order}
    wanted = plain([None if r in absent else v for r, v in enumerate(values)], 0, size)
    total = fold(nodes, 0, size)
    if wanted is None:
        assert total is None
    else:
        assert total is not None
        arrays, weights = total
        assert arrays[0].tobytes() == wanted.tobytes()
        assert weights[0] == size - len(absent)


def frozen(value):
    arrays, weights = node(value)
    arrays[0].flags.writeable = False
    return arrays, weights


@given(st.data(), sizes, st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_sums_made_where_the_ranks_are_give_the_same_bits(data, size, places, seed):
    values = rough(size, seed)
    absent = data.draw(st.sets(st.integers(0, size - 1)))
    where = data.draw(
        st.lists(st.integers(0, places - 1), min_size=size, max_size=size)
    )
    kept = {r: frozen(values[r]) for r in range(size) if r not in absent}
    sums, covered = {}, set()
    for place in range(places):
        present = {r for r in kept if where[r] == place}
        for lo, hi in cover(present, absent, size):
            nodes = {(r, r + 1): (dict(a), dict(w)) for r, (a, w) in kept.items()}
            total = fold(nodes, lo, hi)
            assert total is not None
            sums[lo, hi] = total
            assert present.intersection(range(lo, hi))
            assert present | absent >= set(range(lo, hi))
            covered |= set(range(lo, hi))
    assert covered >= set(kept)
    wanted = plain([None if r in absent else v for r, v in enumerate(values)], 0, size)
    if wanted is not None:
        whole = fold(sums, 0, size)
        assert whole is not None
        arrays, weights = whole
        assert arrays[0].tobytes() == wanted.tobytes()
        assert weights[0] == len(kept)
    assert all((kept[r][0][0] == values[r]).all() for r in kept)


def test_a_cover_is_as_small_as_the_tree_allows():
    assert cover(set(range(8)), set(), 8) == [(0, 8)]
    assert cover({0, 2, 4, 6}, set(), 8) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert cover({4, 5, 6, 7}, set(), 8) == [(4, 8)]
    assert cover({4, 5, 6}, {7}, 8) == [(4, 8)]
    assert cover({1, 2}, set(), 3) == [(1, 2), (2, 3)]
    assert cover(set(), {0, 1}, 2) == []


def test_absent_ranks_are_skipped_in_place():
    """Compacting the ranks that are left would add in another order."""
    big = np.array([1.0, 5.0, 1e8, -1e8, 1.0, 1.0], "f4")
    values = [v.reshape(1) for v in big]
    without_1 = [None if r == 1 else v for r, v in enumerate(values)]
    nodes = {r: node(v) for r, v in enumerate(without_1) if v is not None}
    found = reduce_all(nodes, 6, "sum")[0]
    assert found.tobytes() == plain(without_1, 0, 6).tobytes()
    compacted = plain([v for v in without_1 if v is not None], 0, 5)
    assert found.tobytes() != compacted.tobytes()


@given(sizes, st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_the_sum_has_the_same_bits_however_the_arrays_are_cut(size, seed, k):
    values = rough(size, seed, width=7)

    def reduced(columns):
        nodes = {r: node(v[columns].copy(), 1 + r) for r, v in enumerate(values)}
        return reduce_all(nodes, size, "mean")[0]

    parts = [reduced(c) for c in np.array_split(np.arange(7), k)]
    assert np.concatenate(parts).tobytes() == reduced(np.arange(7)).tobytes()


def test_a_mean_divides_once_by_the_weights_of_those_who_deliver_the_key():
    nodes = {
        0: leaf([(0, np.array([1.0])), (1, np.array([10.0]))], 3.0, "mean"),
        1: leaf([(0, np.array([2.0]))], 1.0, "mean"),
        2: leaf([(1, np.array([20.0]))], 2.0, "mean"),
    }
    found = reduce_all(nodes, 3, "mean")
    assert found[0] == (3 * 1 + 1 * 2) / 4
    assert found[1] == (3 * 10 + 2 * 20) / 5


def test_a_sum_ignores_weights():
    nodes = {r: leaf([(0, np.ones(2))], 7.0, "sum") for r in range(3)}
    np.testing.assert_array_equal(reduce_all(nodes, 3, "sum")[0], [3.0, 3.0])


def test_a_mean_at_weight_one_is_not_divided():
    value = np.array([1.0, 3.0])
    assert mean(({0: value}, {0: 1.0}))[0] is value


def test_a_callable_gets_stacked_contributions_in_rank_order_with_weights():
    seen = []

    def median(stacked, weights):
        seen.append((stacked.copy(), weights))
        return np.median(stacked, axis=0)

    nodes = {
        r: leaf([(0, np.full(2, float(r), "f4"))], 1.0 + r, median) for r in (3, 0, 2)
    }
    nodes[1] = leaf([(1, np.ones(1, "f4"))], 9.0, median)
    found = reduce_all(nodes, 4, median)
    stacked, weights = seen[0]
    np.testing.assert_array_equal(stacked, [[0, 0], [2, 2], [3, 3]])
    np.testing.assert_array_equal(weights, [1.0, 3.0, 4.0])
    assert found[0].dtype == np.float32
    np.testing.assert_array_equal(found[0], [2, 2])
    np.testing.assert_array_equal(found[1], [1])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda s, w: s, r"returned shape \(2, 3\).*of shape \(3,\)"),
        (lambda s, w: s[:1], r"returned shape \(1, 3\).*of shape \(3,\)"),
        (lambda s, w: np.full(3, np.nan), "NaN or Inf"),
        (lambda s, w: np.full(3, 1e300), r"NaN or Inf \(as float32\)"),
        (lambda s, w: s[0] + 1j, "dtype complex64"),
        (lambda s, w: None, "returned shape"),
        (lambda s, w: np.array(["a"] * 3), "dtype <U1"),
    ],
)
def test_a_callable_that_returns_something_else_is_refused(function, message):
    nodes = {r: leaf([(0, np.ones(3, "f4"))], 1.0, function) for r in range(2)}
    with pytest.raises((ValueError, TypeError), match=message):
        reduce_all(nodes, 2, function)


def test_what_is_no_reduction_is_refused():
    with pytest.raises(ValueError, match=r"reduce='max'.*'mean', 'sum'"):
        check_reduce("max")
    with pytest.raises(TypeError, match="or a function, found 3"):
        check_reduce(3)  # type: ignore[arg-type]  # refused
    check_reduce(lambda s, w: s[0])
    check_reduce("sum")
