"""The sockets of a process to the hosts, for the calls of its threads.

All handles and trainers of a client or worker share a few sockets to each host: a task
that has just unpickled its handle takes a socket that is open. The event loop opens
sockets beside the calls, in the background, once threads call a host often by message.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
import weakref
from functools import partial
from typing import TYPE_CHECKING

from daskps.cluster import upstream
from daskps.cluster.caller.call_socket import CallSocket
from daskps.cluster.caller.call_template import PATIENCE_SECONDS
from daskps.cluster.counters import counters_of
from daskps.cluster.host.opening import open_socket

if TYPE_CHECKING:
    from collections.abc import Iterable

    from daskps.cluster.caller.link import Link

logger = logging.getLogger(__name__)
#: Calls to a host by message before a socket to it is opened, and sockets to one host.
CALLS_BEFORE, MOST_SOCKETS = 4, 4
#: How long a socket may take to open, and pauses after one that failed.
OPEN_SECONDS, PAUSE_SECONDS, MOST_PAUSE_SECONDS = 10.0, 1.0, 60.0


class SocketPool:
    """The sockets of one client or worker.

    Threads: any may take a socket; the event loop opens them.

    Parameters
    ----------
    link : Link
        The way to the cluster.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        #: Sockets that nobody uses, the latest last. The thread that takes one out has
        #: it; where Ctrl-C comes just then nobody has it, and it ends.
        self._idle: dict[str, list[CallSocket]] = {}
        self._open: dict[str, weakref.WeakSet[CallSocket]] = {}
        #: By worker: calls for which there was no socket, and the time before which
        #: none is opened.
        self._wanted: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        self._pauses: dict[str, float] = {}
        self._opening: set[str] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        #: Has by reason how often no socket could be opened.
        self.counters = counters_of(link.node).new(self)
        #: A token by which hosts know that two sockets are of one process.
        self._token = uuid.uuid4().hex
        weakref.finalize(self, _close_all, self._idle)

    def take(self, worker: str, store: str) -> CallSocket | None:
        """Take an idle socket to a worker and return it; None for messages.

        Parameters
        ----------
        worker : str
            The worker to call.
        store : str
            A store that has shards there; with "" no socket is opened.
        """
        idle = self._idle.get(worker)
        while idle:
            try:
                call_socket = idle.pop()
            except IndexError:  # meanwhile
                break
            if call_socket.is_open:
                return call_socket
            call_socket.close()
        if store:
            self._want(worker, store)
        return None

    def give_back(self, worker: str, call_socket: CallSocket) -> None:
        """Take a socket back whose call has ended, for other threads."""
        if self._pauses:
            self._pauses.pop(worker, None)
        self._idle[worker].append(call_socket)
        if self._is_closed:
            _close_all(self._idle)

    def end(self, worker: str, call_socket: CallSocket, *, by_caller: bool) -> None:
        """Close a socket that broke off inside of a call.

        Unless its caller ended it, another one is opened in a while.
        """
        if not by_caller:
            self._pause(worker)
        call_socket.close()

    def count(self, workers: Iterable[str]) -> int:
        """Return how many sockets to some workers are open."""
        with self._lock:
            return sum(self._count(worker) for worker in workers)

    def close_idle(self, worker: str) -> None:
        """Close the sockets to a worker that nobody uses, and open none for a while."""
        self._pause(worker)
        _close_all({worker: self._idle.get(worker, [])})

    def close(self) -> None:
        """Close all sockets; a thread that uses one closes it at the end of its call."""
        self._is_closed = True
        _close_all(self._idle)

    def _count(self, worker: str) -> int:
        return sum(call_socket.is_open for call_socket in self._open.get(worker, ()))

    def _want(self, worker: str, store: str) -> None:
        """Have a socket opened to a worker that is called often, unless in vain."""
        if self._is_closed or time.monotonic() < self._not_before.get(worker, 0.0):
            return
        with self._lock:
            n = self._wanted[worker] = self._wanted.get(worker, 0) + 1
            if (
                n < CALLS_BEFORE
                or worker in self._opening
                or self._count(worker) >= MOST_SOCKETS
            ):
                return
            self._wanted[worker] = 0
            self._opening.add(worker)
        self.link.start(partial(self._open_one, worker, store))

    def _close_hung_up(self) -> None:
        """Close the sockets of hosts that are gone, which nobody may ever call again."""
        for idle in [*self._idle.values()]:
            for call_socket in [*idle]:
                # A thread that has taken it meanwhile finds out by itself.
                with contextlib.suppress(ValueError):
                    if call_socket.has_hung_up:
                        idle.remove(call_socket)
                        call_socket.close()

    async def _open_one(self, worker: str, store: str) -> None:
        self._close_hung_up()
        call_socket = None
        try:
            call_socket = await self._opened(worker, store)
        finally:
            with self._lock:
                # In one step with the socket: a thread that came in between would open
                # another.
                self._opening.discard(worker)
                if call_socket is not None:
                    self._open.setdefault(worker, weakref.WeakSet()).add(call_socket)
                    self._idle.setdefault(worker, []).append(call_socket)
        if call_socket is not None:
            logger.debug("a socket to %s is open", worker)
        if self._is_closed:
            _close_all(self._idle)

    async def _opened(self, worker: str, store: str) -> CallSocket | None:
        """Ask a worker for a socket; None, and a pause, where it gives none."""
        upstream.at_close(self.link.node, "daskps-sockets", self.close)
        try:
            taken = await open_socket(
                self.link.pool, worker, store, token=self._token, seconds=OPEN_SECONDS
            )
        except Exception as error:  # noqa: BLE001 - messages go on, and stats() says why
            logger.info("no socket to %s: %r", worker, error)
            self.counters.fell_back(f"no socket: {type(error).__name__}")
            self._pause(worker)
            return None
        return None if taken is None else CallSocket(taken, PATIENCE_SECONDS)

    def _pause(self, worker: str) -> None:
        """Open no socket to a worker for a while, longer each time in a row."""
        with self._lock:
            pause = self._pauses.get(worker, PAUSE_SECONDS)
            self._pauses[worker] = min(2 * pause, MOST_PAUSE_SECONDS)
            self._not_before[worker] = time.monotonic() + pause


def pool_of(link: Link) -> SocketPool:
    """Return the sockets of a client or worker."""
    with _LOCK:
        if link.socket_pool is None:
            link.socket_pool = SocketPool(link)
        pool: SocketPool = link.socket_pool
        return pool


_LOCK = threading.Lock()


def _close_all(idle: dict[str, list[CallSocket]]) -> None:
    """Close the sockets that nobody uses."""
    for sockets in [*idle.values()]:
        while sockets:
            try:
                call_socket = sockets.pop()
            except IndexError:  # somebody has taken it meanwhile
                break
            call_socket.close()
