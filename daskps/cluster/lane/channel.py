"""One end of a lane: a socket that was taken over, and the thread that it belongs to.

One thread at a time sends and receives, in turn. Any thread may shut a channel down;
whoever waits on it hears of it at once. Only the thread that uses it closes it: closing
would not wake it, and its number could be another file's by then.
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

from daskps.cluster.lane.frames import HEAD_NBYTES, Head, unpack_head
from daskps.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

#: What is received at once where little is asked for: small frames come in one call.
BUFFER_NBYTES = 65_536
#: Buffers of one call of the kernel, and bytes, which OpenSSL counts in an int.
MOST_BUFFERS, MOST_NBYTES = 512, 2**30
#: Bytes that the kernel takes before it can send them. More of a large array would be out
#: of the caches by the time that it is on its way.
UNSENT_NBYTES = 65_536


class Channel:
    """One end of a lane.

    Parameters
    ----------
    taken : socket.socket
        The socket, which nobody else uses.
    patience : float
        Seconds without a byte after which the other end is given up within a frame.
    buffer : memoryview, optional
        Where it receives small frames; without it has one of its own.
    """

    def __init__(
        self, taken: socket.socket, patience: float, buffer: memoryview | None = None
    ) -> None:
        self._socket, self._patience, self._until = taken, patience, math.inf
        taken.settimeout(patience)
        self._is_tls = isinstance(taken, ssl.SSLSocket)
        #: Have the kernel fill all of a large array in one call, where it may wait.
        self._all = 0 if self._is_tls else socket.MSG_WAITALL
        if buffer is None:
            buffer = memoryview(bytearray(BUFFER_NBYTES))
        self._buffer = buffer
        self._from = self._to = 0
        _limit_unsent(taken)
        self.is_open = True
        #: Around the ends of the socket: its number is another file's afterwards.
        self._ending = threading.Lock()
        _OPEN.add(self)

    def begin(self, patience: float, seconds: float) -> None:
        """Give the next frames a patience, and all of them so many seconds."""
        if patience != self._patience:
            self._patience = patience
            self._socket.settimeout(max(patience, 0.001))
        self._until = time.monotonic() + seconds

    def send(self, buffers: Sequence[Any]) -> None:
        """Send buffers one after the other, as one frame.

        Raises
        ------
        OSError
            Where the other end is gone, or takes nothing for as long as it may.
        """
        views = [flat(buffer) for buffer in buffers]
        if self._is_tls:
            # Small frames in one record.
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
            Where the other end has closed it, or is too slow.
        ProtocolError
            For bytes that are no head.
        """
        self._fill(HEAD_NBYTES)
        start = self._from
        self._from += HEAD_NBYTES
        return unpack_head(self._buffer[start : self._from])

    def receive_bytes(self, n: int) -> bytes:
        """Return the next bytes, whose number was looked at."""
        found = bytearray(n)
        self.receive_into(found)
        return bytes(found)

    def receive_into(self, buffer: Any) -> None:
        """Receive as many bytes as a buffer has."""
        if not len(buffer):
            return  # of such an array no bytes can be had
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
        """Make sure that nothing follows that nobody has asked for.

        Raises
        ------
        ProtocolError
            Where something does.
        """
        if self._to > self._from:
            raise ProtocolError("a lane has bytes that answer nothing")

    def shut(self) -> None:
        """Wake the thread that waits on it, with an error; from any thread."""
        self.is_open = False
        # Not of an SSLSocket: it would go on in plain bytes.
        with self._ending, contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it, in the thread that uses it."""
        self.shut()
        _OPEN.discard(self)
        with self._ending:
            self._socket.close()

    def forget(self) -> None:
        """Close the copy of a forked process, and leave the lane to its parent."""
        self.is_open = False
        with contextlib.suppress(OSError):
            os.close(self._socket.detach())

    def _fill(self, n: int) -> None:
        """Have at least so many bytes in the buffer, which is longer than that."""
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
            raise TimeoutError("the other end of a lane is too slow")
        if not got:
            raise ConnectionResetError("the other end of a lane has closed it")
        return got


def _limit_unsent(taken: socket.socket) -> None:
    """Have the kernel take no more of a large array than it is about to send."""
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if option is not None and taken.family in (socket.AF_INET, socket.AF_INET6):
        taken.setsockopt(socket.IPPROTO_TCP, option, UNSENT_NBYTES)


def flat(buffer: Any) -> memoryview:
    """Return the bytes of a buffer that has any."""
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


#: Those of this process.
_OPEN: weakref.WeakSet[Channel] = weakref.WeakSet()


def _in_child() -> None:
    for channel in list(_OPEN):
        channel.forget()
    _OPEN.clear()


os.register_at_fork(after_in_child=_in_child)
