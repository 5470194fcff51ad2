"""NaN and infinity are found wherever they are."""

from __future__ import annotations

import numpy as np
import pytest

from daskps import kernels

DTYPES = ["f2", "f4", "f8"]
#: Around the switch from NumPy to the compiled loop, and not a multiple of a block.
SIZES = [1, 7, 16_383, 16_384, 40_001]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_finite_numbers_are_finite(dtype, n):
    info = np.finfo(dtype)
    a = np.zeros(n, dtype)
    a[:: max(n // 7, 1)] = info.max
    a[n // 2] = info.smallest_subnormal
    a[-1] = info.min
    assert kernels.finite(a) is True


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_one_bad_element_anywhere_is_found(dtype, n, bad):
    for position in {0, n // 3, n - 1}:
        a = np.ones(n, dtype)
        a[position] = bad
        assert kernels.finite(a) is False


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_shape_layout_and_alignment(dtype):
    square = np.ones((200, 200), dtype)
    shifted = np.frombuffer(bytes(1) + square.tobytes(), np.uint8)[1:].view(dtype)
    swapped = square.astype(square.dtype.newbyteorder())
    for a in (square, square.T, square[::2, 1:], shifted, swapped, square[:0]):
        assert kernels.finite(a) is True
    square[150, 71] = np.nan
    shifted = np.frombuffer(bytes(1) + square.tobytes(), np.uint8)[1:].view(dtype)
    swapped = square.astype(square.dtype.newbyteorder())
    for a in (square, square.T, square[::2, 1:], shifted, swapped):
        assert kernels.finite(a) is False


def test_integers_and_scalars():
    assert kernels.finite(np.arange(100_000))
    assert kernels.finite(np.array(1.0))
    assert not kernels.finite(np.array(np.nan))
