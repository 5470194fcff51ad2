"""Initial rows are a function of seed, name and id alone, however a table is cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps import init
from daskps.errors import LayoutError
from daskps.row_init import fill_rows

N, DIM = 40, 3


def own(shape, dtype, rng):
    return rng.normal(size=shape).astype(dtype)


def made(initializer, first=0, stop=N, dtype="f4", **key):
    rows = np.empty((stop - first, DIM), dtype)
    key = {"name": "emb", "seed": 1, **key}
    fill_rows(rows, initializer, first=first, n=N, **key)
    return rows


INITIALIZERS = [0.5, init.uniform(), init.normal(1, 2), init.fan_in(), init.fan_avg()]


@given(st.integers(0, N), st.sampled_from([*INITIALIZERS, own]))
def test_rows_are_the_same_in_one_piece_and_in_two(cut, initializer):
    both = np.concatenate([made(initializer, 0, cut), made(initializer, cut)])
    np.testing.assert_array_equal(both, made(initializer))


@pytest.mark.parametrize("initializer", [init.uniform(), init.normal(), own])
def test_seed_name_and_id_make_others(initializer):
    rows = made(initializer)
    assert len(np.unique(rows)) == rows.size
    for key in ({"seed": 2}, {"name": "other"}):
        assert not np.isin(made(initializer, **key), rows).any()


@pytest.mark.parametrize(
    ("initializer", "mean", "std"),
    [
        (init.uniform(-1, 3), 1, 4 / 12**0.5),
        (init.normal(1, 2), 1, 2),
        (init.fan_in(), 0, 64**-0.5),
        (init.fan_avg(), 0, (2 / (1000 + 64)) ** 0.5),
    ],
    ids=str,
)
def test_rows_are_of_their_distribution(initializer, mean, std):
    rows = np.empty((1000, 64))
    fill_rows(rows, initializer, name="emb", seed=0, first=0, n=1000)
    assert abs(rows.mean() - mean) < 4 * std / 64000**0.5
    assert abs(rows.std() / std - 1) < 0.02
    # Neither rows nor columns have anything in common.
    assert abs(np.corrcoef(rows.T) - np.eye(64)).max() < 0.2
    assert abs(np.corrcoef(rows[:64]) - np.eye(64)).max() < 0.6
    order = np.sort((rows - mean) / std, axis=None)
    assert abs(order[32000]) < 0.03


@pytest.mark.parametrize(
    ("initializer", "dtype", "said"),
    [
        (init.normal(), "i4", "give it a float dtype"),
        (2**40, "i4", "cannot start at"),
        (init.normal(0, 1e30), "f2", "NaN or Inf in float16"),
        (lambda shape, dtype, rng: np.zeros(2, dtype), "f4", r"return shape \(3,\)"),
        (lambda shape, dtype, rng: np.full(3, np.nan), "f8", "NaN or Inf"),
    ],
)
def test_what_a_table_cannot_hold_is_refused(initializer, dtype, said):
    with pytest.raises(LayoutError, match=said):
        made(initializer, dtype=dtype)
