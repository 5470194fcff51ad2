"""Memory that a call needs for a moment, used again once no array refers to it.

The system zeroes fresh memory page by page as it is written to, and Dask's nanny has
malloc return every larger array at once (``MALLOC_TRIM_THRESHOLD_``): sums of a few
thousand rows took five times as long in a worker as elsewhere.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from daskps.typing import Array

#: Bytes of what is kept: smaller arrays come from malloc's own lists, larger ones would
#: take too much.
SMALLEST, LARGEST = 2**16, 2**23
#: How many of one size are kept, and of how many bytes together where that is fewer.
_MOST, _MOST_NBYTES = 4, 2**22

#: By the bits of their length, which is a power of two. Operations of a deque are atomic:
#: of two threads one gets what is there.
_kept: dict[int, deque[Array]] = {
    bits: deque() for bits in range((SMALLEST - 1).bit_length(), LARGEST.bit_length())
}


def empty(n: int, dtype: Any) -> Array:
    """Return an array like ``np.empty(n, dtype)``.

    Its memory is given to another one when the last view of it is gone.

    Parameters
    ----------
    n : int
        Its length.
    dtype : dtype or str
        Of its elements.

    Returns
    -------
    ndarray, shape (n,)
        Its elements have any values.
    """
    dtype = np.dtype(dtype)
    nbytes = n * dtype.itemsize
    if not SMALLEST <= nbytes <= LARGEST:
        return np.empty(n, dtype)
    bits = (nbytes - 1).bit_length()
    kept = _kept[bits]
    for _ in range(len(kept)):
        memory, count = _first_of(kept)
        if memory is not None and count == _ALONE:
            found: Array = memory[:nbytes].view(dtype)
            kept.append(memory)  # after that: the next thread to take it sees the view
            return found
        if memory is not None:
            kept.append(memory)
    memory = np.empty(1 << bits, np.uint8)
    found = memory[:nbytes].view(dtype)
    if len(kept) < max(1, min(_MOST, _MOST_NBYTES >> bits)):
        kept.append(memory)
    return found


def zeros(n: int, dtype: Any) -> Array:
    """Return the same, of zeros; see :func:`empty`."""
    found = empty(n, dtype)
    found.fill(0)
    return found


def _first_of(kept: deque[Array]) -> tuple[Array | None, int]:
    """Take the first one out; return it, and how many references there are to it."""
    try:
        memory = kept.popleft()
    except IndexError:  # another thread was there
        return None, 0
    return memory, sys.getrefcount(memory)


#: Of memory that nobody has a view of: what that is differs between versions of Python.
_, _ALONE = _first_of(deque([np.empty(0)]))
