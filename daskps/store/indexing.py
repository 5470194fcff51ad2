"""Which rows an index of a parameter needs, and what to take of those."""

from __future__ import annotations

from typing import Any

import numpy as np


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
    for part in parts:
        # NumPy takes a bool for a mask, Python for an int.
        basic = (int, np.integer, slice, type(Ellipsis), type(None))
        if isinstance(part, bool) or not isinstance(part, basic):
            raise TypeError(
                f"a parameter is indexed by int and slice, found {part!r}; pull() it "
                f"and index the result for anything else"
            )
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
