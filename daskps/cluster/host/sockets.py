"""The sockets that a host has given to callers, and the limit on their number.

Threads of the sockets, instead of the event loop, serve the calls that come by socket.
They serve them like calls by message: with the same tickets, in the same inboxes.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from distributed.core import Status

from daskps import config
from daskps.cluster import connections
from daskps.cluster.host.socket_calls import SocketCalls
from daskps.cluster.protocol.messages import PROTOCOL
from daskps.cluster.protocol.packing import refusal
from daskps.cluster.protocol.wellformed import fits
from daskps.cluster.sockets.connection import Connection
from daskps.cluster.sockets.served import ServedChannel
from daskps.cluster.sockets.serving import SocketServer
from daskps.errors import DaskPSError, ProtocolError, StoreClosedError

if TYPE_CHECKING:
    from daskps.cluster.host.host import ShardHost

logger = logging.getLogger(__name__)
#: After so many seconds without a byte a thread stops waiting for a socket.
_STALL_SECONDS = 0.2
#: How long a closing host waits for all threads of its sockets together.
_JOIN_SECONDS = 1.0
#: How long a count of open files is valid, while there are fewer sockets than it
#: allows.
COUNT_SECONDS = 1.0


def give_sockets(host: ShardHost) -> None:
    """Let a host give sockets to callers that ask for one, in `SocketPool._opened`."""
    host.sockets = sockets = HostSockets(host)
    host.worker.serve_comm("daskps_socket", sockets.handle)


class HostSockets:
    """The sockets of one host.

    Parameters
    ----------
    host : ShardHost
        The host of the shards.
    """

    def __init__(self, host: ShardHost) -> None:
        self._host = host
        self._is_allowed = config.load().socket_carrier
        #: Calls of each socket, and the token of its caller: one token per calling
        #: process.
        self._sockets: dict[Connection, tuple[SocketCalls, str]] = {}
        #: Number of calls on sockets that have ended.
        self._n_ended_calls = 0
        #: The threads, created with the first socket.
        self._server: SocketServer | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        #: Most sockets allowed, and the time after which that is counted anew.
        self._most, self._count_after = 0, 0.0

    async def handle(
        self, comm: Any, protocol: Any = None, store: Any = None, token: Any = None
    ) -> Any:
        """Give the connection of this message to a caller that asks for it."""
        try:
            self._check(protocol, store, token)
            self._begin_serving()
        except DaskPSError as error:
            return refusal(error)
        try:
            taken = await connections.give_socket(comm, {"status": "OK", "value": None})
        except OSError as error:
            logger.info("no socket for %.60s: %s", token, error)
            return Status.dont_reply
        logger.debug("%s gives a socket to %s", self._host.worker.address, token)
        self.serve(taken, SocketCalls(self._host), token)
        return Status.dont_reply

    def serve(
        self, taken: Any, calls: Any, token: str, first: list[Any] | None = None
    ) -> ServedChannel:
        """Serve the calls of a socket, after a first frame to its other end."""
        self._begin_serving()
        socket = Connection(channel := ServedChannel(taken, _STALL_SECONDS), calls)
        if first is not None:
            socket.answer(first)
        with self._lock:
            server = None if self._is_closed else self._server
            if server is not None:
                self._sockets[socket] = calls, token
        if server is None:  # closed meanwhile
            socket.end()
        else:
            server.add(socket)
        return channel

    def _check(self, protocol: Any, store: Any, token: Any) -> None:
        where = f"worker {self._host.worker.address}"
        if protocol != PROTOCOL:
            raise ProtocolError(
                f"a socket of protocol {protocol!r:.60} was asked for at {where}, which "
                f"has {PROTOCOL}; install the same daskps everywhere"
            )
        if not (fits(store, str) and fits(token, str) and len(token) <= 64):
            raise ProtocolError(f"a socket to store {store!r:.60} for {token!r:.60}")
        self._host.of(store)
        if not self._is_allowed or self._host.is_leaving or self._is_closed:
            raise StoreClosedError(f"{where} gives no sockets")
        n, most = len(self._sockets), self._count_room()
        if 2 * n >= most and self._has(token):
            raise StoreClosedError(
                f"{where} keeps half of its {most} sockets for processes that have none; "
                f"with more descriptors (ulimit -n) it would give this one a second"
            )
        if n >= most and not self._end_idle():
            raise StoreClosedError(
                f"{where} has {n} sockets already, all of them busy; with "
                f"more descriptors (ulimit -n) it would give more than {most}"
            )

    def _has(self, token: str) -> bool:
        """Return whether a calling process has a socket."""
        with self._lock:
            return token in [caller for _, caller in self._sockets.values()]

    def _count_room(self) -> int:
        """Return how many sockets there may be; count the other open files now and then.

        A count takes 0.6 ms of the event loop with a thousand open files.
        """
        n, now = len(self._sockets), time.monotonic()
        if n >= self._most or now > self._count_after:
            self._most, self._count_after = most_sockets(n), now + COUNT_SECONDS
        return self._most

    def _end_idle(self) -> bool:
        """End the socket that was idle for longest; return whether there is one."""
        now = time.monotonic()
        with self._lock:
            idle = [socket for socket in self._sockets if socket.is_idle(now)]
        if not idle:
            return False
        min(idle, key=lambda socket: socket.used).channel.shut()
        return True

    def _begin_serving(self) -> None:
        """Start the threads, while a caller can still be told of a failure."""
        try:
            with self._lock:
                self._server = self._server or SocketServer(self._ended)
        except (OSError, RuntimeError) as error:
            raise StoreClosedError(
                f"worker {self._host.worker.address} gives no sockets, because its "
                f"system gives it nothing to serve them with: {error}"
            ) from error

    def _ended(self, socket: Connection) -> None:
        with self._lock:
            if self._sockets.pop(socket, None) is not None:
                self._n_ended_calls += socket.n_frames

    @property
    def n_calls(self) -> int:
        """Calls that came by socket; fetches and new templates count too."""
        with self._lock:
            return self._n_ended_calls + sum(
                [socket.n_frames for socket in self._sockets]
            )

    def let_go(self) -> None:
        """Have the sockets let go of shards that have left, and of their memory."""
        with self._lock:
            sockets = list(self._sockets.values())
        for calls, _ in sockets:
            calls.let_go()

    def close(self) -> None:
        """End all sockets: none answers a call after this returns."""
        with self._lock:
            self._is_closed, server = True, self._server
        if server is not None:
            server.close(_JOIN_SECONDS)

    def __len__(self) -> int:
        return len(self._sockets)


def most_sockets(n: int) -> int:
    """Return how many sockets a host may have that has `n` now.

    Half of the process's descriptors that are not in use for anything else.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    try:
        others = len(os.listdir("/proc/self/fd")) - n
    except OSError:  # looking needs a descriptor itself
        others = soft
    return max(0, (soft - others) // 2)
