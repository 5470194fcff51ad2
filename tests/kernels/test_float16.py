"""Rounding to float16, against NumPy's conversion."""

from __future__ import annotations

import numpy as np
import pytest

from daskps.kernels.halves import FLOAT16

RNG = np.random.default_rng(5)


def through(a):
    words, out = np.empty(len(a), "u2"), np.empty(len(a), a.dtype)
    finite = FLOAT16.encode(a, words)
    FLOAT16.decode(words, out)
    return finite, words, out


def same_bits(words, expected):
    """NaN is NaN whatever its other bits."""
    nan = np.isnan(expected)
    np.testing.assert_array_equal(words[~nan], expected.view("u2")[~nan])
    assert np.isnan(words[nan].view("f2")).all()


def test_all_words_are_widened():
    words = np.arange(65_536, dtype="u2")
    for dtype in ("f4", "f8"):
        out = np.empty(65_536, dtype)
        FLOAT16.decode(words, out)
        expected = words.view("f2").astype(dtype)
        np.testing.assert_array_equal(out, expected)
        known = ~np.isnan(expected)
        np.testing.assert_array_equal(
            np.signbit(out)[known], np.signbit(expected)[known]
        )


def half_ways(dtype):
    """Between any two neighbours, and next to that."""
    words = np.arange(31_744, dtype="u2").view("f2").astype("f8")
    middle = (words[1:] + words[:-1]) / 2
    near = [middle, *(np.nextafter(middle.astype(dtype), to) for to in (0, 1e9))]
    return np.concatenate([*near, -middle]).astype(dtype)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("n", [0, 1, 33, 100_003])
def test_any_number_is_rounded_once_to_the_nearest(dtype, n):
    with np.errstate(invalid="ignore"):
        bits = RNG.integers(0, 2**32, n, dtype="u4").view("f4").astype(dtype)
    usual = (RNG.normal(size=n) * 10.0 ** RNG.integers(-9, 6, n)).astype(dtype)
    for a in (bits, usual, half_ways(dtype)[:n]):
        finite, words, _ = through(a)
        with np.errstate(over="ignore"):
            expected = a.astype("f2")
        same_bits(words, expected)
        assert finite is bool(np.isfinite(expected).all())


def test_a_float64_is_not_rounded_by_way_of_float32():
    a = half_ways("f8")
    b = a * (1 + RNG.choice([-(2.0**-40), 2.0**-40], len(a)))
    _, words, _ = through(b)
    same_bits(words, b.astype("f2"))
    assert (b.astype("f4").astype("f2") != b.astype("f2")).any()


@pytest.mark.parametrize("value", [65_520.0, np.inf, np.nan])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_what_is_not_finite_is_told_wherever_it_is(dtype, value):
    for at in (0, 16_384, 40_000):
        a = np.ones(40_001, dtype)
        a[at] = value
        assert through(a)[0] is False
        a[at] = 65_519.9
        assert through(a)[0] is True
