"""Codecs by themselves: what they round, what is refused of a user's own."""

from __future__ import annotations

import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from daskps import codecs
from daskps.errors import PushRejectedError
from tests.kernels.compiling import kept


def words_of(codec, array):
    [words] = codec.encode_pieces(array, [(0, len(array))], cache_dir=kept()).words
    return words


def through(codec, array):
    out = np.empty_like(array)
    codec.decode_piece(words_of(codec, array), out, cache_dir=kept())
    return out


TRUNCATED = codecs.BFloat16(truncate=True)
ONE_TO_FIVE = np.arange(1, 6, dtype="f4")


# -- BigDL's "fp16", which is bfloat16 without the lower half -------------------------


@pytest.mark.parametrize("n_threads", [1, 4])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_b1_small_whole_numbers_are_exact(n_threads, dtype):
    given = ONE_TO_FIVE.astype(dtype)
    with ThreadPoolExecutor(n_threads) as pool:
        found = list(pool.map(lambda _: through(TRUNCATED, given), range(n_threads)))
    for one in found:
        assert one.tolist() == [1, 2, 3, 4, 5]


def test_b2_the_lower_half_is_left_out():
    given = np.arange(1, 6) + 0.111111
    for array in (given, given.astype("f4")):
        expected = [1.109375, 2.109375, 3.109375, 4.09375, 5.09375]
        assert through(TRUNCATED, array).tolist() == expected
    # Rounded, two of them are others.
    assert through(codecs.BFloat16(), given)[3:].tolist() == [4.125, 5.125]


def test_b3_a_slice_leaves_the_rest_as_it_is():
    out = np.zeros(5, "f4")
    TRUNCATED.decode(words_of(TRUNCATED, ONE_TO_FIVE)[1:3], out[1:3])
    assert out.tolist() == [0, 2, 3, 0, 0]


def test_b4_a_slice_of_another_length_is_refused():
    words = words_of(TRUNCATED, ONE_TO_FIVE)
    out = np.zeros(5, "f4")
    with pytest.raises(ValueError, match=r"shape \(2,\).*shape \(3,\)"):
        TRUNCATED.decode(words[1:4], out[1:3])
    assert not out.any()


def test_b5_b6_sums_are_of_decoded_numbers():
    """In float32: their sums are truncated again at every addition, ours are not."""
    total = through(TRUNCATED, ONE_TO_FIVE) + through(TRUNCATED, ONE_TO_FIVE + 1)
    assert total.tolist() == [3, 5, 7, 9, 11]
    total = through(TRUNCATED, ONE_TO_FIVE)
    total[1:3] += through(TRUNCATED, np.array([3, 4], "f4"))
    assert total.tolist() == [1, 5, 7, 4, 5]
    assert sum([through(TRUNCATED, np.ones(1, "f4"))] * 10, np.float32(256)) == 266
    eight = sum(through(TRUNCATED, np.full(1, 0.1, "f4")) for _ in range(8))
    assert float(eight[0]) / 8 == 0.099609375


def test_truncation_keeps_the_sign_and_nan():
    bits = np.array([0xBF9FFFFF, 0x7F800001, 0xFF800001, 0x80000001], "u4")
    out = through(TRUNCATED, bits.view("f4"))
    assert out.view("u4").tolist() == [0xBF9F0000, 0x7FC00000, 0xFFC00000, 0x80000000]


# -- a user's own ---------------------------------------------------------------------


class Sign(codecs.Codec):
    """One bit for each number, and their mean size: ten lines."""

    feedback = True

    def n_words(self, n):
        return 8 + (n + 7) // 8

    def encode(self, array, words):
        words[:8].view("f8")[0] = np.abs(array).mean()
        words[8:] = np.packbits(array >= 0)

    def decode(self, words, out):
        size, signs = words[:8].view("f8")[0], np.unpackbits(words[8:])
        out[:] = np.where(signs[: len(out)], size, -size)


def test_what_is_left_over_is_what_the_words_do_not_say():
    codec = Sign()
    given, before = np.array([3.0, -1.0, 2.0]), np.array([0.5, 0.5, -0.5])
    kept_before = before.copy()
    made = codec.encode_pieces(given, [(0, 2), (2, 3)], before)
    assert [len(words) for words in made.words] == [9, 9]
    # Pieces of 3.5, -0.5 and of 1.5.
    np.testing.assert_array_equal(made.residual, [1.5, 1.5, 0.0])
    np.testing.assert_array_equal(before, kept_before)
    again = codec.encode_pieces(given, [(0, 2), (2, 3)], before)
    assert [w.tobytes() for w in again.words] == [w.tobytes() for w in made.words]


def leave(*_):
    sys.exit(3)


def stop(*_):
    raise KeyError("no")


