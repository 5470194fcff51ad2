"""The thread that looks after the sockets of most lanes of a host."""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING

from daskps.cluster.lane.batch import FrameBatch
from daskps.cluster.lane.connection import SMALL_NBYTES, Connection
from daskps.cluster.lane.desk import SharedDesk
from daskps.cluster.lane.ends import Ends
from daskps.cluster.lane.plain_reads import loaded
from daskps.cluster.lane.waits import ANSWERED, BATCH, BYTES, OTHERS, ROOM, THREAD

if TYPE_CHECKING:
    from daskps.cluster.lane.homes import Giving

#: Events that are looked at in one go.
MOST_EVENTS = 256
#: How often it looks for those that are late.
SWEEP_SECONDS = 1.0
#: So many frames within so many seconds are a busy lane.
BUSY_FRAMES, BUSY_SECONDS = 16, 0.1
#: Bytes of bodies that do not come and of answers that are not taken, of all lanes. Where
#: there are more, who is slowest goes that is behind by so many seconds; that is looked at
#: as often.
MOST_HELD, LAG_SECONDS = 2**26, 0.5
_IN = select.EPOLLIN | select.EPOLLRDHUP


def is_busy(connection: Connection) -> bool:
    """Count a frame that was served here; return whether that makes a busy lane."""
    return connection.is_busy(BUSY_FRAMES, BUSY_SECONDS)


