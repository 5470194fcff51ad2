"""The memory of a worker beside its shards: for copies of cuts, and answers under way.

The system counts memory that is written already. This module counts memory that is
promised and may not be written yet: copies while they are made, and unsent answers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any

from daskps.cluster.machine.leases import DeferredEnds, leased
from daskps.errors import DaskPSError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from daskps.cluster.host.node import WorkerNode
    from daskps.cluster.machine.leases import BufferPool
    from daskps.reduction import Empty
    from daskps.typing import Array

#: Answers up to this size are not counted.
SMALL_NBYTES = 65_536
#: Bytes of answers that may be under way: at least the first however full the memory
#: is, at most the second, or the share of the worker's memory limit if that is more.
LITTLE_NBYTES, MOST_NBYTES, MOST_SHARE = 2**24, 2**28, 0.125


class CopyBudget:
    """Memory for the copies and answers of one host; safe for threads.

    Parameters
    ----------
    worker : WorkerNode
        The worker with that memory.
    pool : BufferPool
        Makes the arrays of answers.
    """

    def __init__(self, worker: WorkerNode, pool: BufferPool) -> None:
        self._worker, self.pool = worker, pool
        self._most = max(MOST_NBYTES, int(MOST_SHARE * (worker.memory_limit or 0)))
        #: Bytes of unfinished copies, and of answers under way.
        self.nbytes = 0
        self._ends: DeferredEnds[int] = DeferredEnds(self._end)
        #: Answers that wait for room, in their order: bytes, and the future of their
        #: memory.
        self._waiting: deque[tuple[int, asyncio.Future[Any]]] = deque()

    @contextlib.contextmanager
    def copying(self, nbytes: int) -> Iterator[str]:
        """Reserve room while copies are made; the system counts them from then on.

        Yields why there is no room; "" if there is.
        """
        with self._ends.held():
            lack = self._lack(nbytes)
            taken = 0 if lack else nbytes
            self.nbytes += taken
        try:
            yield lack
        finally:
            self._ends.end(taken)

    def answer(self, nbytes: int) -> Empty | None:
        """Return the maker of an answer's arrays, None if the answer has to wait.

        Parameters
        ----------
        nbytes : int
            Bytes of all arrays. They count while a view of any of them exists.
        """
        if nbytes <= SMALL_NBYTES:
            return self.pool.empty
        return None if self._waiting else self._try_answer(nbytes)

    def answer_now(self, nbytes: int) -> Empty:
        """Return the maker of an answer's arrays, for callers that cannot wait.

        Raises
        ------
        DaskPSError
            If the answer would have to wait.
        """
        if (empty := self.answer(nbytes)) is None:
            raise DaskPSError(f"no room for an answer: {self.why_full}")
        return empty

    def wait(self, nbytes: int) -> asyncio.Future[Any]:
        """Return a future of the result of :meth:`answer`; only on the event loop.

        A caller that gives up cancels the future, or sets a result.
        """
        turn = asyncio.get_running_loop().create_future()
        if (empty := self.answer(nbytes)) is not None:
            turn.set_result(empty)
            return turn
        self._waiting.append((nbytes, turn))
        # An answer that gives up may have blocked others that need less.
        turn.add_done_callback(lambda _: self._grant())
        # Room may have come just before this answer was in the queue.
        self._grant()
        return turn

    @property
    def why_full(self) -> str:
        """The reason that answers wait, in words; "" if none has to."""
        if self.nbytes <= LITTLE_NBYTES:
            return ""
        return f"{self.nbytes:,} bytes of answers to others are under way"

    def _try_answer(self, nbytes: int) -> Empty | None:
        with self._ends.held():
            total = self.nbytes + nbytes
            fits = total <= LITTLE_NBYTES or (
                total <= self._most and not self._lack(nbytes)
            )
            # One answer always passes, even if nothing fits: else no caller would get
            # it.
            if self.nbytes and not fits:
                return None
            self.nbytes = total
        return _Room(self._ends, nbytes, self.pool.empty).empty

    def _grant(self) -> None:
        """Give memory to the waiting answers that fit, on the event loop."""
        while self._waiting:
            nbytes, turn = self._waiting[0]
            if not turn.done():
                if (empty := self._try_answer(nbytes)) is None:
                    return
                turn.set_result(empty)
            self._waiting.popleft()

    def _end(self, nbytes: int) -> None:
        self.nbytes -= nbytes
        if self._waiting:
            # No answer waits on a closed loop.
            with contextlib.suppress(RuntimeError):
                self._worker.loop.asyncio_loop.call_soon_threadsafe(self._grant)

    def _lack(self, nbytes: int) -> str:
        """Return why there is no room for so many bytes more; "" if there is."""
        if not (limit := self._worker.memory_limit):
            return ""
        share = self._worker.pause_share
        most = int(share * limit)
        for _ in range(2):
            free = most - self._worker.measure() - self.nbytes
            if nbytes <= free:
                return ""
            # The pool's spare arrays are needed less than this answer.
            self.pool.clear()
        return (
            f"{max(0, free):,} bytes are free below {share:.0%} of its memory limit of "
            f"{limit:,}, where Dask pauses it"
        )


class _Room:
    """Counted bytes; the count ends with the last array in them."""

    __slots__ = ("_empty", "_ends", "_nbytes")

    def __init__(self, ends: DeferredEnds[int], nbytes: int, empty: Empty) -> None:
        self._ends, self._nbytes, self._empty = ends, nbytes, empty

    def empty(self, n: int, dtype: Any) -> Array:
        """Return an array like ``np.empty(n, dtype)``."""
        array = self._empty(n, dtype)
        return kept(array, self.empty)

    def __del__(self) -> None:
        self._ends.end(self._nbytes)


def kept(array: Array, room: Empty) -> Array:
    """Count an array, which was made before, in a room from now on."""
    return leased(array, _drop, (array, room))


def _drop(held: Any) -> None:
    """Do nothing: the argument is released on return."""
