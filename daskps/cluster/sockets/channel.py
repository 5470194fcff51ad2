"""One end of a connection: a socket and its receive buffer.

One thread at a time sends and receives, in turn. Any thread may shut a channel down;
a thread that waits on it gets an error at once. Only the thread that uses a channel
closes it: closing would not wake that thread, and the kernel may give the same
descriptor to another file by then.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import ssl
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from daskps.cluster.sockets.frames import HEAD_NBYTES, Head, unpack_head
from daskps.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Bytes asked for in one receive where a frame is small: small frames come in one call.
BUFFER_NBYTES = 65_536
#: Buffers and bytes of one system call; OpenSSL counts the bytes in an int.
MOST_BUFFERS, MOST_NBYTES = 512, 2**30
#: Bytes that the kernel takes before it can send them. With more of a large array the
#: CPU caches would have lost them when they are sent.
UNSENT_NBYTES = 65_536


class Channel:
    """One end of a socket.

    Parameters
    ----------
    taken : socket.socket
        The socket; no other object uses it.
    patience : float
        Seconds without a byte, within a frame, after which the channel gives up the
        other end.
    buffer : memoryview, optional
        Memory to receive small frames in; by default the channel makes its own.
    """

    def __init__(
        self, taken: socket.socket, patience: float, buffer: memoryview | None = None
    ) -> None:
        self._socket, self._patience, self._until = taken, patience, math.inf
        taken.settimeout(patience)
        self._is_tls = isinstance(taken, ssl.SSLSocket)
        #: Lets the kernel fill a large array in one call, where the socket may wait.
        self._all = 0 if self._is_tls else socket.MSG_WAITALL
        if buffer is None:
            buffer = memoryview(bytearray(BUFFER_NBYTES))
        self._buffer = buffer
        self._from = self._to = 0
        _limit_unsent(taken)
        self.is_open = True
        #: Guards shutdown and close: a closed descriptor may be another file's.
        self._ending = threading.Lock()
        _OPEN.add(self)

    def set_limits(self, patience: float, seconds: float) -> None:
        """Set the patience for the next frames, and the seconds for all of them."""
        if patience != self._patience:
            self._patience = patience
            self._socket.settimeout(max(patience, 0.001))
        self._until = time.monotonic() + seconds

    def send(self, buffers: Sequence[Any]) -> None:
        """Send buffers one after the other, as one frame.

        Raises
        ------
        OSError
            If the other end is gone, or takes no byte for as long as it may.
        """
        views = [flat(buffer) for buffer in buffers]
        if self._is_tls:
            # One TLS record for a small frame.
            if sum(map(len, views)) <= BUFFER_NBYTES:
                views = [memoryview(b"".join(views))]
            for view in views:
                while view:
                    view = view[self._socket.send(view[:MOST_NBYTES]) :]
            return
        while views:
            sent = self._socket.sendmsg(views[:MOST_BUFFERS])
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]

    def receive_head(self) -> Head:
        """Return the head of the next frame.

        Raises
        ------
        OSError
            If the other end has closed the socket, or is too slow.
        ProtocolError
            For bytes that are no head.
        """
        self._fill(HEAD_NBYTES)
        start = self._from
        self._from += HEAD_NBYTES
        return unpack_head(self._buffer[start : self._from])

    def receive_bytes(self, n: int) -> bytes:
        """Return the next `n` bytes; the caller has checked their number."""
        found = bytearray(n)
        self.receive_into(found)
        return bytes(found)

    def receive_into(self, buffer: Any) -> None:
        """Receive as many bytes as a buffer has."""
        if not len(buffer):
            return  # an empty buffer has no view of its bytes
        view = flat(buffer)
        ready = min(self._to - self._from, len(view))
        view[:ready] = self._buffer[self._from : self._from + ready]
        self._from += ready
        view = view[ready:]
        if len(view) >= BUFFER_NBYTES:
            while view:
                view = view[self._receive(view[:MOST_NBYTES], self._all) :]
        elif view:
            self._fill(len(view))
            view[:] = self._buffer[self._from : self._from + len(view)]
            self._from += len(view)

    def end_frame(self) -> None:
        """Check that no byte follows the frame: each frame answers one request.

        Raises
        ------
        ProtocolError
            If a byte does.
        """
        if self._to > self._from:
            raise ProtocolError("a socket has bytes that answer nothing")

    def shut(self) -> None:
        """Wake the thread that waits on it, with an error; any thread may call this."""
        self.is_open = False
        # Not the method of SSLSocket: the socket would go on in plain bytes.
        with self._ending, contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it, in the thread that uses it."""
        self.shut()
        _OPEN.discard(self)
        with self._ending:
            self._socket.close()

    def forget(self) -> None:
        """Close the copy in a forked child; the socket stays the parent's."""
        self.is_open = False
        with contextlib.suppress(OSError):
            os.close(self._socket.detach())

    def _fill(self, n: int) -> None:
        """Receive until the buffer, which is longer, holds at least `n` bytes."""
        if self._to - self._from >= n:
            return
        if self._from:
            rest = bytes(self._buffer[self._from : self._to])
            self._from, self._to = 0, len(rest)
            self._buffer[: self._to] = rest
        while self._to < n:
            self._to += self._receive(self._buffer[self._to :])

    def _receive(self, view: memoryview, flags: int = 0) -> int:
        got = self._socket.recv_into(view, 0, flags)
        if time.monotonic() > self._until:
            raise TimeoutError("the other end of a socket is too slow")
        if not got:
            raise ConnectionResetError("the other end of a socket has closed it")
        return got


def _limit_unsent(taken: socket.socket) -> None:
    """Limit what the kernel takes of a large array before it sends it."""
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if option is not None and taken.family in (socket.AF_INET, socket.AF_INET6):
        taken.setsockopt(socket.IPPROTO_TCP, option, UNSENT_NBYTES)


def flat(buffer: Any) -> memoryview:
    """Return a buffer, which is not empty, as a view of its bytes."""
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


#: The open channels of this process.
_OPEN: weakref.WeakSet[Channel] = weakref.WeakSet()


def _in_child() -> None:
    for channel in list(_OPEN):
        channel.forget()
    _OPEN.clear()


os.register_at_fork(after_in_child=_in_child)
