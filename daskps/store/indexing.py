"""Which rows an index of a parameter needs, and what to take of those."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from daskps.typing import Array


def split_index(index: Any, shape: tuple[int, ...]) -> tuple[int, int, Any]:
    """Split an index into the rows to read and what to take of those.

    Parameters
    ----------
    index : int, slice, Ellipsis or tuple
        Basic index; anything else raises.
    shape : tuple of int
        Shape it applies to; without axes it has one row.

    Returns
    -------
    low, high, inner
        The smallest run of rows in which all are, and the index to apply to it.

    Raises
    ------
    IndexError
        As NumPy does, for indices out of range or too many.
    TypeError
        For an index that is not basic.
    """
    parts = index if isinstance(index, tuple) else (index,)
    _check_basic(parts)
    # NumPy's own errors, without the values; a broadcast view takes no memory.
    np.broadcast_to(np.empty(()), shape)[index]
    if not shape:
        return 0, 1, (0, *parts)
    if not parts or parts[0] is Ellipsis or parts[0] is None:
        return 0, shape[0], parts
    first, rest = parts[0], parts[1:]
    if not isinstance(first, slice):
        row = int(first) % shape[0]
        return row, row + 1, (0, *rest)
    rows = range(shape[0])[first]
    if not rows:
        return 0, 0, (first, *rest)
    low, high = min(rows[0], rows[-1]), max(rows[0], rows[-1]) + 1
    return low, high, (slice(rows[0] - low, None, rows.step), *rest)


def named_rows(index: Any, shape: tuple[int, ...]) -> tuple[Array, Any] | None:
    """Return the rows that an array of ints or a mask names.

    Parameters
    ----------
    index : array_like of int or bool, or tuple that begins with one
        What follows in a tuple is basic.
    shape : tuple of int
        Shape it applies to.

    Returns
    -------
    (ndarray of int64, index) or None
        Each row once, ascending, and the index to apply to these; None for an index
        without an array.

    Raises
    ------
    IndexError
        As NumPy does, for rows out of range, masks of another shape, and arrays of other
        dtypes.
    TypeError
        For arrays behind the first axis.

    Examples
    --------
    >>> named_rows([3, 1, 1], (4, 2))
    (array([1, 3]), (array([1, 0, 0]),))
    """
    parts = index if isinstance(index, tuple) else (index,)
    if not parts or not isinstance(parts[0], list | np.ndarray):
        return None
    first, rest = np.asarray(parts[0]), parts[1:]
    if first.dtype == bool and not first.ndim:  # as True is, no mask of rows
        _check_basic(parts)
    if not first.size and isinstance(parts[0], list):
        first = first.astype(np.intp)
    _check_basic(rest)
    # NumPy's own errors, of a byte for each element of the result.
    np.broadcast_to(np.empty((), bool), shape)[(first, *rest)]
    arrays = first.nonzero() if first.dtype == bool else (first,)
    rows = np.where(arrays[0] < 0, arrays[0] + shape[0], arrays[0]).astype(np.int64)
    distinct, inverse = np.unique(rows, return_inverse=True)
    return distinct, (inverse.reshape(rows.shape), *arrays[1:], *rest)


def _check_basic(parts: tuple[Any, ...]) -> None:
    for part in parts:
        # NumPy takes a bool for a mask, Python for an int.
        basic = (int, np.integer, slice, type(Ellipsis), type(None))
        if isinstance(part, bool) or not isinstance(part, basic):
            raise TypeError(
                f"a parameter is indexed by int and slice, and on its first axis by an "
                f"array of ints or a mask, found {part!r:.60}; pull() it and index the "
                f"result for anything else"
            )


def runs_of_rows(rows: Array) -> list[tuple[int, int]]:
    """Return ascending numbers as runs [start, stop).

    Examples
    --------
    >>> runs_of_rows(np.array([1, 2, 5]))
    [(1, 3), (5, 6)]
    """
    if not len(rows):
        return []
    ends = np.flatnonzero(np.diff(rows) > 1)
    starts = rows[[0, *(ends + 1)]].tolist()
    stops = (rows[[*ends, len(rows) - 1]] + 1).tolist()
    return [*zip(starts, stops, strict=True)]
