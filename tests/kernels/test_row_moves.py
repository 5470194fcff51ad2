"""Rows copied out of a table and into it, against NumPy's indexing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.kernels import row_moves
from daskps.layout.arrays import DTYPES


def guarded(rows: int, dim: int, dtype: str) -> tuple[Any, Any]:
    """Return random rows with memory around them, and all of it as bytes."""
    nbytes = rows * dim * np.dtype(dtype).itemsize
    whole = np.random.default_rng(rows + dim).integers(0, 2, nbytes + 512, np.uint8)
    return whole[256 : 256 + nbytes].view(dtype).reshape(rows, dim), whole


@st.composite
def cases(draw: Any) -> Any:
    dtype = draw(st.sampled_from(DTYPES))
    n, dim, room = (draw(st.integers(*b)) for b in ((0, 20), (0, 40), (0, 12)))
    k = draw(st.integers(0, 30 if n and room else 0))
    if k == 0:
        return dtype, n, dim, room, [], None
    ids = draw(st.lists(st.integers(0, n - 1), min_size=k, max_size=k))
    direct = draw(st.booleans()) and k <= room
    at = draw(st.lists(st.integers(0, room - 1), min_size=k, max_size=k))
    return dtype, n, dim, room, ids, None if direct else at


@given(cases(), st.sampled_from([0, 5, -(2**62)]))
def test_rows_are_copied_both_ways(case: Any, first: int) -> None:
    dtype, n, dim, room, ids, at = case
    (w, around), (out, beside) = guarded(n, dim, dtype), guarded(room, dim, dtype)
    wanted = np.array(ids, np.int64) + first
    where = None if at is None else np.array(at, np.int64)
    for loop, table, rows in ((row_moves.gather, w, out), (row_moves.scatter, w, out)):
        expected = [a.copy() for a in (table, rows)]
        for k, r in enumerate(ids):
            p = k if at is None else at[k]
            if loop is row_moves.gather:
                expected[1][p] = expected[0][r]
            else:
                expected[0][r] = expected[1][p]
        edges = [a[np.r_[:256, -256:0]].copy() for a in (around, beside)]
        loop(table, wanted, rows, where, first=first)
        for a, b in zip((table, rows), expected, strict=True):
            assert a.tobytes() == b.tobytes()
        for a, b in zip((around, beside), edges, strict=True):
            assert a[np.r_[:256, -256:0]].tobytes() == b.tobytes()


OUTSIDE = [-1, 4, 2**40, -(2**40), 2**63 - 1, -(2**63)]


@pytest.mark.parametrize("dim", [3, 100])  # asked for before their turn, and not
@pytest.mark.parametrize("bad", OUTSIDE)
@pytest.mark.parametrize("loop", [row_moves.gather, row_moves.scatter])
def test_nothing_outside_is_touched(loop: Any, bad: int, dim: int) -> None:
    (w, around), (rows, beside) = guarded(4, dim, "f4"), guarded(2, dim, "f4")
    before = around.tobytes(), beside.tobytes()
    with pytest.raises(ValueError, match=f"id {bad} at position 0 is no row from 0"):
        loop(w, np.array([bad, 1]), rows)
    if bad < 0 or bad > 4:
        with pytest.raises(ValueError, match=r"its place .* is not below 2"):
            loop(w, np.array([0, 1]), rows, np.array([bad, 1]))
    with pytest.raises(ValueError, match="is no row from 7 to 10"):
        loop(w, np.array([3]), rows, first=7)
    assert (around.tobytes(), beside.tobytes()) == before


def refusals() -> Any:
    ids = np.arange(2)
    w, rows = np.ones((4, 3), "f4"), np.ones((2, 3), "f4")
    yield "more ids than places", w, np.arange(3), rows, None
    yield "ids int32", w, ids.astype("i4"), rows, None
    yield "ids strided", w, np.arange(4)[::2], rows, None
    yield "ids 2-d", w, np.zeros((2, 1), "i8"), rows, None
    yield "too few positions", w, ids, rows, ids[:1]
    yield "positions uint64", w, ids, rows, ids.astype("u8")
    yield "another dtype", w, ids, rows.astype("i4"), None
    yield "another width", w, ids, rows[:, :2].copy(), None
    yield "flat", w, ids, rows[0], None
    yield "strided", w.T.copy().T, ids, rows, None


@pytest.mark.parametrize("case", list(refusals()), ids=lambda case: case[0])
@pytest.mark.parametrize("loop", [row_moves.gather, row_moves.scatter])
def test_what_does_not_fit_is_refused(loop: Any, case: Any) -> None:
    _, w, ids, rows, at = case
    with pytest.raises(ValueError, match=r"expected|is no row"):
        loop(w, ids, rows, at)


def test_read_only_rows_are_read_and_not_written() -> None:
    w, rows, ids = np.ones((4, 3), "f4"), np.zeros((2, 3), "f4"), np.arange(2)
    for a in (w, ids):
        a.flags.writeable = False
    row_moves.gather(w, ids, rows)
    assert rows.all()
    with pytest.raises(ValueError, match="read-only"):
        row_moves.scatter(w, ids, rows)
    w, rows = rows, w
    with pytest.raises(ValueError, match="read-only"):
        row_moves.gather(w, ids, rows[:2])
