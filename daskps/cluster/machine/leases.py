"""Ends that come in any thread: of memory with its last array, and of memberships.

Some memory is used again once nobody looks at it. Memory that comes fresh from the
system is zeroed page by page as it is written to, which takes several times as long as
the copy into it; and Dask's nanny has malloc return every larger array at once
(``MALLOC_TRIM_THRESHOLD_``). An array of a :class:`BufferPool` goes back by itself when
the last view of it is gone, whoever held that: a frame on its way out, a user's
function, a traceback. So it never changes under a reader.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from daskps.layout.arrays import align

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from daskps.typing import Array

_T = TypeVar("_T")


class DeferredEnds(Generic[_T]):
    """A lock, and the things that are over and yet to be undone under it.

    The garbage collector may end something anywhere, also in a thread that holds the
    lock: it is noted, and the next thread that has had the lock undoes it.

    Parameters
    ----------
    undo : callable
        Undoes one of them, under the lock.
    """

    def __init__(self, undo: Callable[[_T], None]) -> None:
        self._lock, self._undo = threading.Lock(), undo
        self._over: deque[_T] = deque()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock."""
        try:
            with self._lock:
                yield
        finally:
            self._settle()

    def end(self, what: _T) -> None:
        """Undo something now, or let the thread with the lock do it."""
        self._over.append(what)
        self._settle()

    def _settle(self) -> None:
        while self._over and self._lock.acquire(blocking=False):
            try:
                while self._over:
                    self._undo(self._over.popleft())
            finally:
                self._lock.release()

    def forked(self) -> None:
        """Begin in a forked child: another thread of the parent may have held the lock."""
        self._lock = threading.Lock()


class _Lease:
    """The base of all views of some memory."""

    __slots__ = ("__array_interface__", "_end", "_held")

    def __init__(self, memory: Array, end: Callable[[Any], None], held: Any) -> None:
        self.__array_interface__ = memory.__array_interface__
        # Not looked up when it ends: names of modules may be gone by then.
        self._end, self._held = end, held

    def __del__(self) -> None:
        self._end(self._held)


def leased(memory: Array, end: Callable[[Any], None], held: Any) -> Array:
    """Return a view of memory whose last view's end is told.

    Parameters
    ----------
    memory : ndarray
        The memory, which `held` keeps.
    end : callable
        Gets `held` when no view is left, in whatever thread that happens.
    held : object
        The object to be given back.
    """
    return np.asarray(_Lease(memory, end, held))


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
