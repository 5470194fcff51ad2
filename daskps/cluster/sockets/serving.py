"""The threads that serve the sockets of a host: a few of them, on one epoll set.

One thread leads: it waits for the next event of the set, serves it and waits again. The
set reports each event once; the thread that takes it owns the socket until it puts the
socket back. Before long work the leader lets another thread lead, and may wait then; if
no thread is left it goes on without waiting. So the set is left alone for work at most,
never for a wait.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import threading
import time
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from daskps.cluster.sockets.channel import BUFFER_NBYTES
from daskps.cluster.sockets.connection import ANSWERED, OTHERS, ROOM
from daskps.errors import ProtocolError, ShardBusyError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.cluster.sockets.connection import Connection, ParkedCall

logger = logging.getLogger(__name__)
#: How long a thread of sockets waits after an error of its own.
_FAILED_SECONDS = 0.1
#: Most threads of one host, and seconds for which an idle one is kept.
MOST_THREADS, SPARE_SECONDS = 16, 10.0
#: Events that one look at the set returns.
_MOST_EVENTS = 64
#: How long a call waits for the lock of a shard: in a thread that may wait, and in the
#: leader if no other thread can lead.
LOCK_SECONDS, SHORT_SECONDS = 1.0, 0.01
#: How often the leader checks sockets that are within a frame or an answer.
SWEEP_SECONDS = 0.5
#: Bytes of unfinished bodies and of answers not taken, of all sockets. Above that the
#: host closes the slowest sockets, if they are behind by so many seconds.
MOST_HELD, LAG_SECONDS = 2**26, 0.5
#: With more sockets, no thread waits for the next frame of a socket, and no trainer's
#: thread sends answers: that would keep it for long. With fewer, a thread waits after
#: so many quick frames.
FEW_SOCKETS, QUICK_FRAMES = 8, 4


class _Thread:
    """A thread that serves sockets.

    Parameters
    ----------
    let_lead : callable
        Lets another thread lead; returns for how long this one may wait then.
    """

    __slots__ = ("buffer", "done", "leads", "let_lead")

    def __init__(self, let_lead: Callable[[_Thread], float]) -> None:
        self.leads = False
        self.buffer = memoryview(bytearray(BUFFER_NBYTES))
        #: Calls that this thread has completed.
        self.done: deque[tuple[Connection, ParkedCall]] = deque()
        self.let_lead = partial(let_lead, self)


class _Here(threading.local):
    """The calling thread's :class:`_Thread`, if it serves sockets."""

    thread: _Thread | None = None


