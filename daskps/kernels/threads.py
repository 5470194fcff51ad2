"""Ranges of a large array at the same time, in several threads.

The thread that calls takes the first range and then whatever nobody has begun: it never
waits for a thread that is busy elsewhere, or that a fork has left behind.
"""

from __future__ import annotations

import os
import threading
from contextvars import copy_context
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.typing import Array

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
        #: Whether a range gave anything but False.
        self._results: dict[int, bool] = {}
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
            self._results[i] = self._context.copy().run(self._work, i) is not False
        except BaseException as error:  # noqa: BLE001 - raised by who called
            self._errors[i] = error
        self._over.put(None)

    def run(self, helpers: _Helpers) -> bool:
        """Have it done, and return once nobody writes any more."""
        try:
            try:
                helpers.offer(self, self._n)
                for i in range(self._n):
                    if self._claims.setdefault(i, _CALLER) is _CALLER:
                        self._results[i] = self._work(i) is not False
            finally:
                self._wait()
        finally:
            # A signal may have struck as the first one began.
            self._wait()
            errors, fine = list(self._errors.values()), all(self._results.values())
            self._let_go()
        try:
            if errors:
                raise errors[0]
        finally:
            # Its traceback has this frame: a cycle would keep the arrays.
            errors.clear()
        return fine

    def _wait(self) -> None:
        """Wait for what others have begun; what nobody has, nobody will."""
        try:
            for i in range(self._n):
                if self._claims.setdefault(i, _CALLER) is _CALLER:
                    continue
                while not (i in self._results or i in self._errors):
                    self._over.get()
        except BaseException:
            # Of a signal: it waits until nobody writes.
            self._wait()
            raise

    def _let_go(self) -> None:
        """Keep no array: a helper that is busy has this job until it is free."""
        del self._work, self._context
        self._results.clear()
        self._errors.clear()


class _Helpers:
    """Threads that wait for ranges, and end when they are told or with the process.

    Each is started when a job first needs it: to start one may wait for the GIL.
    """

    def __init__(self) -> None:
        #: How many there may be, and how many there are.
        self.most = self._n = 0
        self._lock = threading.Lock()
        self._ranges: SimpleQueue[tuple[_Job, int] | None] = SimpleQueue()

    def allow(self, most: int) -> None:
        """Say how many there may be; those beyond end, each after what it is at."""
        with self._lock:
            self.most = most
            surplus = max(0, self._n - most)
            self._n -= surplus
        for _ in range(surplus):
            self._ranges.put(None)

    def offer(self, job: _Job, n: int) -> None:
        """Offer the ranges of a job, but the first, to as many as there are."""
        while self._n < min(n - 1, self.most) and self._start():
            pass
        for i in range(1, min(n, self._n + 1)):
            self._ranges.put((job, i))

    def _start(self) -> bool:
        """Start one unless others have; where the system gives none, go on without."""
        with self._lock:
            if self._n >= self.most:
                return False
            self._n += 1
            name = f"daskps-update-{self._n}"
        # Without the lock: others go on meanwhile with those that there are.
        try:
            threading.Thread(None, _help, name, (self._ranges,), daemon=True).start()
        except RuntimeError:
            with self._lock:
                self._n -= 1
            return False
        return True


def _help(ranges: SimpleQueue[tuple[_Job, int] | None]) -> None:
    while (offered := ranges.get()) is not None:
        job, i = offered
        job.help(i)
        # Or arrays, and the memory of a shard, would stay until the next job.
        del job, offered


_helpers = _Helpers()


def allow(n: int) -> None:
    """Say how many threads of this process may be at one call of :func:`in_ranges`.

    Helpers beyond that end, and the others stay. One, which is the default, needs none.

    Parameters
    ----------
    n : int
        The number, with the thread that calls.
    """
    _helpers.allow(n - 1)


def allowed() -> int:
    """Return how many threads may be at one call; see :func:`allow`."""
    return _helpers.most + 1


def forget() -> None:
    """Be alone in a forked child, which has none of its parent's threads."""
    global _helpers
    # With a lock of its own: another thread of the parent may have held that one.
    _helpers = _Helpers()


os.register_at_fork(after_in_child=forget)


def in_ranges(
    loop: Callable[..., object], arrays: Sequence[Array], *rest: object
) -> bool:
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
        an error is raised: that of a call, in whichever thread, or of a signal.
    """
    size = len(arrays[0])
    helpers = _helpers
    n = helpers.most + 1
    if n > 1:
        n = min(n, arrays[0].nbytes // LEAST_NBYTES)
    if n <= 1:
        return loop(*arrays, *rest) is not False
    cuts = [i * size // n // _STEP * _STEP for i in range(n)] + [size]

    def work(i: int) -> object:
        part = slice(cuts[i], cuts[i + 1])
        return loop(*(a[part] for a in arrays), *rest)

    return _Job(work, n).run(helpers)
