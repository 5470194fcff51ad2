"""Ids of text: the same wherever it is held, and for ever."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.layout.text_ids import hash_ids

pd = pytest.importorskip("pandas")
pa = pytest.importorskip("pyarrow")

WORDS = ["cat", "dog", "", "Äquator", "cat", "\U0001f40d"]


def expected(text: str, seed: int = 0) -> int:
    digest = hashlib.blake2b(
        text.encode(), digest_size=8, salt=seed.to_bytes(8, "little")
    ).digest()
    return int.from_bytes(digest, "little", signed=True)


def test_ids_of_text_stay_what_they_are() -> None:
    """Rows were stored under them."""
    assert hash_ids(["cat", "dog"]).tolist() == [
        3429664268601861939,
        -6945572266024926151,
    ]
    assert hash_ids("cat", seed=1) == -4015023619095074798
    assert hash_ids(b"cat", seed=2**64 - 1) == expected("cat", 2**64 - 1)


@given(st.lists(st.text(st.characters(codec="utf-8")), max_size=9), st.integers(0, 9))
def test_ids_are_digests_of_the_bytes(texts: list[str], seed: int) -> None:
    wanted = [expected(text, seed) for text in texts]
    found = hash_ids(texts, seed=seed)
    assert found.dtype == np.int64
    assert found.tolist() == wanted
    # With zeros at its end too, which NumPy's bytes do not keep.
    assert hash_ids([text.encode() for text in texts], seed=seed).tolist() == wanted


@pytest.mark.parametrize(
    "held",
    [
        tuple(WORDS),
        np.array(WORDS),
        np.array(WORDS, object),
        np.array([word.encode() for word in WORDS]),
        pd.Series(WORDS),
        pd.Index(WORDS),
        pd.Series(WORDS, dtype="string"),
        pd.Series(WORDS, dtype="category"),
        pd.Series(WORDS, dtype=pd.ArrowDtype(pa.string())),
        pa.array(WORDS),
        pa.chunked_array([WORDS[:2], WORDS[2:]]),
        pa.array(WORDS).dictionary_encode(),
        pa.array([word.encode() for word in WORDS], pa.large_binary()),
    ],
)
def test_text_has_its_ids_wherever_it_is_held(held: Any) -> None:
    assert hash_ids(held).tolist() == [expected(word) for word in WORDS]


def test_ids_have_the_shape_of_the_text() -> None:
    assert hash_ids("cat").shape == ()
    assert hash_ids([]).shape == (0,)
    assert hash_ids(np.array(WORDS).reshape(2, 3)[:, ::2]).tolist() == [
        [expected("cat"), expected("")],
        [expected(WORDS[3]), expected(WORDS[5])],
    ]
    assert hash_ids([WORDS[:3], WORDS[3:]]).shape == (2, 3)
    # Not to be encoded, and yet another one.
    assert hash_ids(["\ud800", "?"])[0] != expected("?")


@pytest.mark.parametrize(
    "held",
    [
        ["cat", None],
        ["cat", 7],
        [["cat"], ["cat", "dog"]],
        np.arange(3),
        np.ma.masked_array(np.array(["cat", "dog"], object), [False, True]),
        pd.Series(["cat", None]),
        pd.Series(["cat", None], dtype="string"),
        pa.array(["cat", None]),
        7,
        None,
    ],
)
def test_what_is_no_text_is_refused(held: Any) -> None:
    with pytest.raises(TypeError, match=r"str and bytes: found|are masked"):
        hash_ids(held)


def test_what_is_not_computed_is_refused() -> None:
    dask_array = pytest.importorskip("dask.array")
    with pytest.raises(TypeError, match="map_partitions"):
        hash_ids(dask_array.from_array(np.array(WORDS)))


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, True, None])
def test_seeds_outside_are_refused(seed: Any) -> None:
    with pytest.raises(ValueError, match="seed must be an int from 0"):
        hash_ids(WORDS, seed=seed)
