"""The host's state machine of one socket; any thread may run it, one at a time.

A socket is idle, within a frame, or at its answer, and has an event in the epoll set.
The thread that takes the event owns the socket until it puts the event back. While the
call of a socket is parked, the thread that completes the call may own the socket as
well, to send the answer: the first of the two sends it, and the other one has nothing
to do.
"""

from __future__ import annotations

import math
import select
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol

from daskps.cluster.protocol.deadline import TAKE_SECONDS
from daskps.cluster.sockets.channel import flat
from daskps.cluster.sockets.frames import HEAD_NBYTES, unpack_head
from daskps.cluster.sockets.served import ServedChannel, views_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.cluster.sockets.frames import Head, Rest, Tail


#: A connection waits for bytes of a frame, for room to send bytes of an answer, for
#: other callers to complete its call; or for nothing, as it has answered.
BYTES: Final = 1
ROOM: Final = 2
OTHERS: Final = 3
ANSWERED: Final = 4
#: A thread serves bodies and answers up to this size between those of other sockets.
SMALL_NBYTES = 65_536
#: Seconds without a byte, in the middle of a frame, after which the host gives up a
#: caller.
PATIENCE_SECONDS = 30.0
#: The host may end a socket without a frame for so long, to give one to another caller.
IDLE_SECONDS = 1.0
#: Least bytes of a frame that a caller must send or take in a second.
_SLOW_NBYTES = 1_000_000
#: Events of a socket: bytes have come or its caller is gone; there is room to send. The
#: set reports one of them, once.
_IN = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT
_OUT = select.EPOLLOUT | select.EPOLLONESHOT


class ParkedCall(Protocol):
    """A call that waits for other callers; its owner finishes or cancels it, once.

    It is `Parked` of :mod:`daskps.cluster.host.calls`.
    """

    #: The latest time to finish it, by `time.monotonic`.
    end: float

    @property
    def done(self) -> bool:
        """Whether none of its tickets waits any more."""

    def then(self, callback: Callable[[], None]) -> None:
        """Call a function when it is done, in the thread that completes it."""

    def finish(self, seconds: float) -> list[Any] | ParkedCall:
        """Return the frame that answers it, or a call to wait for in its place.

        Raises
        ------
        ShardBusyError
            If the answer takes longer than that; the caller may ask again.
        """

    def cancel(self) -> None:
        """Forget it: its answer is not sent."""


class Calls(Protocol):
    """The calls in the frames of one socket: `SocketCalls`, and `HostTemplate` in it."""

    def read_now(self, data: memoryview) -> bytearray | None:
        """Return the answer to a frame without a body that only reads; None for others.

        The buffer is valid until the next call: the caller sends it before.
        """

    def wanted(self, head: Head) -> list[Any]:
        """Return the buffers for the body of a frame."""

    def is_long(self, head: Head) -> bool:
        """Return whether its answer takes long, or has many bytes."""

    def begin(
        self, head: Head, body: Sequence[Any], seconds: float
    ) -> list[Any] | ParkedCall:
        """Return the frame that answers one, or the call that waits."""

    def closed(self) -> None:
        """Hear that the socket is closed, in the thread that has served it last."""


def _stay() -> float:
    return 0.0


