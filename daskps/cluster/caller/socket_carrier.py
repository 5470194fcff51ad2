"""Calls of a thread over sockets: their frames, and the answers that come at once.

A socket carries the same call as a message would, but only if the host answers without
an error, and soon. All other calls it leaves to messages, under the same sequence
numbers.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING

from daskps.cluster.caller.call_socket import (
    SocketPayload,
    SocketRefusedError,
    SocketSilentError,
    reason_of,
)
from daskps.cluster.caller.interrupts import shielded
from daskps.cluster.caller.routes import Reply
from daskps.cluster.caller.thread_call import ThreadCall
from daskps.cluster.sockets.frames import APPLIED, PARKED
from daskps.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.cluster.caller.call_socket import CallSocket
    from daskps.cluster.caller.call_template import SocketFrame
    from daskps.cluster.caller.link import CallFuture
    from daskps.cluster.caller.remote import RemoteShards
    from daskps.cluster.caller.routes import Request
    from daskps.cluster.caller.socket_route import SocketRoute
    from daskps.cluster.caller.thread_call import Left
    from daskps.cluster.protocol.deadline import Deadline

logger = logging.getLogger(__name__)
#: How long a call may wait at its host on a socket; by message it waits on. Calls of
#: runs wait for other trainers, all others for something that ends soon.
WAIT_SECONDS = 20.0
WAIT_MS, SOON_MS = int(1000 * WAIT_SECONDS), 500
#: Errors of a socket after which a call goes on by message.
_LEFT = (OSError, ProtocolError, SocketRefusedError)


class SocketCarrier:
    """The frames of one call, and the sockets that carry them.

    Parameters
    ----------
    remote : RemoteShards
        Knows the hosts, and counts.
    route : SocketRoute
        Its frames, by host.
    said : SocketPayload
        The rest of the call: its numbers and arrays.
    make : callable
        Returns the same call as it goes by message.
    deadline : Deadline
        Its end.
    """

    __slots__ = (
        "_deadline",
        "_make",
        "_remote",
        "_route",
        "_said",
        "_sockets",
        "_under_way",
        "lag",
        "left",
        "versions",
    )

    def __init__(
        self,
        remote: RemoteShards,
        route: SocketRoute,
        said: SocketPayload,
        *,
        make: Callable[[], Request],
        deadline: Deadline,
    ) -> None:
        if route.words:
            said = said._replace(outs=[*said.outs, *route.word_arrays()])
        self._remote, self._route, self._said, self._make = remote, route, said, make
        self._deadline = deadline
        assert remote.sockets is not None  # for the types: else there is no route
        self._sockets = remote.sockets
        #: Sockets that have the call and have not answered yet.
        self._under_way: list[tuple[SocketFrame, CallSocket]] = []
        #: Requests that are to go by message.
        self.left: Left = []
        self.versions: list[tuple[int, int]] = []
        self.lag = 0

    @classmethod
    def of(
        cls,
        remote: RemoteShards,
        route: SocketRoute,
        request: Request,
        deadline: Deadline,
    ) -> SocketCarrier:
        """Return the frames of a request along a route."""
        step, target = request.step, request.target
        arrays, outs = request.arrays, () if target is None else target.flats
        if route.arrays is not None:
            arrays, outs = route.arrays
        said = SocketPayload(
            step.clock,
            step.sequence,
            step.floor,
            step.weight,
            step.lr,
            arrays,
            outs,
            request.min_version,
            request.seen,
        )
        return cls(remote, route, said, make=request.checked, deadline=deadline)

    def run(
        self, meanwhile: Callable[[], Sequence[tuple[int, int]]] | None = None
    ) -> Reply:
        """Make the call, and return the answers of all shards.

        Parameters
        ----------
        meanwhile : callable, optional
            Work of its thread while the hosts work on the call. Returns the versions of
            the shards that the thread has reached itself; the reply has these as well.

        Returns
        -------
        Reply
            The answers of the shards.

        Notes
        -----
        Ctrl-C may end it anywhere while it uses sockets: one that the thread has not
        given back is nobody's. Where this is the main thread another one goes on with
        what the sockets leave.
        """
        try:
            self.begin()
            if meanwhile is not None:
                self.versions += meanwhile()
            if not self.left:
                self.take()
            if not self.left:
                return Reply(self.versions, self.lag)
        except BaseException:
            self.cancel()
            raise
        call = ThreadCall(self, self._deadline, self._remote.send)
        return shielded(call.result, call.stop)

    @property
    def is_under_way(self) -> bool:
        """Whether a host has not answered."""
        return bool(self._under_way)

    def begin(self) -> None:
        """Send it to all hosts that there is a socket to."""
        said, route = self._said, self._route
        left, wait_ms = math.inf, SOON_MS
        if route.may_wait or said.min_version is not None:
            wait_ms = WAIT_MS
        end = self._deadline.end
        # If the time is over already, the host still answers what it can answer at
        # once.
        if end is not None and (until := end - time.monotonic()) > 0:
            left = until
            wait_ms = int(min(wait_ms, 1000 * left))
        for frame in route.frames:
            template = frame.template
            socket = self._sockets.take(template.worker, template.store)
            if socket is None:
                self.left.append((self._make(), frame.asked))
                continue
            self._under_way.append((frame, socket))
            try:
                socket.ask(frame, said, left, wait_ms)
            except _LEFT as error:
                self._fall_back(-1, error)

    def stop(self) -> None:
        """Shut the sockets: the thread that waits for one gets an error."""
        for _, socket in [*self._under_way]:
            socket.shut()

    def cancel(self) -> None:
        """End the sockets that are inside of it."""
        while self._under_way:
            frame, socket = self._under_way.pop()
            self._sockets.end(frame.template.worker, socket, by_caller=True)

    def take(self) -> None:
        """Take the answers of the hosts, until one leaves a request to messages."""
        outs, counters = self._said.outs, self._remote.counters
        while self._under_way and not self.left:
            frame, socket = self._under_way[0]
            try:
                try:
                    rows = socket.answer(frame, outs)
                except SocketSilentError:
                    rows = self._await(frame, socket)
            except _LEFT as error:
                self._fall_back(0, error)
                return
            del self._under_way[0]
            self._sockets.give_back(frame.template.worker, socket)
            counters.socket_calls += 1
            counters.socket_nbytes += frame.call_nbytes
            codes = rows[3::4]
            if codes == frame.applied or not any(code & PARKED for code in codes):
                self.versions += zip(frame.shards, rows[1::4], strict=True)
                self.lag = max(self.lag, *rows[2::4])
                for move in frame.moves:
                    move.put(outs)
            else:
                self._leave(frame, codes)

    def _leave(self, frame: SocketFrame, codes: Sequence[int]) -> None:
        """Leave a call that a host has parked to messages."""
        self._remote.counters.fell_back("it has to be waited for")
        request = self._make()
        if all(code & APPLIED for code in codes):
            request = request.waiting()
        self.left.append((request, frame.asked))

    def _await(self, frame: SocketFrame, socket: CallSocket) -> tuple[int, ...]:
        """Return the answer of a host that is silent, for as long as it may be.

        Meanwhile the event loop asks the directory whether the wait is in vain, as for
        a message that is late; if it is, the loop shuts the socket.
        """
        end, may_wait = self._deadline.end, self._route.may_wait
        left = math.inf if end is None else end - time.monotonic()
        if left <= 0 or (self._said.min_version is None and not may_wait):
            raise SocketSilentError("a host answers nothing")
        seconds = min(left, WAIT_SECONDS + frame.patience)
        watch = self._remote.watch(
            frame.template.worker, frame.shards, self._route.run, socket.shut
        )
        try:
            socket.set_limits(seconds, left)
            return socket.answer(frame, self._said.outs)
        finally:
            watch.stop()

    def _fall_back(self, at: int, error: Exception) -> None:
        """Leave a request to messages that a socket has no answer to."""
        frame, socket = self._under_way.pop(at)
        if isinstance(error, SocketRefusedError):
            self._sockets.give_back(frame.template.worker, socket)
        else:
            late = self._deadline.is_over
            self._sockets.end(frame.template.worker, socket, by_caller=late)
        self._remote.counters.fell_back(reason_of(error))
        logger.debug("%s goes on by message: %r", self._deadline.what, error)
        self.left.append((self._make(), frame.asked))


def start(
    remote: RemoteShards, request: Request, shards: Sequence[int], deadline: Deadline
) -> ThreadCall | CallFuture[Reply]:
    """Begin a call, or a part of it: over sockets if possible, else by message."""
    route = remote.find_socket_route(request, shards)
    if route is None:
        return remote.send(request, shards, deadline)
    call = ThreadCall(
        SocketCarrier.of(remote, route, request, deadline), deadline, remote.send
    )
    call.begin()
    return call
