"""Copies past the caches: every byte, and no other."""

from __future__ import annotations

import numpy as np
import pytest

from daskps.kernels import past

N = 80_000


@pytest.mark.parametrize("shift", [0, 1, 3, 8])
@pytest.mark.parametrize("n", [0, 1, 65_535, 65_536, 65_537, N])
def test_bytes_are_copied_from_and_to_any_place(shift, n):
    source = np.random.default_rng(n).integers(0, 256, N + 64, np.uint8)
    target = np.full(N + 200, 7, np.uint8)
    at = 70 + shift
    past.copy(target[at : at + n], source[5 : 5 + n])
    np.testing.assert_array_equal(target[at : at + n], source[5 : 5 + n])
    target[at : at + n] = 7
    assert (target == 7).all()


@pytest.mark.parametrize(
    ("dtype", "other"),
    [("f4", "f4"), ("f2", "f2"), ("bool", "bool"), ("f4", "f8"), (">f4", "<f4")],
)
def test_numbers_are_copied_as_numpy_does(dtype, other):
    a = (np.arange(N) % 5).astype(dtype)
    out, expected = np.empty(N, other), np.empty(N, other)
    past.copy(out, a)
    np.copyto(expected, a)
    assert out.tobytes() == expected.tobytes()


def test_layouts_are_those_of_numpy():
    a = np.arange(float(N)).reshape(400, 200)
    for source in (a, a.T, a[::2], a[:, 1:3], a[:1]):
        out = np.empty(source.shape)
        past.copy(out, source)
        np.testing.assert_array_equal(out, source)
        turned = np.empty(source.shape[::-1]).T
        past.copy(turned, source)
        np.testing.assert_array_equal(turned, source)
    with pytest.raises(ValueError, match="broadcast"):
        past.copy(np.empty(3), a)
    frozen = np.empty(N)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        past.copy(frozen, a.reshape(-1))