class SocketServer:
    """The threads that serve the sockets of one host.

    Parameters
    ----------
    ended : callable
        Called with each connection that was closed.

    Raises
    ------
    OSError, RuntimeError
        If the system gives no thread, or no descriptor.
    """

    def __init__(self, ended: Callable[[Connection], None]) -> None:
        self._ended = ended
        self._mine = _Here()
        self._events = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._events.register(self._wake, select.EPOLLIN)
        #: Connections by descriptor.
        self._here: dict[int, Connection] = {}
        #: The leading thread holds it; the others wait for it.
        self._lead = threading.Lock()
        #: Events that came together; each leader takes the next one.
        self._ready: deque[tuple[int, int]] = deque()
        #: Guards the threads, how many of them wait to lead, and the time of the next
        #: check of all connections.
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._n_spare, self._next_look = 0, math.inf
        #: The thread of the event loop, which serves no socket.
        self._loop_thread = threading.get_ident()
        self._is_closed = self._is_left = False
        _ALL.add(self)
        try:
            with self._lock:
                self._start()
        except RuntimeError:
            self._free()
            raise

    def add(self, connection: Connection) -> None:
        """Serve a connection from now on."""
        connection.is_owned = True
        self._here[connection.channel.fileno()] = connection
        self._leave(connection)

    def close(self, seconds: float) -> None:
        """Close all connections, and wait for the threads for so many seconds."""
        with self._lock:
            self._is_closed, threads = True, list(self._threads)
            if threads:
                os.eventfd_write(self._wake, 1)
        for connection in list(self._here.values()):
            connection.channel.shut()
        end = time.monotonic() + seconds
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            logger.warning("threads of sockets are still at a call, and end after it")
        for connection in list(self._here.values()):
            # If another thread owns the connection, that thread closes it.
            if connection.own():
                self.end(connection)
        with self._lock:
            self._is_left = True
            if not self._threads:
                self._free()

    # -- the threads -----------------------------------------------------------

    def _start(self) -> None:
        """Start a thread that waits to lead; the caller holds the lock."""
        thread = threading.Thread(target=self._run, name="daskps-socket", daemon=True)
        thread.start()
        self._threads.add(thread)
        self._n_spare += 1

    def _run(self) -> None:
        mine = self._mine.thread = _Thread(self._let_lead)
        while self._follow(mine):
            while mine.leads and not self._is_closed:
                try:
                    self._look(mine)
                except Exception:
                    # Without a leader no socket would be served; an error that stays
                    # must not take a core and fill the log.
                    logger.exception("a thread of sockets failed")
                    time.sleep(_FAILED_SECONDS)
            if mine.leads:
                break
            with self._lock:
                self._n_spare += 1
        with self._lock:
            self._threads.discard(threading.current_thread())
            if mine.leads:
                self._lead.release()
            if self._is_left and not self._threads:
                self._free()

    def _follow(self, mine: _Thread) -> bool:
        """Wait to lead; return False if this thread has no work and ends."""
        has_lead = self._lead.acquire(timeout=SPARE_SECONDS)
        with self._lock:
            # The leader may just have counted on this thread.
            mine.leads = has_lead or self._lead.acquire(blocking=False)
            self._n_spare -= 1
        return mine.leads and not self._is_closed

    def _let_lead(self, mine: _Thread) -> float:
        """Let another thread lead; return for how long this one may wait then."""
        if not mine.leads:
            return LOCK_SECONDS
        with self._lock:
            if not self._n_spare and len(self._threads) < MOST_THREADS:
                try:
                    self._start()
                except RuntimeError as error:
                    logger.warning("no thread for sockets: %s", error)
            if not self._n_spare:
                return 0.0
            mine.leads = False
            self._lead.release()
        return LOCK_SECONDS

    def _look(self, mine: _Thread) -> None:
        """As the leader, wait for an event and serve it."""
        if not self._ready:
            now = time.monotonic()
            if self._next_look <= now:
                self._look_around(now)
            left = self._next_look - now
            timeout = -1 if left == math.inf else max(0.0, left)
            self._ready.extend(self._events.poll(timeout, _MOST_EVENTS))
        if self._ready:
            number, _ = self._ready.popleft()
            if number == self._wake:
                if not self._is_closed:
                    os.eventfd_read(number)
            # Another thread may have closed the connection.
            elif (connection := self._here.get(number)) is not None:
                self._hear(connection, mine)
        if mine.done:
            self._finish_done(mine)

    def _finish_done(self, mine: _Thread) -> None:
        """Answer the calls that this thread has completed."""
        while mine.done:
            self._finish(*mine.done.popleft())

    def _free(self) -> None:
        """Close the epoll set and the descriptor that wakes it."""
        _ALL.discard(self)
        if not self._events.closed:
            self._events.close()
            os.close(self._wake)

    # -- one connection --------------------------------------------------------

    def _hear(self, connection: Connection, mine: _Thread) -> None:
        """Serve a connection that has an event, unless another thread owns it."""
        if not connection.own():
            return
        waiting = connection.waiting
        if waiting is None:
            self._serve(connection, mine)
        elif waiting.done:
            waits = connection.is_long and mine.let_lead() > 0
            self._answer(connection, waiting, waits=waits)
        elif connection.channel.has_come:
            # A caller sends nothing while its call waits: it has hung up, or is no
            # caller.
            self.end(connection)
        else:
            self._leave(connection)

    def _serve(self, connection: Connection, mine: _Thread) -> None:
        try:
            while self._go_on(connection, mine):
                if mine.done:
                    self._finish_done(mine)
            if (waiting := connection.waiting) is not None:
                self._expect(waiting.end)
                waiting.then(partial(self._done, connection, waiting))
        except Exception as error:  # noqa: BLE001 - `end` logs it
            self.end(connection, error)
            return
        self._leave(connection)
        # A thread that completed the call before `_leave` could not answer it.
        if waiting is not None and waiting.done:
            self._finish(connection, waiting)

    def _go_on(self, connection: Connection, mine: _Thread) -> bool:
        """Let a connection go on; return whether this thread stays with it."""
        connection.used = time.monotonic()
        seconds = 0.0 if mine.leads else LOCK_SECONDS
        waits = connection.go_on(mine.buffer, seconds, mine.let_lead)
        if waits == ANSWERED and len(self._here) <= FEW_SOCKETS:
            # An event takes longer from the set to a thread than the next frame takes.
            connection.n_quick += 1
            return connection.n_quick > QUICK_FRAMES and mine.let_lead() > 0
        connection.n_quick = 0
        if waits in (OTHERS, ANSWERED) or mine.leads:
            return False
        if not connection.is_within or connection.is_slow:
            return False
        connection.channel.wait(for_room=waits == ROOM)
        # No thread waits for this caller again, until the frame or answer has ended.
        connection.is_slow = connection.is_behind(time.monotonic())
        return not connection.is_slow

    def _leave(self, connection: Connection) -> None:
        """Stop owning a connection, and put it back into the set."""
        try:
            if connection.leave(self._events):
                self._expect(time.monotonic() + SWEEP_SECONDS)
        except ValueError:  # `_free` has closed the set
            is_closed = True
        else:
            is_closed = self._is_closed
        if is_closed and connection.own():
            self.end(connection)

    def end(self, connection: Connection, error: Exception | None = None) -> None:
        """Close a connection that this thread owns."""
        if isinstance(error, ProtocolError):
            logger.warning("a socket was closed: %s", error)
        elif error is not None and not isinstance(error, OSError):
            logger.error("a socket failed", exc_info=error)
        self._here.pop(connection.channel.fileno(), None)
        connection.end()
        self._ended(connection)

    # -- parked calls ----------------------------------------------------------

    def _done(self, connection: Connection, waiting: ParkedCall) -> None:
        """Have the answer of a completed call sent; any thread may call this."""
        mine = self._mine.thread
        if not connection.is_long:
            if mine is not None:
                # This thread first sends the answer to its own socket.
                mine.done.append((connection, waiting))
                return
            # Waking another thread takes longer than answering here.
            is_loop = threading.get_ident() == self._loop_thread
            if not is_loop and len(self._here) <= FEW_SOCKETS:
                self._finish(connection, waiting)
                return
        self._hand_over(connection, waiting)

    def _hand_over(self, connection: Connection, waiting: ParkedCall) -> None:
        """Let a thread of the set answer a call."""
        with contextlib.suppress(ValueError):  # the set is closed, and the sockets too
            connection.hand_over(self._events, waiting)

    def _finish(self, connection: Connection, waiting: ParkedCall) -> None:
        """Answer a parked call, unless another thread answers it."""
        if connection.claim(waiting):
            self._answer(connection, waiting)

    def _answer(
        self, connection: Connection, waiting: ParkedCall, *, waits: bool = False
    ) -> None:
        """Answer the call of a connection, which this thread owns."""
        connection.waiting = None
        try:
            try:
                frame = waiting.finish(0.0)
            except ShardBusyError:
                mine = self._mine.thread
                if mine is None:
                    # The read may have to wait for its turn, and this thread must not.
                    connection.waiting = waiting
                    self._leave(connection)
                    self._hand_over(connection, waiting)
                    return
                frame = waiting.finish(mine.let_lead() or SHORT_SECONDS)
            if isinstance(frame, list):
                connection.answer(frame, waits=waits)
            else:
                connection.waiting = waiting = frame
                self._expect(waiting.end)
                waiting.then(partial(self._done, connection, waiting))
        except BaseException as error:
            # Part of the answer may have been sent: the socket cannot go on.
            if not isinstance(error, Exception):
                self.end(connection)
                raise
            self.end(connection, error)
            return
        self._leave(connection)
        if connection.waiting is waiting and waiting.done:
            self._finish(connection, waiting)

    # -- time ------------------------------------------------------------------

    def _expect(self, end: float) -> None:
        """Make the leader check all connections by `end`."""
        if end < self._next_look:
            with self._lock:
                self._next_look = min(end, self._next_look)
                mine = self._mine.thread
                if not (self._is_closed or (mine is not None and mine.leads)):
                    os.eventfd_write(self._wake, 1)

    def _look_around(self, now: float) -> None:
        """Answer calls whose time is up, and close connections of slow callers."""
        with self._lock:
            self._next_look = math.inf
        within = []
        for connection in list(self._here.values()):
            waiting = connection.waiting
            if waiting is None:
                if connection.is_within:
                    within.append(connection)
            elif waiting.end > now:
                self._expect(waiting.end)
            else:
                self._finish(connection, waiting)
        if within:
            self._expect(now + SWEEP_SECONDS)
            self._bound(within, now)

    def _bound(self, within: Sequence[Connection], now: float) -> None:
        """Close late connections, and the slowest ones if all hold too much memory."""
        slow: list[tuple[float, int, Connection]] = []
        held = 0
        for connection in within:
            with connection.lock:
                if connection.is_owned:
                    continue
                n, lag = connection.n_held, connection.lag(now)
                is_late = connection.is_late(now)
            if is_late and connection.own():
                self.end(connection)
            else:
                held += n
                slow.append((lag, n, connection))
        for lag, n, connection in sorted(slow, key=lambda one: one[0], reverse=True):
            if held <= MOST_HELD or lag < LAG_SECONDS:
                break
            held -= n
            if connection.own():
                self.end(connection)

    def leave_to_parent(self) -> None:
        """Close the copies in a forked child."""
        self._is_closed = True
        self._free()


#: The servers of this process.
_ALL: weakref.WeakSet[SocketServer] = weakref.WeakSet()


def _in_child() -> None:
    for server in list(_ALL):
        server.leave_to_parent()
    _ALL.clear()


os.register_at_fork(after_in_child=_in_child)
