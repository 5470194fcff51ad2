"""Codecs that leave something over: what is sent, what is not, and that nothing is lost."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from daskps import codecs
from daskps.codecs import Int8, TopK, TwoBit
from daskps.errors import PushRejectedError
from tests.kernels.compiling import kept

RNG = np.random.default_rng(23)
CODECS = [Int8(), Int8(7), TwoBit(0.005), TopK(ratio=0.1), TopK(threshold=0.01)]
IDS = ["int8", "int8-7", "2bit", "topk-ratio", "topk-threshold"]


def through(codec, array, cuts=None, residual=None):
    """Return what was made of an array, and the numbers that arrive."""
    cuts = cuts or [(0, len(array))]
    made = codec.encode_pieces(array, cuts, residual, cache_dir=kept())
    out = np.full(len(array), np.nan, array.dtype)
    for (a, b), words in zip(cuts, made.words, strict=True):
        assert words.dtype == codec.dtype
        assert codec.fits(len(words), b - a, a)
        codec.decode_piece(words, out[a:b], a, cache_dir=kept())
    return made, out


def some_cuts(n, k):
    ends = [0, *sorted(set(RNG.integers(0, n + 1, k - 1).tolist())), n]
    return [(a, b) for a, b in pairwise(ends) if a < b]


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_what_arrives_and_what_is_left_are_all_of_it(codec, dtype):
    """However an array is cut, the same numbers arrive, to the last bit."""
    for n in (1, 2, 3, 4, 5, 255, 256, 257, 1000, 5003):
        given = (RNG.normal(size=n) * 1e-2).astype(dtype)
        before = (RNG.normal(size=n) * 1e-3).astype(dtype)
        copies = given.copy(), before.copy()
        found = [through(codec, given, some_cuts(n, k), before) for k in (1, 2, 5)]
        for made, out in found:
            assert made.finite
            np.testing.assert_array_equal(out, found[0][1])
            np.testing.assert_array_equal(made.residual, found[0][0].residual)
            atol = 1e-8 if dtype == "f4" else 1e-16
            np.testing.assert_allclose(
                out + made.residual, given + before, rtol=0, atol=atol
            )
        np.testing.assert_array_equal(given, copies[0])
        np.testing.assert_array_equal(before, copies[1])


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_told_wherever_it_is(codec, dtype, value):
    for at in (0, 5, 996, 997):
        given = np.ones(998, dtype)
        assert codec.encode_pieces(given, [(0, 998)], cache_dir=kept()).finite
        given[at] = value
        assert not codec.encode_pieces(given, [(0, 998)], cache_dir=kept()).finite


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_words_that_are_not_those_of_so_many_numbers_are_refused(codec):
    made, _ = through(codec, np.arange(1.0, 10.0))
    for words, n in ((made.words[0], 1), (made.words[0][:-1], 9)):
        said = rf"codec='{codec.name}'.* {n} numb"
        with pytest.raises(PushRejectedError, match=said):
            codec.decode_piece(words, np.empty(n), cache_dir=kept())
    if codec.is_fixed:
        assert not codec.fits(len(made.words[0]) + 1, 9, 0)
    assert not codec.fits(28, 9, 0)


# -- Int8 -----------------------------------------------------------------------------


def test_an_int8_is_the_nearest_multiple_of_its_block_s_scale():
    """Against arithmetic that knows nothing of blocks within a loop."""
    given = RNG.normal(size=1000).astype("f4") * np.repeat([1, 1e-6, 1e6, 1], 250)
    given = given.astype("f4")
    given[256:512] = 0
    _, out = through(Int8(), given)
    for a in range(0, 1000, 256):
        block = given[a : a + 256].astype("f8")
        scale = float(np.float32(np.abs(block).max() / 127))
        step = scale or 1.0
        assert np.abs(out[a : a + 256] - block).max() <= 0.5001 * scale
        np.testing.assert_allclose(
            out[a : a + 256], np.rint(block / step) * scale, rtol=0, atol=scale * 1.01
        )
    assert not out[256:512].any()


def test_int8_takes_one_byte_each_and_four_for_a_block():
    assert [Int8().n_words(n) for n in (1, 256, 257, 1000)] == [5, 260, 265, 1016]
    given = np.ones(1000)
    made = Int8().encode_pieces(given, [(0, 100), (100, 600), (600, 1000)])
    # Blocks 0; 0, 1 and 2; 2 and 3.
    assert [len(words) for words in made.words] == [104, 512, 408]


@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-37, 1e-36, 3.4e38])
def test_int8_of_extreme_numbers_loses_nothing(size):
    given = np.full(300, size, "f4")
    made, out = through(Int8(), given)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out + made.residual, given, rtol=1e-6)


def test_an_int8_whose_scale_is_no_float32_is_refused():
    assert not Int8().encode_pieces(np.full(3, 1e200), [(0, 3)]).finite


# -- TwoBit ---------------------------------------------------------------------------


def test_m9_two_bits_of_zeros_are_zeros():
    made, out = through(TwoBit(0.5), np.zeros(30, "f4"))
    assert not out.any()
    assert not made.residual.any()
    assert made.words[0].nbytes == 8


def simulated(given, residual, threshold):
    """MXNet's rule, number by number."""
    sent = []
    for i, g in enumerate(given):
        residual[i] += g
        if residual[i] >= threshold:
            sent.append(threshold)
        elif residual[i] <= -threshold:
            sent.append(-threshold)
        else:
            sent.append(0.0)
        residual[i] -= sent[-1]
    return sent


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_m10_two_bits_equal_an_independent_simulation(dtype):
    residual, ours = np.zeros(103, dtype), None
    for _ in range(20):
        given = RNG.normal(size=103).astype(dtype)
        expected = simulated(given, residual, np.dtype(dtype).type(0.5))
        made, out = through(TwoBit(0.5), given, some_cuts(103, 3), ours)
        ours = made.residual
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(ours, residual)


