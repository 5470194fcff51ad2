"""Rounding to bfloat16 and back: the upper half of a float32, as an unsigned word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from daskps.kernels.compiled import module_of
from daskps.kernels.source import BFLOAT16_SOURCE

if TYPE_CHECKING:
    from daskps.typing import Array

#: What holds one number.
WORD: Final = "uint16"
#: Elements that float64 is narrowed to or widened from at a time.
_BLOCK = 16_384


def encode(a: Array, out: Array, *, cache_dir: str | None = None) -> bool:
    """Round to the nearest bfloat16, of two equally near ones to the even one.

    Parameters
    ----------
    a : ndarray, float32 or float64, shape (n,)
        Contiguous. float64 is rounded once, not by way of a rounded float32.
    out : ndarray, uint16, shape (n,)
        Takes the words. NaN stays NaN; what is too large becomes infinity.
    cache_dir : str, optional
        Where the compiled loops are kept, as in `build`.

    Returns
    -------
    bool
        True iff every word stands for a finite number.

    Raises
    ------
    TypeError
        For another dtype.
    ValueError
        Where they are no contiguous vectors of the same length, or `out` is read-only.
    """
    _check(a, out, out)
    loop = module_of(BFLOAT16_SOURCE, cache_dir).function("encode")
    if a.dtype == np.float32:
        return bool(loop(a.view(np.uint32), out))
    odd = module_of(BFLOAT16_SOURCE, cache_dir).function("odd")
    finite = True
    narrow = np.empty(min(len(a), _BLOCK), np.float32)
    for start in range(0, len(a), _BLOCK):
        wide = a[start : start + _BLOCK]
        bits = narrow[: len(wide)].view(np.uint32)
        with np.errstate(over="ignore", invalid="ignore"):
            narrow[: len(wide)] = wide
        odd(wide, bits.view(np.float32), bits)
        finite &= bool(loop(bits, out[start : start + _BLOCK]))
    return finite


def decode(words: Array, out: Array, *, cache_dir: str | None = None) -> None:
    """Widen words to floats, which loses nothing.

    Parameters
    ----------
    words : ndarray, uint16, shape (n,)
        Contiguous; what :func:`encode` made.
    out : ndarray, float32 or float64, shape (n,)
        Takes the numbers.
    cache_dir : str, optional
        Where the compiled loops are kept, as in `build`.

    Raises
    ------
    TypeError
        For another dtype.
    ValueError
        Where they are no contiguous vectors of the same length, or `out` is read-only.
    """
    _check(out, words, out)
    loop = module_of(BFLOAT16_SOURCE, cache_dir).function("decode")
    if out.dtype == np.float32:
        loop(words, out.view(np.uint32))
        return
    narrow = np.empty(min(len(words), _BLOCK), np.float32)
    for start in range(0, len(words), _BLOCK):
        part = words[start : start + _BLOCK]
        loop(part, narrow[: len(part)].view(np.uint32))
        with np.errstate(invalid="ignore"):
            out[start : start + _BLOCK] = narrow[: len(part)]


def warm(*, cache_dir: str | None = None) -> None:
    """Compile the loops, so that their first use finds them ready.

    Parameters
    ----------
    cache_dir : str, optional
        Where they are kept, as in `build`.
    """
    for name in ("encode", "odd", "decode"):
        module_of(BFLOAT16_SOURCE, cache_dir).function(name)


def _check(numbers: Array, words: Array, out: Array) -> None:
    """Refuse what the loops, which look at no length, would run out of."""
    if numbers.dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise TypeError(f"no bfloat16 for {numbers.dtype}: use float32 or float64")
    if words.dtype != np.dtype(WORD):
        raise TypeError(f"words of bfloat16 are {WORD}, found {words.dtype}")
    if numbers.ndim != 1 or numbers.shape != words.shape:
        raise ValueError(
            f"bfloat16 goes between vectors of one length, found numbers of shape "
            f"{numbers.shape} and words of shape {words.shape}; use reshape(-1), and "
            f"np.empty(len(numbers), {WORD!r})"
        )
    if not (numbers.flags.c_contiguous and words.flags.c_contiguous):
        raise ValueError("bfloat16 needs contiguous arrays; use np.ascontiguousarray")
    if not out.flags.writeable:
        raise ValueError("bfloat16 cannot write to a read-only array; use np.empty")
