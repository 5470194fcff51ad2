"""A thread that stays with one busy lane: the shortest way there is."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from typing import TYPE_CHECKING

from daskps.cluster.lane.waits import ANSWERED, OTHERS, ROOM

if TYPE_CHECKING:
    from daskps.cluster.lane.connection import Connection
    from daskps.cluster.lane.homes import Serving

#: Beside OpenSSL, which takes bytes in before they are a frame's: without one of these
#: for so long a lane is idle.
QUIET_SECONDS = 1.0


class Staying:
    """The home of one connection: a thread that waits in the kernel for its frames.

    Parameters
    ----------
    server : Serving
        What serves it.
    connection : Connection
        The connection.
    seconds : float
        How long its calls may wait for locks.
    """

    def __init__(self, server: Serving, connection: Connection, seconds: float) -> None:
        self._server, self._connection, self._seconds = server, connection, seconds
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        #: Around the end of it: its number is another file's afterwards.
        self._lock, self._is_closed = threading.Lock(), False
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._poll.register(connection.channel.fileno(), select.POLLIN)
        connection.home = self

    def take(self, connection: Connection) -> None:
        """Wake its thread, where it waits for others; from any thread."""
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self._wake, 1)

    def forget(self, connection: Connection) -> None:
        """Do nothing: it ends with its connection."""

    def run(self) -> bool:
        """Serve until the connection ends, or its caller is idle or slow.

        Returns
        -------
        bool
            Whether others go on with it.
        """
        connection, server = self._connection, self._server
        buffer = server.begin_thread()
        while True:
            waits = server.go_on(connection, buffer, self._seconds)
            if waits == ANSWERED:
                continue
            if waits == OTHERS:
                if not self._await():
                    return False
            elif not waits:
                return False
            else:
                is_quiet = not connection.channel.wait(for_room=waits == ROOM)
                now = time.monotonic()
                if not connection.is_within:
                    # Bytes of a record that does not come to its end are none.
                    if is_quiet or now - connection.channel.moved > QUIET_SECONDS:
                        return True
                elif connection.is_behind(now):
                    # The selector has it from here: this thread is for who is quick.
                    connection.is_slow = True
                    return True

    def _await(self) -> bool:
        """Wait until the parked call was answered; return whether it goes on then."""
        connection = self._connection
        while not connection.is_mine:
            waiting, timeout = connection.waiting, None
            if waiting is not None:
                timeout = waiting.end - time.monotonic()
                if waiting.done or timeout <= 0:
                    self._server.finish(connection, self._seconds, waiting)
                    continue
                timeout = 1000 * timeout + 1
            numbers = [number for number, _ in self._poll.poll(timeout)]
            if self._wake in numbers:
                self._drain()
            elif numbers and not self._hear():
                return False
        return True

    def _hear(self) -> bool:
        """Look why there is something to read; return whether the lane goes on."""
        connection = self._connection
        if (waiting := connection.claim()) is not None:
            # Who says anything while its call waits has hung up, or is no caller.
            waiting.cancel()
            self._server.end(connection)
            return False
        if connection.miss():
            # Another thread is at the answer, and says when it no longer is.
            wake = select.poll()
            wake.register(self._wake, select.POLLIN)
            wake.poll()
            self._drain()
        return True

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def close(self) -> None:
        """Free what it has; its thread does that."""
        with self._lock:
            self._is_closed = True
            os.close(self._wake)