# -- TopK -----------------------------------------------------------------------------


def test_what_is_below_the_threshold_waits_until_it_is_not():
    """0.03 twice with a threshold of 0.05: nothing, then 0.06, and 0 is left."""
    codec, given = TopK(threshold=0.05), np.array([0.03])
    first, out = through(codec, given)
    assert (first.words[0].nbytes, out[0], first.residual[0]) == (0, 0.0, 0.03)
    second, out = through(codec, given, residual=first.residual)
    assert (second.words[0].nbytes, out[0], second.residual[0]) == (12, 0.06, 0.0)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_the_largest_of_all_of_a_parameter_go(dtype):
    for n, ratio in ((1, 0.1), (10, 0.25), (5003, 0.01), (7, 1.0)):
        given = RNG.normal(size=n).astype(dtype)
        _, out = through(TopK(ratio=ratio), given, some_cuts(n, 3))
        k = max(1, math.ceil(ratio * n))
        largest = np.argsort(-np.abs(given), kind="stable")[:k]
        expected = np.zeros_like(given)
        expected[largest] = given[largest]
        np.testing.assert_array_equal(out, expected)


def test_of_equal_numbers_the_first_go_and_zeros_never():
    _, out = through(TopK(ratio=0.5), np.array([1.0, -2, 1, 1, 2, -1]))
    assert out.tolist() == [1, -2, 0, 0, 2, 0]
    made, out = through(TopK(ratio=0.5), np.array([0.0, 0, 3, 0]))
    assert made.words[0].nbytes == 12
    assert out.tolist() == [0, 0, 3, 0]


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_a_number_that_goes_takes_its_bytes_and_four(dtype):
    made, _ = through(TopK(ratio=0.01), RNG.normal(size=5000).astype(dtype))
    assert made.words[0].nbytes == 50 * (4 + np.dtype(dtype).itemsize)


# -- arguments ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: TopK(), ValueError, "takes ratio= or threshold=, found ratio=None"),
        (lambda: TopK(ratio=0.1, threshold=1.0), ValueError, "found ratio=0.1 and"),
        (lambda: TopK(ratio=0), ValueError, "ratio is above 0 and finite, found 0"),
        (lambda: TopK(ratio=1.5), ValueError, "at most 1, found 1.5"),
        (lambda: TopK(threshold="1"), TypeError, "threshold is a number, found '1'"),  # type: ignore[arg-type]  # what is tested
        (lambda: TwoBit(0.0), ValueError, "threshold is above 0 and finite, found 0.0"),
        (lambda: TwoBit(math.nan), ValueError, "found nan"),
        (lambda: TwoBit(True), TypeError, "threshold is a number, found True"),
        (lambda: Int8(0), ValueError, "block is at least 1, found 0"),
        (lambda: Int8(1.5), TypeError, "block is an int, found 1.5"),  # type: ignore[arg-type]  # what is tested
    ],
)
def test_arguments_that_cannot_be_are_refused(make, error, said):
    with pytest.raises(error, match=said):
        make()


def test_none_of_them_is_known_by_its_name_alone():
    for codec in CODECS:
        assert codec.feedback
        assert not codecs.is_plain(codec)
    assert codecs.choose("int8") == Int8()
