"""Sums and extremes of arrays that are cut anywhere."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from daskps.kernels.measures import (
    BLOCK,
    KINDS,
    by_block,
    n_blocks,
    total,
    whole_blocks,
)
from daskps.layout.arrays import DTYPES

RNG = np.random.default_rng(5)


def some(dtype: str, n: int) -> np.ndarray:
    """Numbers of a dtype, also negative and large ones."""
    if dtype == "bool":
        return RNG.random(n) < 0.5
    values = RNG.normal(size=n) * 50
    with np.errstate(invalid="ignore"):
        return (values if dtype[0] != "u" else abs(values)).astype(dtype)


def norm_of(x: np.ndarray) -> Any:
    """NumPy's norm, of which that of float16 overflows on the way."""
    found = np.linalg.norm(x.astype("f8"))
    return found.astype(x.dtype) if x.dtype.kind == "f" else found


NUMPY: dict[str, Any] = {
    "sum": np.sum,
    "mean": np.mean,
    "min": np.min,
    "max": np.max,
    "norm": norm_of,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 100, BLOCK, 3 * BLOCK + 7])
def test_numbers_and_dtypes_are_those_of_numpy(dtype, n):
    x = some(dtype, n)
    for kind, numpy in NUMPY.items():
        found = total(kind, by_block(kind, x), n, x.dtype)
        wanted = numpy(x)
        assert found.dtype == wanted.dtype, kind
        rtol = {"float16": 3e-3, "float32": 1e-5}.get(dtype, 1e-12)
        np.testing.assert_allclose(found, wanted, rtol=rtol, atol=rtol * n)
    for other in ("float32", "int64", dtype):
        y = some(other, n)
        found = total("dot", by_block("dot", x, y), n, x.dtype, by=y.dtype)
        assert found.dtype == np.vdot(x[:1], y[:1]).dtype
        if x.dtype.kind == y.dtype.kind != "f":
            assert found == np.vdot(x, y)


def test_sums_of_small_floats_are_those_of_exact_numbers():
    """Of float16, where NumPy would lose all digits, to half a unit of the last place."""
    x = some("float16", 50_000)
    exact = sum((Fraction(float(v)) for v in x), Fraction())
    assert total("sum", by_block("sum", x), len(x), x.dtype) == np.float16(float(exact))


@pytest.mark.parametrize("kind", KINDS)
def test_of_no_elements_it_is_as_in_numpy(kind):
    x = np.empty(0, "f4")
    blocks = by_block(kind, x, x if kind == "dot" else None)
    if kind in ("min", "max"):
        with pytest.raises(ValueError, match="zero-size array"):
            total(kind, blocks, 0, x.dtype)
    elif kind == "mean":
        with pytest.warns(RuntimeWarning):
            assert np.isnan(total(kind, blocks, 0, x.dtype))
    else:
        assert total(kind, blocks, 0, x.dtype, by=x.dtype) == 0


def test_nan_is_found_and_what_overflows_is_infinite():
    x = np.ones(9_000, "f4")
    x[8_999] = np.nan
    for kind in KINDS:
        by = x if kind == "dot" else None
        assert np.isnan(total(kind, by_block(kind, x, by), len(x), "f4", by="f4"))
    big = np.full(9_000, 3e38, "f4")
    for kind in ("sum", "norm"):
        assert total(kind, by_block(kind, big), len(big), "f4") == np.inf


def test_blocks_are_counted_from_the_first_element():
    assert (n_blocks(0), n_blocks(1), n_blocks(BLOCK), n_blocks(BLOCK + 1)) == (
        0,
        1,
        1,
        2,
    )
    assert whole_blocks(0, BLOCK, 3 * BLOCK) == (0, 1)
    assert whole_blocks(1, 2 * BLOCK + 5, 3 * BLOCK) == (1, 2)
    assert whole_blocks(1, 2 * BLOCK + 5, 2 * BLOCK + 5) == (1, 3)
    assert whole_blocks(5, 9, 3 * BLOCK) == (1, 1)
