"""One lane at its host, as a state machine that any thread may run, one at a time.

It is idle, within a frame, or at its answer, and has an event in the set of sockets that
a thread takes; that thread owns it until it leaves it there again. Or its call is parked:
then the thread that completes the call owns it as well, for the time of its answer. The
first of the two that comes does, and the other one has nothing to do.
"""

from __future__ import annotations

import math
import select
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from daskps.cluster.lane.channel import flat
from daskps.cluster.lane.frames import HEAD_NBYTES, unpack_head
from daskps.cluster.lane.served import ServedChannel, views_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.cluster.lane.calls import Calls, Waiting
    from daskps.cluster.lane.frames import Head
    from daskps.cluster.lane.tail import Tail

#: What a connection waits for before it goes on: bytes of a frame, room for those of an
#: answer, what others do to its call; or nothing, it has answered.
BYTES: Final = 1
ROOM: Final = 2
OTHERS: Final = 3
ANSWERED: Final = 4
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
#: Events of a socket: bytes have come or its caller is gone; there is room for some. One
#: of them, once.
_IN = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT
_OUT = select.EPOLLOUT | select.EPOLLONESHOT


def _stay() -> float:
    return 0.0


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
        #: Frames that were begun, and when a thread has looked at it last.
        self.n_frames, self.used = 0, time.monotonic()
        #: How many in a row were answered at once, and the next one came soon.
        self.n_quick = 0
        #: When it has to be done with what is under way, when that began, and how many
        #: bytes it has.
        self._until, self._begun, self._nbytes = math.inf, self.used, 0
        self.is_long = False
        #: How much of a frame is received at first, 0 for all that is there: where large
        #: bodies come its head alone, as the rest needs no copy then.
        self._first = 0
        #: Whether a thread has waited in vain for more of what is under way: none does
        #: again, or slow callers would have them all.
        self.is_slow = False
        self._head: Head | None = None
        self._body: list[Any] = []
        self._wanted: deque[memoryview] = deque()
        self._unsent: deque[memoryview | Tail] = deque()
        #: The call that is parked.
        self.waiting: Waiting | None = None
        #: Around its owner, and the event that it has in the set of sockets: 0 where it
        #: has come, None where it never had one.
        self.lock = threading.Lock()
        self.is_owned = False
        self._event: int | None = None

    # -- its owner ------------------------------------------------------------

    def own(self) -> bool:
        """Own it for its event, which came; return whether no other thread does."""
        with self.lock:
            self._event = 0
            is_free, self.is_owned = not self.is_owned, True
        return is_free

    def claim(self, waiting: Waiting) -> bool:
        """Own it to answer a call that waits; return whether that is for this thread."""
        with self.lock:
            if self.is_owned or self.waiting is not waiting:
                return False
            self.is_owned, self.waiting = True, None
        return True

    def leave(self, events: select.epoll) -> bool:
        """Own it no longer: whoever takes its next event from a set does.

        Returns
        -------
        bool
            Whether it was inside of a frame, or of an answer.
        """
        is_within, event = self.is_within, _IN
        if self._unsent or (
            (is_within or self.channel.is_tls) and self.channel.has_more
        ):
            event = _OUT
        with self.lock:
            self.is_owned = False
            if self._event != event:  # else one that is there brings a thread as well
                self._wait_for(events, event)
        return is_within

    def hand_over(self, events: select.epoll, waiting: Waiting) -> None:
        """Have a thread that takes events answer a call, unless that is done."""
        with self.lock:
            if self.waiting is waiting and not self.is_owned:
                self._wait_for(events, _OUT)

    def _wait_for(self, events: select.epoll, event: int) -> None:
        put = events.register if self._event is None else events.modify
        put(self.channel.fileno(), event)
        self._event = event

    def go_on(
        self, buffer: memoryview, seconds: float, leave: Callable[[], float] = _stay
    ) -> int:
        """Go on for one frame at most, or until it would wait; return for what.

        Parameters
        ----------
        buffer : memoryview
            That of this thread.
        seconds : float
            How long it may wait for locks; 0 where it may wait for nothing.
        leave : callable
            Called before what takes long; returns for how long it may wait then.

        Returns
        -------
        int
            One of those above.

        Raises
        ------
        OSError
            Where its caller is gone, or too slow.
        ProtocolError
            For bytes that no caller sends.
        """
        channel, n, taken = self.channel, 0, 0
        if self._head is None and not self._unsent and channel.is_bare:
            n = channel.receive(buffer, waits=seconds > 0, most=self._first)
            if not n:
                return BYTES
            if n == HEAD_NBYTES and (found := self._calls.read_now(buffer)):
                self.n_frames += 1
                self.is_long = False
                return self.answer([found], waits=seconds > 0)
            if n >= HEAD_NBYTES:
                head = unpack_head(buffer[:HEAD_NBYTES])
                if n == HEAD_NBYTES + head.nbytes:
                    data = buffer[HEAD_NBYTES:n]
                    return self._serve_small(head, data, seconds, leave)
                self._begin(head)
                taken = HEAD_NBYTES
        channel.lend(buffer, n, taken)
        try:
            if waits_for := self._gather(seconds, leave):
                return waits_for
        finally:
            channel.give_up_buffer()
        return self._call(seconds or (self.is_long and leave()))

    def _gather(self, seconds: float, leave: Callable[[], float]) -> int:
        """Send what is left, or receive what is missing; 0 for a frame that is whole."""
        if self._head is None and not self._unsent:
            head = self.channel.try_head(waits=seconds > 0)
            if head is None:
                return BYTES
            self._begin(head)
        waits = not self.is_slow and (seconds or (self.is_long and leave())) > 0
        if self._unsent:
            return self._send(waits=waits)
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
        leave: Callable[[], float],
    ) -> int:
        """Serve a frame that has come in one piece, as most do."""
        self._body = body = self._calls.wanted(head)
        at = 0
        for buffer in body:
            if n := memoryview(buffer).nbytes:
                flat(buffer)[:] = data[at : at + n]
                at += n
        self._head = head
        self.is_long = self._calls.is_long(head)
        return self._call(seconds or (self.is_long and leave()))

    def _call(self, seconds: float) -> int:
        head, body = self._head, self._body
        self._head, self._body = None, []
        if self._until < math.inf:
            self._until, self.is_slow = math.inf, False
            self.channel.expect(math.inf)
        self.n_frames += 1
        assert head is not None  # for the types
        found = self._calls.begin(head, body, seconds)
        if isinstance(found, list):
            return self.answer(found, waits=seconds > 0)
        self.waiting = found
        return OTHERS

    def _send(self, *, waits: bool) -> int:
        if self.channel.try_send(self._unsent, waits=waits):
            self._until, self.is_slow = math.inf, False
            return ANSWERED
        if self._until == math.inf:
            self._expect(self.n_unsent)
        return ROOM

    def answer(self, frame: list[Any], *, waits: bool = False) -> int:
        """Send what answers a call, as far as that goes; return what it waits for then.

        Raises
        ------
        OSError
            Where its caller is gone.
        """
        self.waiting = None
        rest = self.channel.send_some(frame, waits=waits)
        if rest is None:
            return ANSWERED
        self._unsent = rest
        self._expect(self.n_unsent)
        return ROOM

    def _expect(self, nbytes: int) -> None:
        """Give what is under way its time."""
        self.channel.moved = self._begun = now = time.monotonic()
        self._nbytes = nbytes
        self._until = now + PATIENCE_SECONDS + nbytes / SLOW_NBYTES
        self.channel.expect(self._until)

    # -- what others see --------------------------------------------------------

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

    def is_idle(self, now: float) -> bool:
        """Return whether its caller has not asked for anything for a while."""
        is_asked = self.is_owned or self.waiting is not None or self.is_within
        return not is_asked and now - self.used > IDLE_SECONDS

    @property
    def is_within(self) -> bool:
        """Whether it is inside of a frame, or of an answer."""
        return self._until < math.inf or self.channel.is_within

    def is_late(self, now: float) -> bool:
        """Return whether its caller is to be given up, where it is inside of a frame."""
        patience = TAKE_SECONDS if self._unsent else PATIENCE_SECONDS
        late = min(self._until, self.channel.moved + patience)
        return self.is_within and now > late

    def end(self) -> None:
        """Close it; its owner does."""
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            waiting.cancel()
        self.channel.close()
        # Who still knows of it keeps no array.
        self._body, self._wanted, self._unsent = [], deque(), deque()
