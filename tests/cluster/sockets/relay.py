"""A connection that somebody listens to: what passes between two ends, as it passes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Of a record of TLS: what it is, two bytes of version, two of its length.
RECORD_NBYTES = 5
#: Application data: the only kind whose contents are the ends' own.
DATA = 23


class Relay:
    """Passes bytes on between two sockets, and keeps them.

    Parameters
    ----------
    here, there : socket.socket
        Its own two sockets; it closes them.
    """

    def __init__(self, here: socket.socket, there: socket.socket) -> None:
        self._sockets = here, there
        #: What becomes of what comes from `here`.
        self.change: Callable[[bytes], bytes] = bytes
        #: What came from `here`, and from `there`.
        self.sent, self.answered = bytearray(), bytearray()
        self._threads = [
            threading.Thread(target=self._run, args=args)
            for args in ((here, there, self.sent), (there, here, self.answered))
        ]

    def start(self) -> None:
        """Begin to pass bytes on."""
        for thread in self._threads:
            thread.start()

    def _run(self, source: socket.socket, to: socket.socket, kept: bytearray) -> None:
        with contextlib.suppress(OSError):
            while got := source.recv(2**18):
                kept += got
                to.sendall(self.change(got) if kept is self.sent else got)
        with contextlib.suppress(OSError):
            to.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """End both connections without another byte."""
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End them, and wait until nothing passes any more."""
        self.cut()
        for thread in self._threads:
            thread.join()
        for end in self._sockets:
            end.close()


def records(data: bytes | bytearray) -> list[tuple[int, int]]:
    """Return kind and length of the records of TLS that bytes begin with."""
    found, at = [], 0
    while at + RECORD_NBYTES <= len(data):
        n = int.from_bytes(data[at + 3 : at + RECORD_NBYTES])
        found.append((data[at], n))
        at += RECORD_NBYTES + n
    return found


@contextmanager
def relayed() -> Iterator[tuple[socket.socket, socket.socket, Relay]]:
    """Give both ends of a connection, and who listens."""
    here, one = socket.socketpair()
    two, there = socket.socketpair()
    with here, there:
        relay = Relay(one, two)
        relay.start()
        try:
            yield here, there, relay
        finally:
            relay.close()


@contextmanager
def listening(port: int) -> Iterator[tuple[int, list[Relay]]]:
    """Give a port whose connections are passed on to another, and those who listen."""
    relays: list[Relay] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    here, _ = server.accept()
                    there = socket.create_connection(("127.0.0.1", port))
                    relays.append(Relay(here, there))
                    # Last: who hears something through it finds it in the list.
                    relays[-1].start()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield server.getsockname()[1], relays
        finally:
            # Closing alone would not wake it.
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for relay in relays:
                relay.close()