class Selector:
    """The home of all connections that have no thread to themselves.

    Parameters
    ----------
    server : Giving
        What serves them.
    """

    def __init__(self, server: Giving) -> None:
        self._server = server
        self._inbox: deque[Connection] = deque()
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._is_woken = self._is_closed = self._has_ended = False
        #: What answers plain reads without Python, once that is ready.
        self._desk: SharedDesk | None = None
        #: By descriptor: those it looks after, and for what.
        self._here: dict[int, tuple[Connection, int]] = {}
        #: Frames that are answered together.
        self._batch: FrameBatch[Connection] = FrameBatch()
        #: Those that have said more than one frame: they take turns with the others.
        self._again: list[Connection] = []
        #: Those inside of a frame or of an answer.
        self._within: set[Connection] = set()
        self._ends = Ends()
        self._now = self._next_sweep = self._next_bound = 0.0
        #: Around its end: who gives back a connection later closes that.
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._run, name="daskps-lane-selector", daemon=True
        )
        _ALL.add(self)
        self._thread.start()

    def take(self, connection: Connection) -> None:
        """Look at a connection that is given to it; from any thread."""
        with self._lock:
            if not self._has_ended:
                self._inbox.append(connection)
                self.wake()
                return
        if not (connection.is_away or connection.miss()):
            self._server.end(connection)

    def wake(self) -> None:
        """Have its thread look at once; from any thread."""
        if not self._is_woken:
            self._is_woken = True
            os.eventfd_write(self._wake, 1)

    def forget(self, connection: Connection) -> None:
        """Look after a connection no longer: it ends, or a thread has it."""
        number = connection.channel.fileno()
        if self._here.pop(number, None) is not None:
            self._epoll.unregister(number)
            self._within.discard(connection)
            if self._desk is not None:
                self._desk.put(number, 0)

    def close(self) -> None:
        """Have its thread end soon."""
        self._is_closed = True
        with self._lock:
            if not self._has_ended:
                self.wake()

    def join(self, end: float) -> bool:
        """Wait for its thread, in the time of `time.monotonic`; return whether it ended."""
        if self._thread is not threading.current_thread():
            self._thread.join(max(0.0, end - time.monotonic()))
        return not self._thread.is_alive()

    # -- its thread ------------------------------------------------------------

    def _run(self) -> None:
        buffer = self._server.begin_thread()
        try:
            while not self._is_closed:
                self._look(buffer)
        finally:
            with self._lock:
                self._has_ended = True
                left = {connection: None for connection, _ in self._here.values()}
                left.update(dict.fromkeys(self._inbox))
            for connection in left:
                self.forget(connection)
                # Else another thread is at it, and finds that this one has ended.
                if not (connection.is_away or connection.miss()):
                    self._server.end(connection)
            _ALL.discard(self)
            self._epoll.close()
            os.close(self._wake)

    def _look(self, buffer: memoryview) -> None:
        now = time.monotonic()
        events = self._poll(self._seconds(now))
        self._now = now = time.monotonic()
        # One alone has its answer soonest so.
        batch = self._batch if len(events) > 1 else None
        for number, _ in events:
            if number == self._wake:
                # First: who wakes it between the two would be read away, and nobody
                # would wake it again. What came until then is in the inbox.
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(number)
                self._is_woken = False
            # Another event may have ended it.
            elif (found := self._here.get(number)) is not None:
                self._hear(found[0], buffer, batch)
        self._answer_batch()
        # Once around: what others bring meanwhile comes after those that have something.
        again, self._again = self._again, []
        for connection in again:
            found = self._here.get(connection.channel.fileno())
            if found is not None and found[0] is connection:
                self._hear(connection, buffer, None)
        for _ in range(len(self._inbox)):
            self._settle(self._inbox.popleft(), buffer)
        now = time.monotonic()
        for connection, waiting in self._ends.take(now):
            self._server.finish(connection, 0.0, waiting)
        if self._within and now >= self._next_sweep:
            self._next_sweep = now + SWEEP_SECONDS
            self._sweep(now)

    def _poll(self, seconds: float) -> list[tuple[int, int]]:
        """Return what has happened; plain reads were answered meanwhile."""
        desk = self._desk
        if desk is None:
            if (loops := loaded()) is not None:
                self._desk = SharedDesk(loops, SMALL_NBYTES, self._epoll.fileno())
            return self._epoll.poll(seconds, MOST_EVENTS)
        events, why, number = desk.wait(
            -1 if seconds < 0 else math.ceil(1000 * seconds)
        )
        if why and (found := self._here.get(number)) is not None:
            connection = found[0]
            try:
                connection.owe(why, desk)
                self._arm(connection, ROOM)
            except OSError as error:
                self._server.end(connection, error)
        return events

    def _seconds(self, now: float) -> float:
        """Return how long it may sleep; -1 for any time."""
        if self._again or self._inbox:
            return 0.0
        ends = [] if (end := self._ends.next) is None else [end]
        ends += [max(self._next_sweep, now)] if self._within else []
        return max(0.0, min(ends) - now) if ends else -1

    def _hear(
        self,
        connection: Connection,
        buffer: memoryview,
        batch: FrameBatch[Connection] | None,
    ) -> None:
        if not connection.is_mine:
            # Who says anything while its call waits has hung up, or is no caller.
            if (waiting := connection.claim()) is not None:
                waiting.cancel()
                self._server.end(connection)
                return
            if connection.miss():
                self.forget(connection)
                return
        self._serve(connection, buffer, batch)

    def _settle(self, connection: Connection, buffer: memoryview) -> None:
        """Look at a connection that was given back, or whose call is done."""
        if connection.is_away or connection.channel.fileno() < 0:
            return  # told late: another thread has it, or it has ended
        if connection.is_mine:
            self._arm(connection, ROOM if connection.n_unsent else BYTES)
            if connection.is_within:
                self._bound(time.monotonic())
            if connection.channel.has_more:
                self._serve(connection, buffer, None)
        elif (waiting := connection.waiting) is not None:
            self._arm(connection, BYTES)
            if waiting.done:
                self._server.finish(connection, 0.0, waiting)
            else:
                self._ends.add(connection, waiting)
        elif not connection.miss():
            self._inbox.append(connection)  # it was given back just now

    def _serve(
        self,
        connection: Connection,
        buffer: memoryview,
        batch: FrameBatch[Connection] | None,
    ) -> None:
        connection.used = self._now
        if self._desk is not None:
            # A call of it may be parked: then another thread sends the answer.
            self._desk.put(connection.channel.fileno(), 0)
        waits = self._server.go_on(connection, buffer, 0.0, batch)
        if waits != BATCH:
            self._heed(connection, waits)
        elif self._batch.is_full:
            self._answer_batch()

    def _answer_batch(self) -> None:
        for connection, found in self._batch.serve():
            self._heed(connection, self._server.reply(connection, found))
        self._server.finish_done(0.0)

    def _heed(self, connection: Connection, waits: int) -> None:
        """Look after a connection that was served, for what it waits for."""
        if waits == ANSWERED:
            self._arm(connection, BYTES)
            if connection.channel.has_more:
                self._again.append(connection)
            elif is_busy(connection):
                self._part(connection)
        elif waits in (BYTES, ROOM):
            self._arm(connection, waits)
        elif waits == THREAD:
            self.forget(connection)
            self._server.give_away(connection)
        elif waits == OTHERS and (waiting := connection.waiting) is not None:
            self._ends.add(connection, waiting)

    def _part(self, connection: Connection) -> None:
        self.forget(connection)
        if not self._server.try_to_stay(connection):
            self._arm(connection, BYTES)

    def _arm(self, connection: Connection, waits: int) -> None:
        number = connection.channel.fileno()
        wanted = _IN if waits == BYTES else select.EPOLLOUT
        found = self._here.get(number)
        is_within = connection.is_within
        if self._desk is not None:
            self._desk.put(number, connection.alone if waits == BYTES else 0)
        if found is not None and found[1] == wanted and not is_within:
            if self._within:
                self._within.discard(connection)
            return
        if found is None:
            self._epoll.register(number, wanted)
            self._here[number] = connection, wanted
        elif found[1] != wanted:
            self._epoll.modify(number, wanted)
            self._here[number] = connection, wanted
        if is_within:
            self._within.add(connection)
        else:
            self._within.discard(connection)

    def _sweep(self, now: float) -> None:
        """Cut those that take too long for what they are at."""
        for connection in list(self._within):
            if connection.is_mine and connection.is_late(now):
                self._server.end(connection)
        self._bound(now)

    def _bound(self, now: float) -> None:
        """Cut the slowest, where what is under way here takes too much memory."""
        if now < self._next_bound:
            return
        self._next_bound = now + LAG_SECONDS
        held = sum(connection.n_held for connection in self._within)
        if held <= MOST_HELD:
            return
        slow = [(one.lag(now), one.n_held, one) for one in self._within if one.is_mine]
        for lag, n, connection in sorted(slow, key=lambda of: of[0], reverse=True):
            if held <= MOST_HELD or lag < LAG_SECONDS:
                break
            held -= n
            self._server.end(connection)

    def leave_to_parent(self) -> None:
        """Close the copies of a forked process."""
        self._has_ended = True
        self._epoll.close()
        os.close(self._wake)


#: Those of this process.
_ALL: weakref.WeakSet[Selector] = weakref.WeakSet()


def _in_child() -> None:
    for selector in list(_ALL):
        selector.leave_to_parent()
    _ALL.clear()


os.register_at_fork(after_in_child=_in_child)
