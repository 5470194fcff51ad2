"""Ranges of a large array at the same time, in several threads.

The thread that calls takes the first range and then whatever nobody has begun: it never
waits for a thread that is busy elsewhere, or that a fork has left behind.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from contextvars import copy_context
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["LEAST_NBYTES", "allow", "allowed", "each", "forget"]

Array = np.ndarray[Any, np.dtype[Any]]
#: Bytes of one array that each thread gets at least.
LEAST_NBYTES = 4 * 2**20
#: Who claims a range that no helper has.
_CALLER: Final = object()
#: Ranges begin at multiples of so many elements, so that all of them begin a cache line
#: where the first one does.
_STEP: Final = 4096


class _Job:
    """One call, cut into ranges: each is done once, by whoever claims it first."""

    def __init__(self, work: Callable[[int], object], n: int) -> None:
        self._work, self._n = work, n
        #: Who does a range: `setdefault` looks and writes in one step.
        self._claims: dict[int, object] = {}
        self._results: dict[int, object] = {}
        self._errors: dict[int, BaseException] = {}
        self._over = SimpleQueue[None]()
        #: What NumPy warns of is the caller's choice, also in another thread.
        self._context = copy_context()

    def help(self, i: int) -> None:
        """Do a range in another thread, unless it is taken."""
        me = object()
        if self._claims.setdefault(i, me) is not me:
            return
        try:
            self._results[i] = self._context.copy().run(self._work, i)
        except BaseException as error:  # noqa: BLE001 - raised by who called
            self._errors[i] = error
        self._over.put(None)

    def run(self) -> list[object]:
        """Do what is left, and return once nobody writes any more."""
        try:
            for i in range(self._n):
                if self._claims.setdefault(i, _CALLER) is _CALLER:
                    self._results[i] = self._work(i)
        finally:
            self._wait()
        for error in self._errors.values():
            raise error
        return list(self._results.values())

    def _wait(self) -> None:
        """Wait for what others have begun; what nobody has, nobody will."""
        interrupt: BaseException | None = None
        for i in range(self._n):
            if self._claims.setdefault(i, _CALLER) is _CALLER:
                continue
            while not (i in self._results or i in self._errors):
                try:
                    self._over.get()
                except BaseException as error:  # noqa: BLE001 - raised below
                    interrupt = error
        if interrupt is not None:
            raise interrupt


class _Helpers:
    """Threads that wait for ranges, and end when they are told or with the process."""

    def __init__(self, n: int) -> None:
        self._ranges: SimpleQueue[tuple[_Job, int] | None] = SimpleQueue()
        self._n = 0
        # Where the system gives fewer threads, updates go on with those.
        with suppress(RuntimeError):
            for i in range(n):
                name, given = f"daskps-update-{i}", (self._ranges,)
                threading.Thread(None, _help, name, given, daemon=True).start()
                self._n += 1

    def offer(self, job: _Job, n: int) -> None:
        """Offer ranges of a job, but the first, to as many as there are."""
        for i in range(1, min(n, self._n + 1)):
            self._ranges.put((job, i))

    def stop(self) -> None:
        """End the threads, each after what it is at."""
        for _ in range(self._n):
            self._ranges.put(None)


def _help(ranges: SimpleQueue[tuple[_Job, int] | None]) -> None:
    while (offered := ranges.get()) is not None:
        job, i = offered
        job.help(i)
        # Or arrays, and the memory of a shard, would stay until the next job.
        del job, offered


_n_threads = 1
_helpers: _Helpers | None = None
_lock = threading.Lock()


def allow(n: int) -> None:
    """Say how many threads of this process may be at one call of :func:`each`.

    Helpers of an earlier number end. One, which is the default, needs none.

    Parameters
    ----------
    n : int
        The number, with the thread that calls.
    """
    global _n_threads, _helpers
    with _lock:
        if n == _n_threads:
            return
        old, _helpers, _n_threads = _helpers, None, n
    if old is not None:
        old.stop()


def allowed() -> int:
    """Return how many threads may be at one call; see :func:`allow`."""
    return _n_threads


def forget() -> None:
    """Be alone in a forked child, which has none of its parent's threads."""
    global _n_threads, _helpers, _lock
    # Another thread of the parent may have held it.
    _n_threads, _helpers, _lock = 1, None, threading.Lock()


def each(loop: Callable[..., object], arrays: Sequence[Array], *rest: object) -> bool:
    """Call a loop over arrays; over large ones in several threads.

    Parameters
    ----------
    loop : callable
        `loop(*arrays, *rest)`, which treats every element alone. It should hold no
        GIL, and is called for ranges in any order.
    arrays : sequence of ndarray, shape (n,)
        Cut alike, by the bytes of the first.
    *rest
        Passed as it is.

    Returns
    -------
    bool
        False iff a call has returned False. All ranges are over then, and also where
        an error is raised.
    """
    size = len(arrays[0])
    n = _n_threads
    if n > 1:
        n = min(n, arrays[0].nbytes // LEAST_NBYTES)
    if n <= 1:
        return loop(*arrays, *rest) is not False
    cuts = [i * size // n // _STEP * _STEP for i in range(n)] + [size]

    def work(i: int) -> object:
        part = slice(cuts[i], cuts[i + 1])
        return loop(*(a[part] for a in arrays), *rest)

    job = _Job(work, n)
    if (helpers := _get_helpers()) is not None:
        helpers.offer(job, n)
    return all(result is not False for result in job.run())


def _get_helpers() -> _Helpers | None:
    """Return the helpers; none where others have just said that there are none."""
    global _helpers
    with _lock:
        if _helpers is None and _n_threads > 1:
            _helpers = _Helpers(_n_threads - 1)
        return _helpers