#: What a codec does wrong, and what is said of it.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "encode raises": ({"encode": stop}, r"encode of codec='Bad' raised KeyError: 'no'"),
    "decode raises": ({"decode": stop}, r"decode of codec='Bad' raised KeyError"),
    "encode exits": ({"encode": leave}, r"encode of codec='Bad' called sys.exit\(3\)"),
    "decode exits": ({"decode": leave}, r"decode of codec='Bad' called sys.exit\(3\)"),
    "n_words exits": ({"n_words": leave}, r"n_words of codec='Bad' called sys.exit"),
    "negative": ({"n_words": lambda *_: -1}, r"n_words\(3\) of codec='Bad' is -1"),
    "half a word": ({"n_words": lambda *_: 1.5}, "is 1.5; return a number of words"),
    "too few words": ({"n_words": lambda *_: 2}, "decode .* could not broadcast"),
    "another length": (
        {"decode": lambda self, words, out: out.__setitem__(slice(None), np.ones(4))},
        r"decode of codec='Bad' raised ValueError: could not broadcast.*\(4,\)",
    ),
    "returns them": (
        {"decode": lambda self, words, out: np.ones(4)},
        r"decode of codec='Bad' returned ndarray of shape \(4,\) for 3 numbers; fill",
    ),
    "writes the gradient": (
        {"encode": lambda self, array, words: array.fill(0)},
        "encode of codec='Bad' raised ValueError: .*read-only",
    ),
    "no methods": (
        {"n_words": codecs.Codec.n_words},
        "n_words of codec='Bad' raised NotImplementedError",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_codec_that_does_something_else_is_refused(case):
    does, said = WRONG[case]

    class Plain(codecs.Codec):
        def n_words(self, n):
            return n

        def encode(self, array, words):
            words[:] = 1

        def decode(self, words, out):
            out[:] = words

    bad = type("Bad", (Plain,), does)()
    given = np.ones(3)
    with pytest.raises(PushRejectedError, match=f"(?s){said}"):
        bad.encode_pieces(given, [(0, 3)])
    assert given.tolist() == [1, 1, 1]


def test_what_a_codec_makes_infinite_is_told():
    class Large(Sign):
        def decode(self, words, out):
            out[-1] = np.inf

    assert not Large().encode_pieces(np.ones(3), [(0, 3)]).finite
    assert Sign().encode_pieces(np.ones(3), [(0, 3)]).finite


@pytest.mark.parametrize(
    ("make", "kind", "match"),
    [
        (lambda: codecs.Int8(0), ValueError, "block is at least 1"),
        (lambda: codecs.Int8(10**30), ValueError, "at most the 140,737,488,355,328"),
        (lambda: codecs.Int8(True), TypeError, "block is an int, found True"),
        (lambda: codecs.TwoBit(10**400), ValueError, "threshold is above 0 and finite"),
        (lambda: codecs.TopK(threshold=0), ValueError, "threshold is above 0"),
    ],
)
def test_numbers_that_cannot_be_are_refused_when_it_is_made(make, kind, match):
    with pytest.raises(kind, match=match):
        make()


def test_a_block_may_be_as_large_as_all():
    """Also one in a number of NumPy's; it is one scale for all of the parameter."""
    blocks: list[Any] = [2**47, np.int64(2**40)]
    for block in blocks:
        codec = codecs.Int8(block)
        given, out = np.linspace(-1, 1, 1000), np.empty(1000)
        words = np.empty(codec.n_words(1000), codec.dtype)
        assert words.nbytes == 1004
        codec.encode(given, words)
        codec.decode(words, out)
        np.testing.assert_allclose(out, given, atol=1 / 254)


# -- what they are called -------------------------------------------------------------


def test_names_of_messages_say_which_codec_it_is():
    one, two = codecs.Float16(), codecs.BFloat16(truncate=True)
    assert codecs.name_of(one, b"x") == "fp16"
    assert codecs.name_of(two, b"x") == "bf16-truncated"
    assert codecs.named("fp16") == one
    assert codecs.named("bf16-truncated") == two

    # Those of users, and of classes that only look like ours, by what they are.
    class Float16(codecs.Float16):
        pass

    for own in (Sign(), Float16()):
        assert not codecs.is_plain(own)
        assert codecs.name_of(own, b"x") != codecs.name_of(own, b"y")
    with pytest.raises(ValueError, match=r"'Sign:1' is not known here"):
        codecs.named("Sign:1")


def test_those_used_last_stay_known():
    codecs.keep("first", Sign())
    for k in range(300):
        codecs.keep(f"test:{k}", Sign())
        codecs.named("first")
    codecs.named("test:299")
    with pytest.raises(ValueError, match="not known here"):
        codecs.named("test:0")


@pytest.mark.parametrize(
    "codec", [codecs.BFloat16(), TRUNCATED, codecs.Float16(), Sign()]
)
def test_codecs_are_pickled(codec):
    again = pickle.loads(pickle.dumps(codec))
    given = np.array([1.0, -2.5])
    np.testing.assert_array_equal(through(codec, given), through(again, given))


def test_words_of_a_dtype_that_does_not_travel_are_refused():
    class Objects(Sign):
        dtype = "object"

    with pytest.raises(ValueError, match="words of codec='Objects' are 'object'"):
        codecs.choose(Objects())
    with pytest.raises(TypeError, match="truncate is True or False, found 1"):
        codecs.BFloat16(truncate=1)  # type: ignore[arg-type]  # what is tested
