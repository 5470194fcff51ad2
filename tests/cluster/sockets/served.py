"""Sockets that are served without a cluster: what they ask for is made up here."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from daskps.cluster.sockets.connection import Connection
from daskps.cluster.sockets.frames import (
    ANSWER,
    CALL,
    HEAD_NBYTES,
    Head,
    pack_head,
    unpack_head,
)
from daskps.cluster.sockets.served import ServedChannel
from daskps.cluster.sockets.serving import SocketServer
from daskps.errors import ShardBusyError

#: Templates of the calls here: answered at once with their body; parked; answered with
#: as many bytes as the clock says; as these, by another thread.
ECHO, PARK, MANY, LONG = range(4)


class Parked:
    """A call that waits until a test says that it is done."""

    def __init__(self, head: Head, seconds: float) -> None:
        self.head, self.end = head, seconds
        self.done = self.cancelled = False
        self.is_busy = False
        self.by: list[str] = []
        self.parked = threading.Event()
        self._callback: Callable[[], None] | None = None

    def then(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self.parked.set()

    def complete(self) -> None:
        """Be done: this thread has completed it."""
        self.parked.wait(10)
        self.done = True
        assert self._callback is not None
        self._callback()

    def finish(self, seconds: float) -> list[Any]:
        if self.is_busy and not seconds:
            raise ShardBusyError("a read whose turn has not come")
        self.by.append(threading.current_thread().name)
        n = self.head.clock
        said = Head(ANSWER, n, self.head.number, flags=int(self.done))
        return [pack_head(said), np.ones(n, "u1")]

    def cancel(self) -> None:
        self.cancelled = True


class Calls:
    """Makes up answers, and remembers which thread has asked for them."""

    #: When calls that wait are over.
    end = time.monotonic() + 1e6

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.parked: list[Parked] = []
        self.completes: Parked | None = None

    def read_now(self, data: Any) -> None:
        """None of them is a read."""

    def wanted(self, head: Head) -> list[Any]:
        return [np.empty(head.nbytes, "u1"), np.empty(0)]

    def is_long(self, head: Head) -> bool:
        return head.template == LONG

    def closed(self) -> None:
        """It keeps nothing half-done."""

    def begin(self, head: Head, body: Any, seconds: float) -> Any:
        self.threads.append(threading.current_thread().name)
        if head.template == PARK:
            self.parked.append(Parked(head, self.end))
            return self.parked[-1]
        if self.completes is not None:
            self.completes.complete()
        data = np.ones(head.clock, "u1") if head.template in (MANY, LONG) else body[0]
        return [pack_head(Head(ANSWER, data.nbytes, head.number)), data]


class Peer:
    """A caller, and what serves it."""

    def __init__(self, there: socket.socket, connection: Connection, calls: Calls):
        there.settimeout(10)
        self.socket, self.connection, self.calls = there, connection, calls

    def send(self, body: bytes = b"", template: int = ECHO, clock: int = 0) -> None:
        self.socket.sendall(frame(body, template, clock))

    def receive(self) -> tuple[Head, bytes]:
        head = unpack_head(self.exactly(HEAD_NBYTES))
        return head, self.exactly(head.nbytes)

    def exactly(self, n: int) -> bytes:
        found = bytearray()
        while len(found) < n:
            got = self.socket.recv(n - len(found))
            assert got, "the socket has ended"
            found += got
        return bytes(found)

    def ask(self, body: bytes = b"", template: int = ECHO, clock: int = 0) -> bytes:
        self.send(body, template, clock)
        return self.receive()[1]

    def park(self) -> Parked:
        """Send a call that waits; return it once nobody serves it any more."""
        n = len(self.calls.parked)
        self.send(template=PARK)
        while len(self.calls.parked) == n:
            threading.Event().wait(0.001)
        self.calls.parked[n].parked.wait(10)
        while self.connection.is_owned:
            threading.Event().wait(0.001)
        return self.calls.parked[n]


def frame(body: bytes = b"", template: int = ECHO, clock: int = 0) -> bytes:
    return pack_head(Head(CALL, len(body), 7, template, clock=clock)) + body


class Served:
    """A server of sockets to this process."""

    def __init__(self, stall: float) -> None:
        self.ended: list[Connection] = []
        self.server = SocketServer(self.ended.append)
        self._stall, self._sockets = stall, list[socket.socket]()

    def connect(
        self, wrap: Callable[[socket.socket], socket.socket] = lambda here: here
    ) -> Peer:
        here, there = socket.socketpair()
        self._sockets.append(there)
        calls = Calls()
        connection = Connection(ServedChannel(wrap(here), self._stall), calls)
        self.server.add(connection)
        return Peer(there, connection, calls)

    def close(self) -> None:
        for there in self._sockets:
            there.close()
        self.server.close(10)


@contextmanager
def served(stall: float = 0.2) -> Iterator[Served]:
    found = Served(stall)
    try:
        yield found
    finally:
        found.close()


@contextmanager
def unserved() -> Iterator[Peer]:
    """A caller of a connection that only the test has go on."""
    here, there = socket.socketpair()
    calls = Calls()
    connection = Connection(ServedChannel(here, 0.001), calls)
    yield Peer(there, connection, calls)
    connection.end()
    there.close()
