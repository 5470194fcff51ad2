"""Vectors of float32 or float64, and what travels of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import config
from daskps.codecs import BFloat16
from daskps.errors import PushRejectedError

if TYPE_CHECKING:
    from daskps.typing import Array

_CODEC = BFloat16(truncate=True)


def check_vector(given: Any, what: str, size: int, *, compressed: bool) -> Array:
    """Return a vector of a size, or refuse what is none.

    Raises
    ------
    TypeError, ValueError
        Naming what it is.
    """
    if not isinstance(given, np.ndarray) or given.dtype not in ("f4", "f8"):
        found = getattr(given, "dtype", type(given).__name__)
        raise TypeError(f"{what} is an array of float32 or float64, found {found}")
    if given.dtype == "f8" and not compressed:
        raise TypeError(
            f'{what} is float64, and compress="none" sends float32; give float32, or '
            f'compress="fp16"'
        )
    if given.shape != (size,):
        raise ValueError(f"{what} has shape {given.shape}, not ({size},)")
    return given


def encode(vector: Array, *, compressed: bool) -> Array:
    """Return what travels of a vector, or refuse what is no number.

    Raises
    ------
    PushRejectedError
        For what is not finite, or too large for float32.
    """
    words, finite = vector, bool(np.isfinite(vector).all())
    if compressed:
        flat = np.ascontiguousarray(vector)
        words = np.empty(len(flat), _CODEC.dtype)
        finite = _CODEC.encode(flat, words, cache_dir=config.cache_dir())
    if not finite:
        raise PushRejectedError(
            "there are numbers that are not finite, or too large for float32; nothing "
            "was sent"
        )
    return words


def decode(words: Array, *, compressed: bool) -> Array:
    """Return the float32 that have travelled."""
    if not compressed:
        return words
    found = np.empty(len(words), "f4")
    _CODEC.decode(words, found, cache_dir=config.cache_dir())
    return found
