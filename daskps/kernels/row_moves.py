"""Rows of a table, copied out of it and into it, whatever their dtype."""
# ruff: noqa: PLR0917  (table, ids, rows, and where they are)

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from daskps.kernels.compiled import module_of
from daskps.kernels.inputs import ID, check_input
from daskps.kernels.rows import MOVES_SOURCE

if TYPE_CHECKING:
    from daskps.typing import Array

#: Instead of positions: every one, in order.
NOWHERE = np.empty(0, np.int64)
_BYTE = np.dtype(np.uint8)


def _move(
    name: str,
    w: Array,
    ids: Array,
    rows: Array,
    at: Array | None = None,
    *,
    first: int = 0,
    cache_dir: str | None = None,
) -> None:
    """Copy rows of a table to where somebody wants them, or from there into it.

    Parameters
    ----------
    name : str
        "gather", or "scatter": of an id that repeats, the last one stays then.
    w : ndarray, shape (n_rows, dim)
        The table, contiguous.
    ids : ndarray, shape (k,), int64
        Row `ids[i]` of all rows is `w[ids[i] - first]`; contiguous, in any order, and
        they may repeat.
    rows : ndarray, shape (n, dim), dtype of `w`
        Contiguous; like the table writable where it is written.
    at : ndarray, shape (k,), int64, optional
        Row i goes to `rows[at[i]]`, or comes from there; `rows[i]` without it.
    first : int
        Id of the first row of `w`.
    cache_dir : str, optional
        Where the compiled loop is kept, as in `build`.

    Raises
    ------
    ValueError
        If an array is not as described, or an index is outside. Nothing outside is
        read or written, but rows may have been.
    """
    check_rows(w, rows)
    if not (rows if name == "gather" else w).flags.writeable:
        raise ValueError("rows cannot be written to a read-only array; use np.empty")
    n = len(ids)
    places = NOWHERE if at is None else at
    for a in (ids, places) if places is at else (ids,):
        check_input(a, ID, (n,))
    if not n:
        return
    loop = module_of(MOVES_SOURCE, cache_dir).function(name)
    done = loop(as_bytes(w), first, ids, places, as_bytes(rows))
    if done < n:
        raise ValueError(
            f"id {ids[done]} at position {done} is no row from {first} to "
            f"{first + len(w) - 1}"
            + (
                ""
                if at is None
                else f", or its place {at[done]} is not below {len(rows)}"
            )
        )


gather = functools.partial(_move, "gather")
scatter = functools.partial(_move, "scatter")


class FixedGather:
    """`gather` from a table that stays where it is: what that needs is made once.

    Parameters
    ----------
    w : ndarray, shape (n_rows, dim)
        The table, contiguous.
    first : int
        Id of its first row.
    cache_dir : str, optional
        Where the compiled loop is kept, as in `build`.
    """

    __slots__ = ("_dim", "_dtype", "_first", "_loop", "_rows")

    def __init__(
        self, w: Array, first: int = 0, *, cache_dir: str | None = None
    ) -> None:
        check_rows(w, w)
        self._rows, self._first = as_bytes(w), first
        self._dtype, self._dim = w.dtype, w.shape[1]
        self._loop = module_of(MOVES_SOURCE, cache_dir).function("gather")

    def __call__(self, ids: Array, out: Array, at: Array | None = None) -> bool:
        """Copy rows out; return whether all indices are inside.

        Parameters
        ----------
        ids : ndarray, shape (k,), int64
            Contiguous.
        out : ndarray, shape (n, dim), dtype of the table
            Contiguous and writable. Where an id is outside nothing is written.
        at : ndarray, shape (k,), int64, optional
            As in `gather`.

        Returns
        -------
        bool
            False where an id or a place is outside.

        Raises
        ------
        ValueError, TypeError
            If an array is not as described; nothing was written.
        """
        n = len(ids)
        if out.dtype != self._dtype or out.shape[1:] != (self._dim,):
            raise ValueError(
                f"expected rows of {self._dim} {self._dtype}, got {out.dtype} of shape "
                f"{out.shape}"
            )
        if at is not None and at.shape != (n,):
            raise ValueError(f"expected {n} places, got {at.shape}")
        if not n:
            return True
        # The compiled function refuses arrays that are wrong in other ways.
        places = NOWHERE if at is None else at
        into = out.view(_BYTE) if self._dim else as_bytes(out)
        done: int = self._loop(self._rows, self._first, ids, places, into)
        return done == n


def check_rows(w: Array, rows: Array) -> None:
    """Refuse two arrays between which no rows can be copied.

    Parameters
    ----------
    w, rows : ndarray, shape (n, dim)
        Both contiguous, of one dtype.

    Raises
    ------
    ValueError
        If they are not.
    """
    for a in (w, rows):
        check_input(a, w.dtype, (len(a), *w.shape[-1:]))


def as_bytes(a: Array) -> Array:
    """Return the bytes of rows, as rows of uint8.

    Parameters
    ----------
    a : ndarray, shape (n, dim)
        Contiguous.

    Returns
    -------
    ndarray, shape (n, nbytes of a row), uint8
        The same memory.
    """
    # NumPy has no such view of rows of nothing.
    return a.view(np.uint8) if a.shape[1] else np.empty(a.shape, np.uint8)
