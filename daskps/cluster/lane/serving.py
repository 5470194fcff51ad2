"""Who serves which lane of a host when.

One thread looks after the sockets of most lanes, and serves small requests itself. What
takes longer goes to one of a few others. A lane that is busy for a while has one of these
to itself: it waits in the kernel for the next frame, which is the shortest way.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from daskps.cluster.lane.channel import BUFFER_NBYTES
from daskps.cluster.lane.desk import Desk
from daskps.cluster.lane.plain_reads import loaded
from daskps.cluster.lane.pool import Pool, PoolJob
from daskps.cluster.lane.selecting import Selector, is_busy
from daskps.cluster.lane.staying import Staying
from daskps.cluster.lane.waits import ANSWERED, BATCH, BYTES, OTHERS, ROOM
from daskps.errors import ProtocolError, ShardBusyError

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.cluster.lane.batch import FrameBatch
    from daskps.cluster.lane.calls import Waiting
    from daskps.cluster.lane.connection import Connection

logger = logging.getLogger(__name__)
#: Lanes that have a thread to themselves, and threads for what takes long.
MOST_STAYING, MOST_THREADS = 4, 12
#: How long a call waits for the lock of a shard, in a thread that may.
LOCK_SECONDS = 1.0
#: How long a thread waits for plain reads that it answers without Python, or for those who
#: take the answers; and how long these are at most.
ALONE_MS, ALONE_NBYTES = 200, 2**20 + 2**12


class _OfThread(threading.local):
    """What a thread that serves lanes has.

    Its buffer, calls that it has completed, and what it answers plain reads with.
    """

    buffer: memoryview | None = None
    done: deque[tuple[Connection, Waiting]] | None = None
    desk: Desk | None = None


class LaneServer:
    """The threads that serve the lanes of one host.

    Parameters
    ----------
    ended : callable
        Told of each connection that was closed.
    """

    def __init__(self, ended: Callable[[Connection], None]) -> None:
        self._ended = ended
        self._mine = _OfThread()
        self._selector = Selector(self)
        self._pool = Pool(MOST_STAYING + MOST_THREADS, "daskps-lane")
        self._n_staying = 0
        self._lock = threading.Lock()
        #: The event loop's, which serves nothing.
        self._loop_thread = threading.get_ident()

    def add(self, connection: Connection) -> None:
        """Serve a connection from now on."""
        connection.home = self._selector
        self._selector.take(connection)

    def close(self, seconds: float) -> None:
        """End all connections, and wait so long for the threads."""
        end = time.monotonic() + seconds
        for job in self._pool.close():
            self._drop(job)
        self._selector.close()
        if not (self._pool.join(end) and self._selector.join(end)):
            logger.warning("threads of lanes are still at a call, and end after it")

    # -- in the threads --------------------------------------------------------

    def begin_thread(self) -> memoryview:
        """Return the buffer of this thread, which serves lanes."""
        mine = self._mine
        if mine.buffer is None:
            mine.buffer, mine.done = memoryview(bytearray(BUFFER_NBYTES)), deque()
        return mine.buffer

    def go_on(
        self,
        connection: Connection,
        buffer: memoryview,
        seconds: float,
        batch: FrameBatch[Connection] | None = None,
    ) -> int:
        """Have a connection go on, and then the calls that it has completed.

        These wait for the end of a batch, where its frame goes into one.

        Returns
        -------
        int
            What it waits for; 0 where it has ended.
        """
        try:
            desk = self._find_desk() if seconds else None
            if desk and not connection.answer_alone(desk, ALONE_MS):
                return BYTES
            waits = connection.go_on(buffer, seconds, batch)
            if waits == BATCH:
                return waits
            if waits == OTHERS:
                self._heed_end(connection)
        except Exception as error:  # noqa: BLE001 - said there
            self.end(connection, error)
            waits = 0
        self.finish_done(seconds)
        return waits

    def reply(self, connection: Connection, found: list[Any] | Waiting) -> int:
        """Answer a frame whose batch was served; return what it waits for."""
        try:
            waits = connection.reply(found)
            if waits == OTHERS:
                self._heed_end(connection)
        except Exception as error:  # noqa: BLE001 - said there
            self.end(connection, error)
            return 0
        return waits

    def _heed_end(self, connection: Connection) -> None:
        """Have the call of a connection answered once it is done, if it still waits."""
        if (waiting := connection.waiting) is not None:
            waiting.then(partial(self._done, connection, waiting))

    def _find_desk(self) -> Desk | None:
        """Return what this thread answers plain reads with, if it can."""
        mine = self._mine
        if mine.desk is None and (loops := loaded()) is not None:
            mine.desk = Desk(loops, ALONE_NBYTES, ALONE_MS, waits=True)
        return mine.desk

    def finish_done(self, seconds: float) -> None:
        """Answer the calls that this thread has completed."""
        done = self._mine.done
        while done:
            connection, waiting = done.popleft()
            self.finish(connection, seconds, waiting)

    def end(self, connection: Connection, error: Exception | None = None) -> None:
        """Close a connection, which this thread owns."""
        if isinstance(error, ProtocolError):
            logger.warning("a lane was closed: %s", error)
        elif error is not None and not isinstance(error, OSError):
            logger.error("a lane failed", exc_info=error)
        if (home := connection.home) is not None:
            home.forget(connection)
        connection.end()
        self._ended(connection)

    def finish(self, connection: Connection, seconds: float, waiting: Waiting) -> None:
        """Answer a parked call, unless another thread does."""
        if connection.is_long and not seconds:
            self._submit(partial(self._finish_long, connection, waiting))
        elif (claimed := connection.claim(waiting)) is not None:
            self._finish(connection, claimed, seconds)

    def _finish_long(self, connection: Connection, waiting: Waiting) -> None:
        self.begin_thread()
        self.finish(connection, LOCK_SECONDS, waiting)
        self.finish_done(LOCK_SECONDS)

    def _finish(self, connection: Connection, claimed: Waiting, seconds: float) -> None:
        try:
            connection.answer(claimed.finish(seconds))
        except ShardBusyError:
            # Here with no time to wait; there it says that the call still waits.
            self._submit(partial(self._finish, connection, claimed, LOCK_SECONDS))
            return
        except BaseException as error:
            # Nobody knows how much of it was sent.
            connection.channel.shut()
            connection.give_back()
            if not isinstance(error, Exception):
                raise
            if not isinstance(error, OSError):
                logger.exception("an answer by a lane failed")
            return
        connection.give_back()

    def _done(self, connection: Connection, waiting: Waiting) -> None:
        """Have the answer of a call sent that is done; from any thread."""
        done = self._mine.done
        if done is not None and not connection.is_long:
            # Its own answer first.
            done.append((connection, waiting))
        elif (
            connection.is_away
            and not connection.is_long
            and threading.get_ident() != self._loop_thread
        ):
            # A trainer's thread: to wake another one takes longer than to do it, for the
            # few lanes that have a thread. Of a thousand it would be kept for long.
            self.finish(connection, 0.0, waiting)
        elif (home := connection.home) is not None:
            home.take(connection)

    # -- from one thread to another --------------------------------------------

    def give_away(self, connection: Connection) -> None:
        """Have a thread serve a frame that takes long."""
        connection.is_away = True
        self._submit(partial(self._serve_long, connection))

    def _serve_long(self, connection: Connection) -> None:
        buffer = self.begin_thread()
        while True:
            waits = self.go_on(connection, buffer, LOCK_SECONDS)
            if not waits:
                return
            if waits == ANSWERED and is_busy(connection):
                # With the buffer, and what else its caches have of this lane.
                if self._try_to_take_place():
                    self._stay(connection)
                    return
                break
            if waits in (OTHERS, ANSWERED):
                break
            connection.channel.wait(for_room=waits == ROOM)
            if connection.is_slow or connection.is_behind(time.monotonic()):
                # Nobody waits for its caller, nor for what else of this comes.
                connection.is_slow = True
                break
        connection.is_away = False
        self._selector.take(connection)

    def _submit(self, job: PoolJob) -> None:
        if not self._pool.submit(job):
            self._drop(job)

    def _drop(self, job: PoolJob) -> None:
        """End the connection that a job would have had."""
        connection: Connection = job.args[0]
        connection.channel.shut()
        if job.func == self._finish:
            connection.give_back()
        elif job.func != self._finish_long:  # of which its home still has it
            self.end(connection)

    def try_to_stay(self, connection: Connection) -> bool:
        """Give a busy connection a thread to itself, if there is one."""
        if not self._try_to_take_place():
            return False
        connection.is_away = True
        self._submit(partial(self._stay, connection))
        return True

    def _try_to_take_place(self) -> bool:
        with self._lock:
            is_free = self._n_staying < MOST_STAYING
            self._n_staying += is_free
        return is_free

    def _stay(self, connection: Connection) -> None:
        # Where no descriptor is left for it the lane stays with the selector.
        is_idle, staying = True, None
        try:
            with contextlib.suppress(OSError):
                staying = Staying(self, connection, LOCK_SECONDS)
            if staying is not None:
                is_idle = False
                is_idle = staying.run()
        finally:
            if is_idle:
                connection.home = self._selector
            if staying is not None:
                staying.close()
            with self._lock:
                self._n_staying -= 1
        if is_idle:
            connection.is_away = False
            self._selector.take(connection)
