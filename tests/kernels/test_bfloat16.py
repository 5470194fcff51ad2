"""Rounding to bfloat16, against arithmetic that knows nothing of bits."""

from __future__ import annotations

import numpy as np
import pytest

from daskps.codecs import BFloat16
from daskps.kernels.halves import BFLOAT16

RNG = np.random.default_rng(7)
LARGEST = float.fromhex("0x1.fep127")
#: Half-way between the largest bfloat16 and the next one, which would be 2**128.
BORDER = float.fromhex("0x1.ffp127")


def nearest(a):
    """Round to 8 bits, or to multiples of the smallest number, even ones from half-way."""
    a = np.asarray(a, "f8")
    _, exponent = np.frexp(a)
    step = np.maximum(exponent - 8, -133)
    rounded = np.ldexp(np.rint(np.ldexp(a, -step)), step)
    return np.where(np.abs(rounded) > LARGEST, np.copysign(np.inf, a), rounded)


def through(a):
    a = np.asarray(a)
    words, out = np.empty(len(a), "u2"), np.empty(len(a), a.dtype)
    finite = BFLOAT16.encode(a, words)
    BFLOAT16.decode(words, out)
    return finite, words, out


def same(found, expected):
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))


@pytest.mark.parametrize("n", [0, 1, 31, 100_003])
def test_any_float32_is_rounded_to_the_nearest(n):
    a = RNG.integers(0, 2**32, n, dtype="u4").view("f4")
    a = a[~np.isnan(a)]
    finite, _, out = through(a)
    same(out, nearest(a).astype("f4"))
    assert finite is bool(np.isfinite(out).all())


def test_half_way_goes_to_the_even_one():
    a = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-23], "f4")
    _, _, out = through(a)
    same(out, np.array([1, 1 + 2**-6, -1, 1 + 2**-7], "f4"))
    _, _, known = through(np.array([1.111111, 2.111111, 3.111111, 4.111111], "f4"))
    same(known, np.array([1.109375, 2.109375, 3.109375, 4.125], "f4"))


@pytest.mark.parametrize("n", [1, 50_001])
def test_a_float64_is_rounded_once(n):
    mantissas = RNG.integers(0, 512, n) / 256 + 1
    tiny = RNG.choice([-(2.0**-40), 0, 2.0**-40], n)
    a = RNG.choice([-1, 1], n) * (mantissas + tiny) * 2.0 ** RNG.integers(-140, 126, n)
    finite, _, out = through(a)
    assert finite
    same(out, nearest(a))
    # What a float32 in between makes of it, rounded twice.
    assert n == 1 or (out != nearest(a.astype("f4"))).any()


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_what_is_too_large_becomes_infinity_and_is_told(dtype):
    below = np.nextafter(np.array([BORDER], dtype), 0, dtype=dtype)
    for value, expected in ((LARGEST, LARGEST), (below[0], LARGEST), (BORDER, np.inf)):
        for sign in (1, -1):
            a = np.full(17, sign * value, dtype)
            finite, _, out = through(a)
            same(out, np.full(17, sign * expected, dtype))
            assert finite is (expected == LARGEST)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_nan_stays_nan(dtype):
    bits = np.array([0x7F800001, 0xFF800001, 0x7FC00000, 0xFFFFFFFF, 0x7FFFFFFF], "u4")
    with np.errstate(invalid="ignore"):
        signalling = bits.view("f4").astype(dtype)
    for a in (signalling, np.array([1, np.nan], dtype)):
        finite, _, out = through(a)
        assert not finite
        np.testing.assert_array_equal(np.isnan(out), np.isnan(a))


@pytest.mark.parametrize("at", [0, 16_383, 16_384, 39_999])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_one_bad_element_anywhere_is_told(dtype, at):
    a = np.ones(40_000, dtype)
    a[at] = 1e300 if dtype == "f8" else 3.4e38
    assert through(a)[0] is False


def test_what_was_rounded_stays_what_it_is():
    words = np.arange(2**16, dtype="u2")
    out, again = np.empty(2**16, "f4"), np.empty(2**16, "u2")
    BFLOAT16.decode(words, out)
    BFLOAT16.encode(out, again)
    number = ~np.isnan(out)
    np.testing.assert_array_equal(again[number], words[number])


def test_read_only_and_unaligned_memory_is_read():
    a = RNG.normal(size=1001).astype("f4")
    _, words, out = through(a)
    for raw in (a, words):
        shifted = np.frombuffer(b"\0" + raw.tobytes(), "u1")[1:].view(raw.dtype)
        assert not shifted.flags.writeable
        if raw is a:
            same(through(shifted)[2], out)
        else:
            found = np.empty_like(out)
            BFLOAT16.decode(shifted, found)
            same(found, out)


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match="float16"):
        BFLOAT16.encode(np.ones(1, "f2"), np.empty(1, "u2"))
    with pytest.raises(TypeError, match="int32"):
        BFLOAT16.decode(np.ones(1, "u2"), np.empty(1, "i4"))


def unfit():
    """Arrays that do not belong together, and how that is said."""
    n, length = np.empty, "vectors of one length"
    yield n(5, "f4"), n(4, "u2"), length
    yield n(4, "f4"), n(5, "u2"), length
    yield n(40_000, "f8"), n(39_999, "u2"), length
    yield n(1, "f8"), n(0, "u2"), length
    yield n((2, 2), "f4"), n((2, 2), "u2"), length
    yield n((), "f4"), n((), "u2"), length
    yield n(8, "f4")[::2], n(4, "u2"), "contiguous"
    yield n(4, "f8"), n(8, "u2")[::2], "contiguous"
    yield n(4, "f2"), n(4, "u2"), "no bfloat16 for float16"
    yield n(4, "f4"), n(4, "i2"), "are uint16, found int16"


@pytest.mark.parametrize(("numbers", "words", "error"), [*unfit()])
def test_arrays_that_do_not_fit_are_refused(numbers, words, error):
    codec = BFloat16()
    with pytest.raises((ValueError, TypeError), match=error):
        codec.encode(numbers, words)
    with pytest.raises((ValueError, TypeError), match=error):
        codec.decode(words, numbers)


def test_read_only_arrays_are_refused():
    numbers, words = np.zeros(4, "f4"), np.zeros(4, "u2")
    numbers.flags.writeable = words.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        BFloat16().encode(numbers, words)
    with pytest.raises(ValueError, match="read-only"):
        BFloat16().decode(words, numbers)
    # What is only read may be.
    assert BFloat16().encode(numbers, np.empty(4, "u2"))
    BFloat16().decode(words, np.empty(4, "f4"))