class Connection:
    """The host's side of one socket.

    Parameters
    ----------
    channel : ServedChannel
        Its socket.
    calls : Calls
        Serves the calls in its frames.
    """

    def __init__(self, channel: ServedChannel, calls: Calls) -> None:
        self.channel, self._calls = channel, calls
        #: Frames begun, and the time when a thread last served this socket.
        self.n_frames, self.used = 0, time.monotonic()
        #: Frames in a row that were answered at once and soon followed by the next.
        self.n_quick = 0
        #: The frame or answer under way: its latest end, its beginning, its bytes.
        self._until, self._begun, self._nbytes = math.inf, self.used, 0
        self.is_long = False
        #: Bytes of a frame to receive first, 0 for all that have come: a socket with
        #: large bodies receives the head alone, as the body then needs no copy.
        self._first = 0
        #: Whether a thread has waited in vain for more of this frame or answer. No
        #: thread waits again: slow callers could occupy all threads.
        self.is_slow = False
        self._head: Head | None = None
        self._body: list[Any] = []
        self._wanted: deque[memoryview | Rest] = deque()
        self._unsent: deque[memoryview | Tail] = deque()
        #: The call that is parked.
        self.waiting: ParkedCall | None = None
        #: Guards the owner, and the event registered in the epoll set: 0 once the event
        #: has come, None before the first.
        self.lock = threading.Lock()
        self.is_owned = False
        self._event: int | None = None

    # -- its owner ------------------------------------------------------------

    def own(self) -> bool:
        """Own it after its event has come; return False if another thread owns it."""
        with self.lock:
            self._event = 0
            is_free, self.is_owned = not self.is_owned, True
        return is_free

    def claim(self, waiting: ParkedCall) -> bool:
        """Own it to answer a parked call; return whether this thread may answer."""
        with self.lock:
            if self.is_owned or self.waiting is not waiting:
                return False
            self.is_owned, self.waiting = True, None
        return True

    def leave(self, events: select.epoll) -> bool:
        """Stop owning it: the thread that takes its next event owns it then.

        Returns
        -------
        bool
            Whether the socket is within a frame or an answer.
        """
        is_within, event = self.is_within, _IN
        if self._unsent or (
            (is_within or self.channel.is_tls) and self.channel.has_more
        ):
            event = _OUT
        with self.lock:
            self.is_owned = False
            if self._event != event:  # else the set has this event already
                self._wait_for(events, event)
        return is_within

    def hand_over(self, events: select.epoll, waiting: ParkedCall) -> None:
        """Let a thread of the set answer a parked call, unless one has answered it."""
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
        """Serve one frame at most, or stop where it would wait; return the reason.

        Parameters
        ----------
        buffer : memoryview
            The buffer of this thread.
        seconds : float
            How long this thread may wait for locks; 0 if it may not wait at all.
        leave : callable
            Called before long work; returns for how long this thread may wait then.

        Returns
        -------
        int
            BYTES, ROOM, OTHERS or ANSWERED.

        Raises
        ------
        OSError
            If its caller is gone, or too slow.
        ProtocolError
            If the bytes are no frame of a caller.
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
        """Send or receive what is left; return 0 once a frame is whole."""
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
        """Serve a frame that has come in one piece, as most frames do."""
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
        # `SocketCalls.begin` (`cluster/host/socket_calls.py`), to `HostTemplate.begin`.
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
        """Send an answer as far as the socket takes it; return what it waits for then.

        Raises
        ------
        OSError
            If its caller is gone.
        """
        self.waiting = None
        rest = self.channel.send_some(frame, waits=waits)
        if rest is None:
            return ANSWERED
        self._unsent = rest
        self._expect(self.n_unsent)
        return ROOM

    def _expect(self, nbytes: int) -> None:
        """Set the latest end of the frame or answer that begins, from its bytes."""
        self.channel.moved = self._begun = now = time.monotonic()
        self._nbytes = nbytes
        self._until = now + PATIENCE_SECONDS + nbytes / _SLOW_NBYTES
        self.channel.expect(self._until)

    # -- inspection -------------------------------------------------------------

    @property
    def n_unsent(self) -> int:
        """Bytes of its answer that the socket has not taken yet."""
        return sum(map(len, self._unsent))

    @property
    def n_held(self) -> int:
        """Bytes of an answer not sent yet, or of a body received so far."""
        return 0 if self._until == math.inf else self.n_unsent or self._n_moved

    @property
    def _n_moved(self) -> int:
        return self._nbytes - self.n_unsent - sum(map(len, self._wanted))

    def lag(self, now: float) -> float:
        """Return for how many seconds its caller is behind, or no byte has moved."""
        if self._until == math.inf:
            return 0.0
        late = now - self._begun - self._n_moved / _SLOW_NBYTES
        return max(late, now - self.channel.moved)

    def is_behind(self, now: float) -> bool:
        """Return whether threads must stop waiting for its caller.

        A caller that sends or takes a byte now and then would keep a thread for as long
        as it likes, and a few such callers would keep all threads.
        """
        late = max(self.lag(now), now - self.channel.moved)
        return self.is_within and late > self.channel.stall / 2

    def is_idle(self, now: float) -> bool:
        """Return whether its caller has sent no request for a while."""
        is_asked = self.is_owned or self.waiting is not None or self.is_within
        return not is_asked and now - self.used > IDLE_SECONDS

    @property
    def is_within(self) -> bool:
        """Whether it is within a frame or an answer."""
        return self._until < math.inf or self.channel.is_within

    def is_late(self, now: float) -> bool:
        """Return whether the host must give up its caller, within a frame or answer."""
        patience = TAKE_SECONDS if self._unsent else PATIENCE_SECONDS
        late = min(self._until, self.channel.moved + patience)
        return self.is_within and now > late

    def end(self) -> None:
        """Close it; only its owner may call this."""
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            waiting.cancel()
        self.channel.close()
        # Objects that still refer to this connection must not keep its arrays alive.
        self._body, self._wanted, self._unsent = [], deque(), deque()
        self._calls.closed()
