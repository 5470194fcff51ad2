"""Rows of a table, copied out of it and into it, whatever their dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from daskps.kernels.compiled import module_of
from daskps.kernels.source import MOVES_SOURCE

if TYPE_CHECKING:
    from daskps.typing import Array

#: Instead of positions: every one, in order.
NOWHERE = np.empty(0, np.int64)
_ID, _BYTE = np.dtype(np.int64), np.dtype(np.uint8)


def gather(
    w: Array,
    ids: Array,
    out: Array,
    at: Array | None = None,
    *,
    first: int = 0,
    cache_dir: str | None = None,
) -> None:
    """Copy rows of a table to where somebody wants them.

    Parameters
    ----------
    w : ndarray, shape (n_rows, dim)
        The table, contiguous.
    ids : ndarray, shape (k,), int64
        Row `ids[i]` of all rows is `w[ids[i] - first]`; contiguous, in any order, and
        they may repeat.
    out : ndarray, shape (n, dim), dtype of `w`
        Contiguous and writable.
    at : ndarray, shape (k,), int64, optional
        Row i goes to `out[at[i]]`; to `out[i]` without it.
    first : int
        Id of the first row of `w`.
    cache_dir : str, optional
        Where the compiled loop is kept, as in `build`.

    Raises
    ------
    ValueError
        If an array is not as described, or an index is outside. Nothing outside is
        read or written, but rows of `out` may have been.
    """
    _run("gather", (w, ids, out, at), first, cache_dir)


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


def scatter(
    w: Array,
    ids: Array,
    rows: Array,
    at: Array | None = None,
    *,
    first: int = 0,
    cache_dir: str | None = None,
) -> None:
    """Copy rows into a table; of an id that repeats, the last one stays.

    Parameters
    ----------
    w : ndarray, shape (n_rows, dim)
        The table, contiguous and writable.
    ids : ndarray, shape (k,), int64
        As in `gather`.
    rows : ndarray, shape (n, dim), dtype of `w`
        Contiguous.
    at : ndarray, shape (k,), int64, optional
        Row i is `rows[at[i]]`; `rows[i]` without it.
    first : int
        Id of the first row of `w`.
    cache_dir : str, optional
        Where the compiled loop is kept, as in `build`.

    Raises
    ------
    ValueError
        If an array is not as described, or an index is outside. Nothing outside is
        read or written, but rows of `w` may have been.
    """
    _run("scatter", (w, ids, rows, at), first, cache_dir)


def _run(
    name: str,
    arrays: tuple[Array, Array, Array, Array | None],
    first: int,
    kept: str | None,
) -> None:
    w, ids, rows, at = arrays
    check_rows(w, rows)
    if not (rows if name == "gather" else w).flags.writeable:
        raise ValueError("rows cannot be written to a read-only array; use np.empty")
    n = len(ids)
    for a in (ids,) if at is None else (ids, at):
        if a.dtype != _ID or a.shape != (n,) or not a.flags.c_contiguous:
            raise ValueError(
                f"expected {n} contiguous int64, got {a.dtype} of shape {a.shape}"
            )
    if not n:
        return
    loop = module_of(MOVES_SOURCE, kept).function(name)
    places = NOWHERE if at is None else at
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
        if a.ndim != 2 or not a.flags.c_contiguous:
            raise ValueError(
                f"expected a contiguous array of shape (rows, dim), got {a.shape} with "
                f"strides {a.strides}"
            )
    if w.dtype != rows.dtype or w.shape[1] != rows.shape[1]:
        raise ValueError(
            f"expected rows of {w.shape[1]} {w.dtype}, got {rows.dtype} of shape "
            f"{rows.shape}"
        )


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
