"""Rows that an index names."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from daskps.store.regions import named_rows, runs_of_rows

x = np.arange(24).reshape(6, 2, 2)


@given(
    arrays(
        np.int64,
        st.lists(st.integers(0, 3), max_size=2).map(tuple),
        elements=st.integers(-6, 5),
    )
    | arrays(bool, 6)
    | arrays(bool, (6, 2))
)
def test_only_the_rows_that_are_named_are_needed(index):
    named = named_rows(index, x.shape)
    assert named is not None
    rows, inner = named
    np.testing.assert_array_equal(x[rows][inner], x[index], strict=True)
    assert set(rows) == set(
        np.broadcast_to(np.arange(6)[:, None, None], x.shape)[index].flat
    )
    runs = runs_of_rows(rows)
    assert [r for a, b in runs for r in range(a, b)] == rows.tolist()
    assert all(b < c for (_, b), (c, _) in itertools.pairwise(runs))


def test_what_is_no_array_is_looked_at_elsewhere():
    for index in (1, slice(2), ..., None, (1, [0]), (), "w"):
        assert named_rows(index, x.shape) is None
