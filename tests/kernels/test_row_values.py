"""Random numbers of rows: their bits, their distribution, and nothing in between."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskps.kernels import row_values
from daskps.kernels.row_values import logarithm, normals, quantile, uniforms

WORD = 2**64
KEY = 0x0123456789ABCDEF, 0xFEDCBA9876543210


def mixed(x: int) -> int:
    """As the paper writes it, with numbers that do not wrap around."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB % WORD
    return x ^ x >> 31


def word(key: tuple[int, int], row: int, column: int) -> int:
    step = 0x9E3779B97F4A7C15
    of_row = mixed((key[0] + row * step) % WORD)
    return mixed(((of_row ^ key[1]) + column * step) % WORD) >> 11


@settings(max_examples=30)
@given(
    st.tuples(*[st.integers(0, WORD - 1)] * 2),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5),
    st.integers(0, 9),
)
def test_a_number_is_one_of_key_row_and_column(key: Any, ids: Any, dim: int) -> None:
    words = [[word(key, row, i) for i in range(dim)] for row in ids]
    shape, rows = (len(ids), dim), np.array(ids, np.int64)
    expected = np.array(words, float).reshape(shape) * 2.0**-53
    assert uniforms(key, rows, dim).tobytes() == expected.tobytes()
    inverse = NormalDist().inv_cdf
    wanted = [[inverse((w + 0.5) * 2.0**-53) for w in row] for row in words]
    found = normals(key, rows, dim)
    np.testing.assert_allclose(found, np.reshape(wanted, shape), rtol=1e-14)
    # The compiled loop has the bits of what is written.
    exact = [[quantile((w + 0.5) * 2.0**-53) for w in row] for row in words]
    assert found.tobytes() == np.array(exact, float).reshape(shape).tobytes()


@given(st.floats(5e-324, 1e300))
def test_the_logarithm_is_that_of_the_library(x: float) -> None:
    assert math.isclose(logarithm(x), math.log(x), rel_tol=4e-16, abs_tol=4e-16)


@pytest.mark.parametrize(
    "p", [2.0**-54, 1e-11, 0.075, 0.0749999, 0.5, 0.925, 1 - 2.0**-53]
)
def test_the_quantile_is_that_of_the_library(p: float) -> None:
    assert math.isclose(quantile(p), NormalDist().inv_cdf(p), rel_tol=1e-14)


def moments(x: Any) -> list[float]:
    return [float((x**n).mean()) for n in (1, 2, 3, 4)]


def test_they_have_the_distributions_that_they_are_named_after() -> None:
    ids, n = np.arange(20_000), 20_000 * 16
    u, z = uniforms(KEY, ids, 16), normals(KEY, ids, 16)
    # Five standard errors.
    for k, mean in enumerate([1 / 2, 1 / 3, 1 / 4, 1 / 5], 1):
        error = math.sqrt((1 / (2 * k + 1) - mean**2) / n)
        assert abs((u**k).mean() - mean) < 5 * error
    for found, mean, spread in zip(
        moments(z), (0, 1, 0, 3), (1, 2, 15, 96), strict=True
    ):
        assert abs(found - mean) < 5 * math.sqrt(spread / n)
    counts, _ = np.histogram(u, 256, (0, 1))
    chi = ((counts - n / 256) ** 2).sum() / (n / 256)
    assert abs(chi - 255) < 5 * math.sqrt(2 * 255)
    assert ((u >= 0) & (u < 1)).all()
    assert len(np.unique(u)) == n


@pytest.mark.parametrize("far", [1, 2, 64, 2**32, 2**62])
def test_rows_columns_and_tables_next_to_each_other_have_nothing_in_common(
    far: int,
) -> None:
    n, dim = 4_000, 32
    a = normals(KEY, np.arange(n), dim)
    others = [
        normals(KEY, np.arange(n) + far, dim)[far:] if far < n else None,
        normals((KEY[0] ^ far, KEY[1]), np.arange(n), dim),
        normals((KEY[0], KEY[1] ^ far), np.arange(n), dim),
        normals(KEY, np.arange(n) + far if far >= n else np.arange(n)[::-1], dim),
        np.roll(a, 1, axis=1),
        np.roll(a, 1, axis=0),
    ]
    for b in others:
        if b is not None:
            m = len(b)
            assert abs((a[:m] * b).mean()) < 5 / math.sqrt(m * dim)


def test_rows_are_the_same_in_any_order_and_part() -> None:
    ids = np.random.default_rng(0).permutation(50)
    whole = normals(KEY, np.arange(50), 7)
    assert normals(KEY, ids, 7).tobytes() == whole[ids].tobytes()
    assert normals(KEY, ids[::2], 7).tobytes() == whole[ids[::2]].tobytes()
    assert normals(KEY, ids, 3).tobytes() == whole[ids, :3].tobytes()
    assert row_values.uniforms(KEY, ids[:0], 7).shape == (0, 7)
    assert normals(KEY, ids, 0).shape == (50, 0)
