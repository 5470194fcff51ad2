"""One call by lanes, from the thread that makes it."""

from __future__ import annotations

import concurrent.futures
import math
import threading
from typing import TYPE_CHECKING

from daskps.cluster.caller.lanes import (
    PATIENCE_SECONDS,
    SLOW_NBYTES,
    LaneRefusedError,
    reason_of,
)
from daskps.cluster.caller.link import CallFuture
from daskps.cluster.caller.routes import Reply, joined
from daskps.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from daskps.cluster.caller.lanes import Lane, Lanes
    from daskps.cluster.caller.routes import Request
    from daskps.cluster.wire.deadline import Deadline
    from daskps.cluster.wire.messages import Call
    from daskps.typing import Array

#: How long a call may wait at its host on a lane; by message it waits on.
WAIT_SECONDS = 0.5
#: How long to wait for messages that were called off.
STOP_SECONDS = 5.0


class LaneCall(CallFuture[Reply]):
    """One call from a thread to shards of other processes, by lanes where there are any.

    The thread that begins it takes its result.

    Parameters
    ----------
    lanes : Lanes
        The lanes.
    request : Request
        What is said; what it reads is in its target afterwards.
    hosts : mapping of str to list of int
        The shards, by the worker that owns them.
    make : callable
        Returns the call to some shards of one host, that may wait for so many seconds.
    send : callable
        Starts a request to shards by message.
    deadline : Deadline
        Its end.
    """

    def __init__(
        self,
        lanes: Lanes,
        request: Request,
        *,
        hosts: Mapping[str, Sequence[int]],
        make: Callable[[Request, Sequence[int], float], Call],
        send: Callable[[Request, Sequence[int]], CallFuture[Reply]],
        deadline: Deadline,
    ) -> None:
        super().__init__(lanes.link)
        self._lanes, self._request, self._hosts = lanes, request, hosts
        self._make, self._send, self._deadline = make, send, deadline
        #: Lanes that have the call and have not answered yet.
        self._under_way: list[tuple[str, Lane, Call]] = []
        self._sent: list[CallFuture[Reply]] = []
        self._owner = 0
        self._is_stopped = False

    def run(self) -> Reply:
        """Begin it, and return what the shards have said."""
        self.begin()
        return self.result()

    def begin(self) -> None:
        """Send it to all hosts."""
        self._owner = threading.get_ident()
        left = math.inf
        if self._deadline.timeout is not None and not self._deadline.is_over:
            left = self._deadline.left()
        try:
            for worker, shards in self._hosts.items():
                self._begin_at(worker, shards, left)
        except BaseException:
            self._call_off()
            raise

    def _begin_at(self, worker: str, shards: Sequence[int], left: float) -> None:
        call = self._make(self._request, shards, min(left, WAIT_SECONDS))
        lane = self._lanes.take(worker)
        if lane is None:
            self._say(self._request, call)
            return
        self._under_way.append((worker, lane, call))
        try:
            patience = PATIENCE_SECONDS + call.nbytes / SLOW_NBYTES
            lane.channel.begin(min(left, patience), left)
            lane.send(call)
        except (OSError, ProtocolError, LaneRefusedError) as error:
            self._under_way.pop()
            self._fall_back(worker, lane, call, error)

    def result(self, timeout: float | None = None) -> Reply:
        """Return what the shards have said, once they have."""
        if not self.done():
            self._finish()
        return super().result(timeout)

    def stop(self) -> None:
        """Make it end soon, from any thread; the thread that began it ends it itself."""
        self._is_stopped = True
        for _, lane, _ in [*self._under_way]:
            lane.channel.shut()
        for sent in [*self._sent]:
            sent.stop()
        if threading.get_ident() == self._owner:
            self._call_off()
            self._cancel()

    def _finish(self) -> None:
        try:
            replies = []
            while self._under_way:
                reply = self._receive(*self._under_way[0])
                replies += [reply] if reply is not None else []
            replies += [sent.result() for sent in self._sent]
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self._call_off()
            self.set_exception(error)
        else:
            self.set_result(joined(replies))

    def _receive(self, worker: str, lane: Lane, call: Call) -> Reply | None:
        """Return what a host answers by its lane; None where it goes on by message."""
        outs: list[Array] = []
        if (target := self._request.target) is not None:
            for part in call.parts:
                outs += target.outs(part.shard) if part.ranges else ()
        try:
            answers = lane.receive(call, outs)
        except (OSError, ProtocolError, LaneRefusedError) as error:
            self._under_way.pop(0)
            self._fall_back(worker, lane, call, error)
            return None
        self._under_way.pop(0)
        self._lanes.give_back(worker, lane)
        counters = self._lanes.counters
        counters.lane_calls += 1
        counters.lane_nbytes += call.nbytes
        if not any(a.parked for a in answers):
            return Reply.of(answers)
        applied = all(a.applied for a in answers)
        counters.fell_back("it has to be waited for")
        self._say(self._request.waiting() if applied else self._request, call)
        return None

    def _fall_back(self, worker: str, lane: Lane, call: Call, error: Exception) -> None:
        """Have a call go on by message that its lane has no answer to."""
        if isinstance(error, LaneRefusedError):
            self._lanes.give_back(worker, lane)
        else:
            self._lanes.end(worker, lane)
        self._lanes.counters.fell_back(reason_of(error))
        self._say(self._request, call)

    def _say(self, request: Request, call: Call) -> None:
        if self._is_stopped:
            raise concurrent.futures.CancelledError
        self._sent.append(self._send(request, [part.shard for part in call.parts]))

    def _call_off(self) -> None:
        """End the lanes that are inside of it, and the messages."""
        while self._under_way:
            worker, lane, _ = self._under_way.pop()
            self._lanes.end(worker, lane)
        for sent in self._sent:
            sent.stop()
        # Until then the loop may read or fill the caller's arrays.
        concurrent.futures.wait(self._sent, STOP_SECONDS)
