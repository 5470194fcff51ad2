"""Memory that is used again once nobody looks at it.

Memory that comes fresh from the system is zeroed page by page as it is written to,
which takes several times as long as the copy into it; and Dask's nanny has malloc
return every larger array at once (``MALLOC_TRIM_THRESHOLD_``). Here an array goes back
by itself when the last view of it is gone, whoever held that: a frame on its way out, a
user's function, a traceback. So it never changes under a reader.
"""

from __future__ import annotations

from collections import deque
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.machine.leases import leased
from daskps.layout.arrays import align

if TYPE_CHECKING:
    from daskps.typing import Array

_nbytes_of = attrgetter("nbytes")
#: Smaller arrays come from malloc's own lists, which are faster.
SMALLEST = 65_536
#: Memory is made in whole pages: arrays of nearly one length take each other's place.
_PAGE = 4096
#: Most bytes kept for later, where a worker's memory limit does not say more.
LEAST_LIMIT = 64 * 2**20
#: Share of a worker's memory limit that may be kept for later.
_SHARE = 0.05


class BufferPool:
    """A worker's memory for arrays that do not live long; safe for threads.

    Parameters
    ----------
    limit : int
        Most bytes kept for later.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # Operations of a deque are atomic, and a lease may end anywhere, also in the
        # middle of these methods: a lock could be taken twice.
        self._free: deque[Array] = deque()

    def empty(self, n: int, dtype: Any) -> Array:
        """Return an array like ``np.empty(n, dtype)``."""
        dtype = np.dtype(dtype)
        nbytes = n * dtype.itemsize
        if nbytes < SMALLEST:
            return np.empty(n, dtype)
        length = align(nbytes, _PAGE)
        memory = self._take(length)
        if memory is None:
            memory = np.empty(length, np.uint8)
        return leased(memory, self.give_back, memory)[:nbytes].view(dtype)

    def _take(self, nbytes: int) -> Array | None:
        for _ in range(len(self._free)):
            try:
                memory = self._free.popleft()
            except IndexError:
                break
            if memory.nbytes == nbytes:
                return memory
            self._free.append(memory)
        return None

    def give_back(self, memory: Array) -> None:
        """Keep memory for later, the oldest goes where that is too much."""
        self._free.append(memory)
        while self.nbytes > self.limit:
            try:
                self._free.popleft()
            except IndexError:
                break

    @property
    def nbytes(self) -> int:
        """Bytes kept for later."""
        return sum(map(_nbytes_of, self._free.copy()))

    def clear(self) -> None:
        """Keep nothing."""
        self._free.clear()


def limit_of(memory_limit: int | None) -> int:
    """Return what may be kept for later on a worker of this memory limit."""
    return max(LEAST_LIMIT, int(_SHARE * (memory_limit or 0)))
