"""Ids of rows for keys that are text: the same in every process, of every version.

pandas and pyarrow are recognised by what their objects have: nothing imports them here.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from daskps.typing import Array

_NBYTES = 8


def hash_ids(strings: Any, *, seed: int = 0) -> Array:
    """Return an id for each string, with which rows of an unbounded table are named.

    It is BLAKE2b (RFC 7693) with a digest of 8 bytes of the text in UTF-8, read as
    int64 in little-endian order, and with the seed, in 8 bytes of that order, as its
    salt. So an id is the same in all processes, on all processors and in all versions.
    Of a million different strings two have the same id once in 37 million times, of a
    billion once in 37 times.

    Parameters
    ----------
    strings : str, bytes or array_like of them
        A list, an array of dtype str, bytes or object, a pandas Index or Series, a
        pyarrow array; of any shape. Text and its bytes in UTF-8 have the same id.
    seed : int, default 0
        At least 0 and below 2**64. With another one all ids are others.

    Returns
    -------
    ndarray of int64
        Of the shape of `strings`.

    Raises
    ------
    TypeError
        If one is neither str nor bytes, as missing values and numbers are.
    ValueError
        If the seed is outside.

    Examples
    --------
    >>> daskps.hash_ids(["cat", "dog", "cat"])
    array([ 3429664268601861939, -6945572266024926151,  3429664268601861939])
    >>> daskps.hash_ids("cat", seed=1)
    array(-4015023619095074798)
    """
    if type(seed) is not int or not 0 <= seed < 1 << 64:
        raise ValueError(f"seed must be an int from 0 to 2**64 - 1, found {seed!r:.60}")
    flat, shape = _flat(strings)
    salt = seed.to_bytes(_NBYTES, "little")
    try:
        digests = b"".join(_digests(flat, salt))
    except TypeError as error:
        raise TypeError(
            f"hash_ids takes str and bytes: {_first_other(flat)}"
        ) from error
    return np.frombuffer(digests, "<i8").astype(np.int64).reshape(shape)


def _digests(strings: Iterable[Any], salt: bytes) -> Iterable[bytes]:
    salted = hashlib.blake2b(digest_size=_NBYTES, salt=salt, usedforsecurity=False)
    for text in strings:
        # To copy one takes half as long as to make one.
        digest = salted.copy()
        digest.update(
            text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        )
        yield digest.digest()


def _flat(given: Any) -> tuple[list[Any], tuple[int, ...]]:
    """Return what was given in a list, and its shape."""
    if isinstance(given, str | bytes):
        return [given], ()
    if getattr(given, "__dask_graph__", None) is not None:
        raise TypeError(
            "hash_ids takes what is computed; use map_partitions or map_blocks with it"
        )
    if hasattr(given, "to_pylist"):
        found = given.to_pylist()
        return found, (len(found),)
    if hasattr(given, "to_numpy") and not isinstance(given, np.ndarray):
        given = given.to_numpy(dtype=object)
    if not isinstance(given, np.ndarray):
        # Strings as they are: an array of bytes would cut zeros off their ends.
        given = np.array(given, dtype=object)
    if isinstance(given, np.ma.MaskedArray) and np.ma.is_masked(given):
        raise TypeError("some strings are masked; use compressed()")
    return given.reshape(-1).tolist(), given.shape


def _first_other(strings: list[Any]) -> str:
    """Say what is no text, and where."""
    for k, text in enumerate(strings):
        if not isinstance(text, str | bytes):
            return (
                f"found {text!r:.60} at position {k} of {len(strings)}; leave missing "
                f"values out, and use numbers as ids themselves"
            )
    return "found something else"
