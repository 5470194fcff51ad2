"""One lane at its host, as a state machine that any thread may run, one at a time.

It is idle, within a frame, or at its answer; then whoever serves it owns it. Or its call
is parked: nobody owns it, and the first to claim it does. That is who completes what it
waits for, or where its time is up or its caller gone its home: the thread that looks
after its socket.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from daskps.cluster.lane.channel import flat
from daskps.cluster.lane.frames import HEAD_NBYTES, unpack_head
from daskps.cluster.lane.plain_words import (
    QUIET,
    TORN,
    UNSENT,
    WOKEN,
)
from daskps.cluster.lane.served import ServedChannel, views_of
from daskps.cluster.lane.waits import ANSWERED, BATCH, BYTES, OTHERS, ROOM, THREAD
from daskps.errors import ShardBusyError

if TYPE_CHECKING:
    from daskps.cluster.lane.batch import FrameBatch
    from daskps.cluster.lane.calls import Calls, Waiting
    from daskps.cluster.lane.desk import Desk
    from daskps.cluster.lane.frames import Head
    from daskps.cluster.lane.tail import Tail

#: Bodies and answers up to this many bytes are served between those of others.
SMALL_NBYTES = 65_536
#: Seconds without a byte after which a caller is given up in the middle of a frame.
PATIENCE_SECONDS = 30.0
#: The same of one that takes nothing of an answer, whose memory others may wait for.
TAKE_SECONDS = 5.0
#: Without a frame for so long a lane may be ended for one that is asked for.
IDLE_SECONDS = 1.0
#: Bytes of a frame that a caller sends or takes in a second at least.
SLOW_NBYTES = 1_000_000


class Home(Protocol):
    """The thread that looks after the sockets of some connections."""

    def take(self, connection: Connection) -> None:
        """Look at a connection: it was given back, or its call is done."""

    def forget(self, connection: Connection) -> None:
        """Look after a connection no longer: it ends."""


class Connection:
    """One lane.

    Parameters
    ----------
    channel : ServedChannel
        Its socket.
    calls : Calls
        What its frames ask for.
    """

    def __init__(self, channel: ServedChannel, calls: Calls) -> None:
        self.channel, self._calls = channel, calls
        #: Set by whoever becomes it, while owning the connection.
        self.home: Home | None = None
        #: Frames that were begun, and when its home has looked at it last.
        self.n_frames, self.used = 0, time.monotonic()
        #: Since when its frames are counted for being busy, and when it has to be done
        #: with what is under way.
        self._since, self._n_counted, self._until = self.used, 0, math.inf
        #: When that began, and how many bytes it has.
        self._begun, self._nbytes = self.used, 0
        self.is_long = False
        #: How much of a frame is received at first, 0 for all that is there: where large
        #: bodies come its head alone, as the rest needs no copy then.
        self._first = 0
        #: Whether a thread of its own has it, or one for what takes long.
        self.is_away = False
        #: Whether a thread has waited in vain for more of what is under way: none does
        #: again, or slow callers would have them all.
        self.is_slow = False
        self._head: Head | None = None
        self._body: list[Any] = []
        self._wanted: deque[memoryview] = deque()
        self._unsent: deque[memoryview | Tail] = deque()
        #: Around the owner.
        self._lock = threading.Lock()
        self._waiting: Waiting | None = None
        self._is_claimed = self._is_missed = False

    # -- its owner ------------------------------------------------------------

    def go_on(
        self,
        buffer: memoryview,
        seconds: float,
        batch: FrameBatch[Connection] | None = None,
    ) -> int:
        """Go on for one frame at most, or until it would wait; return for what.

        Parameters
        ----------
        buffer : memoryview
            That of this thread.
        seconds : float
            How long it may wait for locks; 0 where it may wait for nothing, and stops
            in front of what takes long.
        batch : FrameBatch, optional
            Where a frame is left that can be answered with others: :meth:`reply` does.

        Returns
        -------
        int
            One of those above. After OTHERS it may belong to somebody else.

        Raises
        ------
        OSError
            Where its caller is gone, or too slow.
        ProtocolError
            For bytes that no caller sends.
        """
        channel, n, taken = self.channel, 0, 0
        waits = seconds > 0 and not self.is_slow
        if self._head is None and not self._unsent and channel.is_bare:
            n = channel.receive(buffer, waits=waits, most=self._first)
            if not n:
                return BYTES
            if n >= HEAD_NBYTES:
                head = unpack_head(buffer[:HEAD_NBYTES])
                if n == HEAD_NBYTES + head.nbytes:
                    self.is_long = False
                    data = buffer[HEAD_NBYTES:n]
                    return self._serve_small(head, data, seconds, batch)
                self._begin(head)
                taken = HEAD_NBYTES
        channel.lend(buffer, n, taken)
        try:
            waits_for = self._gather(waits=waits, may_be_long=seconds > 0)
        finally:
            channel.give_up_buffer()
        return waits_for or self._call(seconds, batch)

    def _gather(self, *, waits: bool, may_be_long: bool) -> int:
        """Send what is left, or receive what is missing; 0 for a frame that is whole."""
        if self._unsent:
            return self._send(waits=waits)
        if self._head is None:
            head = self.channel.try_head(waits=waits)
            if head is None:
                return BYTES
            self._begin(head)
        if self.is_long and not may_be_long:
            return THREAD
        is_whole = not self._wanted or self.channel.try_fill(self._wanted, waits=waits)
        return 0 if is_whole else BYTES

    def _begin(self, head: Head) -> None:
        self._body = self._calls.wanted(head)
        self._wanted = views_of(self._body)
        self._head = head
        is_large = head.nbytes > SMALL_NBYTES
        self._first = HEAD_NBYTES if is_large else 0
        self.is_long = is_large or self._calls.is_long(head)
        self._expect(head.nbytes)

    def _serve_small(
        self,
        head: Head,
        data: memoryview,
        seconds: float,
        batch: FrameBatch[Connection] | None,
    ) -> int:
        """Serve a frame that has come in one piece, as most do."""
        self._body = body = self._calls.wanted(head)
        at = 0
        for buffer in body:
            if n := memoryview(buffer).nbytes:
                flat(buffer)[:] = data[at : at + n]
                at += n
        self._head = head
        if not seconds:
            self.is_long = self._calls.is_long(head)
            if self.is_long:
                return THREAD
        return self._call(seconds, batch)

    def _call(self, seconds: float, batch: FrameBatch[Connection] | None) -> int:
        head, body = self._head, self._body
        self._head, self._body = None, []
        if self._until < math.inf:
            self._until, self.is_slow = math.inf, False
            self.channel.expect(math.inf)
        self.n_frames += 1
        assert head is not None  # for the types
        if batch is not None:
            batch.add(self, self._calls.begin(head, body, seconds, batch.queues))
            return BATCH
        found = self._calls.begin(head, body, seconds)
        if isinstance(found, list):
            return self._send_first(found, waits=seconds > 0)
        self.is_long = self.is_long or self._calls.is_long(head)
        return self._park(found)

    def _park(self, waiting: Waiting) -> int:
        with self._lock:
            self._waiting = waiting
        return OTHERS

    def reply(self, found: list[Any] | Waiting) -> int:
        """Answer a frame whose batch was served; return what it waits for.

        Raises
        ------
        OSError
            Where its caller is gone.
        """
        if isinstance(found, list):
            return self._send_first(found, waits=False)
        # A read whose turn does not come waits as well.
        with contextlib.suppress(ShardBusyError):
            if found.done:
                return self._send_first(found.finish(0.0), waits=False)
        return self._park(found)

    def _send_first(self, frame: list[Any], *, waits: bool) -> int:
        rest = self.channel.send_some(frame, waits=waits)
        if rest is None:
            return ANSWERED
        self._unsent = rest
        self._expect(self.n_unsent)
        return ROOM

    def _send(self, *, waits: bool) -> int:
        if self.channel.try_send(self._unsent, waits=waits):
            self._until, self.is_slow = math.inf, False
            return ANSWERED
        if self._until == math.inf:
            self._expect(self.n_unsent)
        return ROOM

    def _expect(self, nbytes: int) -> None:
        """Give what is under way its time."""
        self.channel.moved = self._begun = now = time.monotonic()
        self._nbytes = nbytes
        self._until = now + PATIENCE_SECONDS + nbytes / SLOW_NBYTES
        self.channel.expect(self._until)

    @property
    def n_unsent(self) -> int:
        """Bytes of its answer that were not sent yet."""
        return sum(map(len, self._unsent))

    @property
    def n_held(self) -> int:
        """Bytes of an answer that were not sent, or of a body that have come."""
        return 0 if self._until == math.inf else self.n_unsent or self._n_moved

    @property
    def _n_moved(self) -> int:
        return self._nbytes - self.n_unsent - sum(map(len, self._wanted))

    def lag(self, now: float) -> float:
        """Return for how many seconds its caller is behind, or nothing has moved."""
        if self._until == math.inf:
            return 0.0
        late = now - self._begun - self._n_moved / SLOW_NBYTES
        return max(late, now - self.channel.moved)

    def is_behind(self, now: float) -> bool:
        """Return whether no thread is to wait for its caller any longer.

        Who sends or takes a byte now and then would have a thread to itself for as long
        as it likes, and a few of them all threads.
        """
        late = max(self.lag(now), now - self.channel.moved)
        return self.is_within and late > self.channel.stall / 2

    def is_busy(self, n: int, seconds: float) -> bool:
        """Return whether so many frames were served here within so many seconds."""
        self._n_counted += 1
        if self._n_counted < n:
            return False
        since, self._since, self._n_counted = self._since, self.used, 0
        return self.used - since < seconds

    def is_idle(self, now: float) -> bool:
        """Return whether its caller has not asked for anything for a while."""
        is_idle = self.is_mine and not self.is_within
        return is_idle and now - max(self.used, self._calls.used) > IDLE_SECONDS

    @property
    def alone(self) -> int:
        """The address of what compiled loops answer here by themselves; 0 for nothing.

        For who owns it, and only until something else is done with it.
        """
        if not self._calls.has_alone or self._head is not None or self.is_within:
            return 0
        if not (self.is_mine and self.channel.is_bare):
            return 0
        return self._calls.alone

    def answer_alone(self, desk: Desk, milliseconds: int) -> bool:
        """Have a compiled loop answer; return whether anything else has come.

        Parameters
        ----------
        desk : Desk
            That of this thread, which owns the connection.
        milliseconds : int
            How long nothing may come.

        Raises
        ------
        OSError
            Where its caller is gone.
        """
        while lane := self.alone:
            why = desk.serve(lane, milliseconds)
            if why == WOKEN:
                continue
            if why in (UNSENT, TORN):
                self.owe(why, desk)
            return why != QUIET
        return True

    def owe(self, why: int, desk: Desk) -> None:
        """Take what a compiled loop could not send of an answer.

        Raises
        ------
        OSError
            Where nobody takes it.
        """
        if why == TORN:
            raise ConnectionResetError("the other end of a lane has closed it")
        self._unsent = views_of([desk.unsent])
        self._expect(self.n_unsent)

    @property
    def is_within(self) -> bool:
        """Whether it is inside of a frame, or of an answer."""
        return self._until < math.inf or self.channel.is_within

    def is_late(self, now: float) -> bool:
        """Return whether its caller is to be given up, where it is inside of a frame."""
        patience = TAKE_SECONDS if self._unsent else PATIENCE_SECONDS
        late = min(self._until, self.channel.moved + patience)
        return self.is_within and now > late

    # -- a call that is parked: whoever claims it owns the connection ----------

    @property
    def is_mine(self) -> bool:
        """Whether no call of it is parked or claimed: its home has it, or a thread."""
        return self._waiting is None and not self._is_claimed

    @property
    def waiting(self) -> Waiting | None:
        """The call that waits, unless somebody has claimed it."""
        return self._waiting

    def claim(self, waiting: Waiting | None = None) -> Waiting | None:
        """Own the connection whose call waits; None where another one does."""
        with self._lock:
            found = self._waiting
            if found is None or (waiting is not None and found is not waiting):
                return None
            self._waiting, self._is_claimed = None, True
        return found

    def answer(self, frame: list[Any]) -> None:
        """Send what answers a call that was claimed, as far as that goes at once.

        Raises
        ------
        OSError
            Where its caller is gone.
        """
        self._unsent = views_of(frame)
        self._send(waits=False)

    def give_back(self) -> None:
        """Leave a connection that was claimed to its home."""
        with self._lock:
            self._is_claimed = False
            is_missed, self._is_missed = self._is_missed, False
            home = self.home
        if home is not None and (is_missed or self._unsent or not self.channel.is_open):
            home.take(self)

    def miss(self) -> bool:
        """Return whether it is claimed; its home is told then when it no longer is."""
        with self._lock:
            self._is_missed = self._is_claimed
            return self._is_claimed

    def end(self) -> None:
        """Close it; its owner does, or whoever claims its call here."""
        if (waiting := self.claim()) is not None:
            waiting.cancel()
        self.channel.close()
        # Who still knows of it keeps no array.
        self._body, self._wanted, self._unsent = [], deque(), deque()
