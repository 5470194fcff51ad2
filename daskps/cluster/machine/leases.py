"""Ends that come in any thread: of memory with its last array, and of memberships."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

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
