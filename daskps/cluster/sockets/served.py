"""The host's end of a socket: it sends and receives what the socket takes, in steps.

It receives into the buffer of the thread that serves it. Between two frames a socket
has no buffer, and within a frame no more than the array that it is filling.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any

from daskps.cluster.sockets.channel import (
    BUFFER_NBYTES,
    MOST_BUFFERS,
    MOST_NBYTES,
    Channel,
    flat,
)
from daskps.cluster.sockets.frames import HEAD_NBYTES, Head, Rest, Tail, unpack_head

if TYPE_CHECKING:
    from collections.abc import Sequence

_NOW = socket.MSG_DONTWAIT
_NONE = memoryview(b"")
#: They stand for buffers.
_OTHERS = Tail, Rest
_ENDED = "the other end of a socket has closed it"


class ServedChannel(Channel):
    """The host's end of one socket.

    Parameters
    ----------
    taken : socket.socket
        The socket; no other object uses it.
    stall : float
        Seconds without a byte after which a thread stops waiting for this socket.
    """

    def __init__(self, taken: socket.socket, stall: float) -> None:
        super().__init__(taken, stall, _NONE)
        self.stall = stall
        #: When bytes were last received or sent.
        self.moved = time.monotonic()
        if self._is_tls:
            # The socket delivers TLS records: threads wait with `wait`, outside of
            # OpenSSL.
            taken.settimeout(0.0)
        else:
            # The kernel keeps the time: Python would poll before each byte.
            taken.settimeout(None)
            said = struct.pack("ll", int(stall), int(stall % 1 * 1e6))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                taken.setsockopt(socket.SOL_SOCKET, option, said)

    @property
    def is_tls(self) -> bool:
        """Whether the bytes of the socket are encrypted, not those of the frames."""
        return self._is_tls

    def fileno(self) -> int:
        """Return the descriptor of the socket; -1 where it is closed."""
        return self._socket.fileno()

    @property
    def has_more(self) -> bool:
        """Whether received bytes wait here that the descriptor does not show."""
        if self._to > self._from:
            return True
        if not self._is_tls:
            return False
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    @property
    def has_come(self) -> bool:
        """Whether bytes can be received, or the other end has closed the socket."""
        if self.has_more:
            return True
        try:
            # Not the method of SSLSocket, which takes no flags: any byte of a record
            # counts.
            socket.socket.recv(self._socket, 1, socket.MSG_PEEK | _NOW)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    @property
    def is_within(self) -> bool:
        """Whether bytes were received that no frame has consumed."""
        return self._to > self._from

    @property
    def is_bare(self) -> bool:
        """Whether the next bytes of the socket are the beginning of a frame."""
        return not self._is_tls and self._to == self._from

    def receive(self, buffer: memoryview, *, waits: bool, most: int = 0) -> int:
        """Receive into a thread's buffer, on a bare channel; return how many bytes.

        Parameters
        ----------
        buffer : memoryview
            The buffer.
        waits : bool
            Whether the thread waits a little for bytes.
        most : int
            Most bytes to receive; 0 for as many as the buffer takes.

        Raises
        ------
        OSError
            If the other end has closed the socket.
        """
        try:
            n = self._socket.recv_into(buffer, most, 0 if waits else _NOW)
        except BlockingIOError:
            return 0
        if not n:
            raise ConnectionResetError(_ENDED)
        return n

    def lend(self, buffer: memoryview, n: int = 0, taken: int = 0) -> None:
        """Use the buffer of the thread that serves this channel now.

        Parameters
        ----------
        buffer : memoryview
            The buffer.
        n : int
            Bytes already received into it, if the channel had no buffer.
        taken : int
            Bytes of these that a frame has consumed, from the first on.
        """
        rest = self._buffer[self._from : self._to]
        if len(rest):
            n = len(rest)
            buffer[:n] = bytes(rest)
        self._buffer, self._from, self._to = buffer, taken, n

    def give_up_buffer(self) -> None:
        """Give the buffer back; keep a copy of bytes that no frame has consumed."""
        n = self._to - self._from
        self._buffer = (
            memoryview(bytes(self._buffer[self._from : self._to])) if n else _NONE
        )
        self._from, self._to = 0, n

    def try_head(self, *, waits: bool = False) -> Head | None:
        """Return the head of the next frame; None if it has not come yet.

        Parameters
        ----------
        waits : bool
            Whether the thread waits a little for the head.

        Raises
        ------
        OSError
            If the other end has closed the socket.
        ProtocolError
            If the bytes are no head.
        """
        while self._to - self._from < HEAD_NBYTES:
            if self._from:
                self.lend(self._buffer)
            got = self._try_receive(self._buffer[self._to :], waits)
            if not got:
                return None
            self._to += got
        start = self._from
        self._from += HEAD_NBYTES
        return unpack_head(self._buffer[start : self._from])

    def try_fill(self, views: deque[memoryview | Rest], *, waits: bool = False) -> bool:
        """Receive into views, and remove those that are full; return whether all are.

        Raises
        ------
        OSError
            If the other end has closed the socket.
        """
        while views:
            view = views[0]
            if isinstance(view, Rest):
                views.popleft()
                views.extend(views_of(view.find()))
                continue
            if n := min(self._to - self._from, len(view)):
                view[:n] = self._buffer[self._from : self._from + n]
                self._from += n
            elif view and len(view) < len(self._buffer) and len(views) > 1:
                # Receive several small arrays together.
                self._from = self._to = 0
                got = self._try_receive(self._buffer, waits)
                if not got:
                    return False
                self._to = got
                continue
            elif view:
                wanted = view[:MOST_NBYTES]
                n = self._try_receive(wanted, waits, self._all)
                if n < min(len(wanted), BUFFER_NBYTES) and waits and self._all:
                    # The kernel has waited already: no thread waits again.
                    views[0] = view[n:]
                    return False
                if not n:
                    return False
            if n == len(view):
                views.popleft()
            else:
                views[0] = view[n:]
        return True

    def send_some(
        self, buffers: Sequence[Any], *, waits: bool
    ) -> deque[memoryview | Tail] | None:
        """Send what the kernel takes at once; return the rest, None if all is sent.

        Raises
        ------
        OSError
            If the other end is gone.
        """
        if (
            not self._is_tls
            and len(buffers) <= MOST_BUFFERS
            and type(buffers[-1]) is not Tail
        ):
            try:
                sent = self._socket.sendmsg(buffers, (), 0 if waits else _NOW)
            except BlockingIOError:
                sent = 0
            # Most answers are one buffer of bytes.
            n = len(buffers) == 1 and len(buffers[0])
            if sent == (n or sum([memoryview(b).nbytes for b in buffers])):
                return None
            views = views_of(buffers)
            self._take_away(views, sent)
            return views
        views = views_of(buffers)
        return None if self.try_send(views, waits=waits) else views

    def try_send(self, views: deque[memoryview | Tail], *, waits: bool = False) -> bool:
        """Send views, and remove those that are sent; return whether all are.

        Raises
        ------
        OSError
            If the other end is gone, or the answer must not be completed.
        """
        plain = [view for view in views if not isinstance(view, Tail)]
        is_plain = 1 < len(views) == len(plain)
        if self._is_tls and is_plain and sum(map(len, plain)) <= BUFFER_NBYTES:
            # One TLS record for a small frame.
            joined = memoryview(b"".join(plain))
            views.clear()
            views.append(joined)
        while views:
            views[0] = first = _made(views[0])
            try:
                if self._is_tls:
                    sent = self._socket.send(first[:MOST_NBYTES])
                else:
                    few = islice(views, MOST_BUFFERS)
                    some = [view for view in few if not isinstance(view, Tail)]
                    sent = self._socket.sendmsg(some, (), 0 if waits else _NOW)
                    if waits and sent < sum(map(len, some)):
                        # The kernel has waited already: for a caller that takes so
                        # little no thread waits again here.
                        self._take_away(views, sent)
                        return False
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return False
            self._take_away(views, sent)
        return True

    def _take_away(self, views: deque[memoryview | Tail], n: int) -> None:
        while views and n >= len(views[0]):
            n -= len(views.popleft())
        if views:
            self.moved = time.monotonic()
            if n:
                views[0] = _made(views[0])[n:]

    def _try_receive(self, view: memoryview, waits: bool, how: int = 0) -> int:
        """Receive into a view; return how many bytes came, 0 for none."""
        try:
            if self._is_tls:
                got = self._socket.recv_into(view)
            else:
                got = self._socket.recv_into(view, 0, how if waits else _NOW)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0
        if not got:
            raise ConnectionResetError(_ENDED)
        self.moved = now = time.monotonic()
        if now > self._until:
            raise TimeoutError("the other end of a socket is too slow")
        return got

    def expect(self, until: float) -> None:
        """Set when the awaited bytes must be here, by `time.monotonic`."""
        self._until = until

    def wait(self, *, for_room: bool) -> bool:
        """Wait a while; return whether bytes have come, or there is room to send.

        Only for TLS: without it the kernel waits in its own calls.
        """
        if not self._is_tls:
            return False
        poll = select.poll()
        poll.register(self.fileno(), select.POLLOUT if for_room else select.POLLIN)
        return bool(poll.poll(1000 * self.stall))


def views_of(buffers: Sequence[Any]) -> deque[Any]:
    """Return the bytes of buffers, without the empty ones."""
    return deque(
        [
            b if type(b) in _OTHERS else flat(b)
            for b in buffers
            if type(b) in _OTHERS or memoryview(b).nbytes
        ]
    )


def _made(view: memoryview | Tail) -> memoryview:
    return view.made() if isinstance(view, Tail) else view
