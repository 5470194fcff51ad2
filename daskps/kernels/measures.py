"""Sums and extremes of arrays that are cut anywhere: the same bits however they are.

Elements form blocks of a fixed length, counted from the first one. The result of a
block is worked out from its elements alone, and the result of all from those of the
blocks, in their order. So it matters neither where the elements lie, nor which process
adds up a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from daskps.typing import Array

#: Elements of a block: of one that lies in two places all have to travel.
BLOCK: Final = 4096
KINDS: Final = ("sum", "mean", "min", "max", "norm", "dot")
#: Blocks that are converted at a time.
_AT_ONCE = 64


def n_blocks(n: int) -> int:
    """Return how many blocks there are of so many elements; the last may be short."""
    return -(-n // BLOCK)


def whole_blocks(start: int, stop: int, n: int) -> tuple[int, int]:
    """Return which blocks lie in [start, stop) of `n` elements: the first, and their end.

    Examples
    --------
    >>> whole_blocks(1, 9000, 9000), whole_blocks(1, 9000, 9001), whole_blocks(1, 9, 99)
    ((1, 3), (1, 2), (1, 1))
    """
    first = n_blocks(start)
    end = n_blocks(stop) if stop == n else stop // BLOCK
    return first, max(first, end)


def computed_in(kind: str, dtype: Any, other: Any = None) -> np.dtype[Any]:
    """Return the dtype that elements of a dtype are added up or compared in."""
    if kind in ("min", "max"):
        same: np.dtype[Any] = np.dtype(dtype)
        return same
    of = np.result_type(dtype, dtype if other is None else other).kind
    if kind in ("mean", "norm") or of == "f":
        return np.dtype("float64")
    return np.dtype("uint64" if of == "u" else "int64")


def by_block(kind: str, elements: Array, other: Array | None = None) -> Array:
    """Return what each block of elements comes to.

    Parameters
    ----------
    kind : str
        One of `KINDS`.
    elements : ndarray, shape (n,)
        Beginning with a block's first one.
    other : ndarray, shape (n,), optional
        Of a "dot" what they are multiplied by.

    Returns
    -------
    ndarray, shape (n_blocks(n),)
        In the dtype of :func:`computed_in`.
    """
    n, dtype = len(elements), None if other is None else other.dtype
    found = np.empty(n_blocks(n), computed_in(kind, elements.dtype, dtype))
    for first in range(0, len(found), _AT_ONCE):
        part = slice(first * BLOCK, (first + _AT_ONCE) * BLOCK)
        a = elements[part]
        b = None if other is None else other[part]
        full = len(a) // BLOCK
        at, whole = first + full, full * BLOCK
        rows = None if b is None else b[:whole].reshape(full, BLOCK)
        found[first:at] = _reduced(
            kind, a[:whole].reshape(full, BLOCK), rows, found.dtype
        )
        if whole < len(a):
            rest = None if b is None else b[None, whole:]
            found[at] = _reduced(kind, a[None, whole:], rest, found.dtype)[0]
    return found


def _reduced(kind: str, a: Array, b: Array | None, dtype: np.dtype[Any]) -> Array:
    """Return what each row comes to."""
    if kind in ("min", "max"):
        least: Array = (np.minimum if kind == "min" else np.maximum).reduce(a, axis=1)
        return least
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = a.astype(dtype)
        if kind == "norm":
            numbers *= numbers
        elif b is not None:
            numbers *= b.astype(dtype)
        found: Array = np.add.reduce(numbers, axis=1)
    return found


def total(kind: str, blocks: Array, n: int, dtype: Any, *, by: Any = None) -> Any:
    """Return what all blocks come to.

    Parameters
    ----------
    kind : str
        One of `KINDS`.
    blocks : ndarray, shape (n_blocks(n),)
        From :func:`by_block`.
    n : int
        Number of elements.
    dtype, by : dtype
        Of the elements, and of what they are multiplied by.

    Returns
    -------
    numpy scalar
        Of the dtype that NumPy has for it.

    Raises
    ------
    ValueError
        NumPy's own, for the least or largest of no elements.
    """
    if not n and kind in ("mean", "min", "max"):
        return getattr(np, kind)(np.empty(0, dtype))
    with np.errstate(over="ignore", invalid="ignore"):
        if kind in ("min", "max"):
            return (np.minimum if kind == "min" else np.maximum).reduce(blocks)
        found = np.add.reduce(blocks)
        if kind == "mean":
            found /= n
        elif kind == "norm":
            found = np.sqrt(found)
        kept = np.dtype(dtype) if kind != "dot" else np.result_type(dtype, by)
        if kind != "dot" and kept.kind != "f":
            return found
        return found.astype(kept)
