"""Chunks of an array: each a contiguous range of its elements in C order.

So leading axes are cut into single steps, one axis into about equal parts, and what
follows stays whole. Where the cuts are depends on shape and size of an element alone, and
not on shards: the files of one state are the same on any number of these.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Bytes of a chunk, at most; only an element is never cut.
CHUNK_NBYTES: Final = 16 * 2**20


class GridChunk(NamedTuple):
    """One chunk of an array: elements [start, stop) in C order."""

    #: Its place along each axis.
    place: tuple[int, ...]
    start: int
    stop: int


def chunk_shape(
    shape: tuple[int, ...], itemsize: int, most_rows: int | None = None
) -> tuple[int, ...]:
    """Return the shape of the chunks of an array.

    Parameters
    ----------
    shape : tuple of int
        Of the array; lengths may be 0.
    itemsize : int
        Bytes of an element.
    most_rows : int, optional
        How much of the first axis a chunk has at most.

    Returns
    -------
    tuple of int
        All at least 1. A chunk has no more than :data:`CHUNK_NBYTES`, and where an axis
        is cut no part is shorter than others by more than their number.
    """
    chunk, most = [max(1, n) for n in shape], max(1, CHUNK_NBYTES // itemsize)
    for axis in reversed(range(len(shape))):
        limit = most if axis or most_rows is None else min(most, most_rows)
        if chunk[axis] > limit:
            n_parts = -(-chunk[axis] // limit)
            chunk[axis] = -(-chunk[axis] // n_parts)
            chunk[:axis] = [1] * axis
            break
        most //= chunk[axis]
    return tuple(chunk)


class Grid(NamedTuple):
    """An array and how it is cut, as :func:`chunk_shape` does."""

    shape: tuple[int, ...]
    chunk: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def chunk_size(self) -> int:
        """Number of elements of a chunk, with what fills it up."""
        return math.prod(self.chunk)

    @property
    def n_chunks(self) -> int:
        """How many chunks there are: none of an array without elements."""
        if not self.size:
            return 0
        pairs = zip(self.shape, self.chunk, strict=True)
        return math.prod(-(-n // c) for n, c in pairs)

    def chunks(self, start: int = 0, stop: int | None = None) -> Iterator[GridChunk]:
        """Give the chunks that have any of the elements [start, stop), in order."""
        stop = self.size if stop is None else stop
        if start >= stop:
            return
        axis, block, inner = self._cut()
        # Elements of a chunk that none of its neighbours has, and chunks of a block.
        step = self.chunk[axis] * inner if self.shape else 1
        of_block = -(-block // step)
        first, last = (
            e // block * of_block + e % block // step for e in (start, stop - 1)
        )
        for number in range(first, last + 1):
            lead, part = divmod(number, of_block)
            at = lead * block + part * step
            end = min(at + step, (lead + 1) * block)
            yield GridChunk(self._place(axis, lead, part), at, end)

    def _cut(self) -> tuple[int, int, int]:
        """Return which axis is cut, and the elements of it and of one step along it."""
        if not self.shape:
            return 0, 1, 1
        pairs = enumerate(zip(self.shape, self.chunk, strict=True))
        axis = max((i for i, (n, c) in pairs if n != c), default=0)
        inner = math.prod(self.shape[axis + 1 :])
        return axis, self.shape[axis] * inner, inner

    def _place(self, axis: int, lead: int, part: int) -> tuple[int, ...]:
        place = [0] * len(self.shape)
        if not place:
            return ()
        place[axis] = part
        for before in reversed(range(axis)):
            lead, place[before] = divmod(lead, self.shape[before])
        return tuple(place)
