"""One call by lanes, from the thread that makes it.

A lane carries the same call as a message would, but only if the host answers at once
and without an error. All other calls go on by message, under the same sequence numbers:
those that are late, refused or cut off half way, and those that have to wait. So one
module serves all of these, `far`.
"""

from __future__ import annotations

import concurrent.futures
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from daskps.cluster.caller.call_future import CallFuture
from daskps.cluster.caller.interrupts import shielded
from daskps.cluster.caller.lane import (
    LaneRefusedError,
    LaneSaid,
    LaneSilentError,
    reason_of,
)
from daskps.cluster.caller.routes import Reply, joined
from daskps.cluster.lane.frames import APPLIED, PARKED
from daskps.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.caller.far import Far
    from daskps.cluster.caller.lane import Lane
    from daskps.cluster.caller.lane_form import LaneFrame
    from daskps.cluster.caller.lane_route import LaneRoute
    from daskps.cluster.caller.link import Link
    from daskps.cluster.caller.routes import Request
    from daskps.cluster.wire.deadline import Deadline

logger = logging.getLogger(__name__)
#: How long a call may wait at its host on a lane; by message it waits on. Calls of runs
#: wait for other trainers, all others for something that ends soon.
WAIT_SECONDS = 20.0
WAIT_MS, SOON_MS = int(1000 * WAIT_SECONDS), 500
#: How long to wait for messages that were called off.
STOP_SECONDS = 5.0
#: Work of the thread meanwhile; returns shards that the thread reaches itself, with
#: their versions.
Meanwhile = Callable[[], "Sequence[tuple[int, int]]"]
#: Errors of a lane after which a call goes on by message.
_LEFT = (OSError, ProtocolError, LaneRefusedError)


class LaneCall:
    """One call from a thread to shards of other processes, by lanes if there are any.

    Parameters
    ----------
    far : Far
        Sends the messages.
    route : LaneRoute
        Its frames, by host, and the lanes.
    said : LaneSaid
        The rest of the call: its numbers and arrays.
    make : callable
        Returns the same call as it goes by message.
    deadline : Deadline
        Its end.
    """

    __slots__ = (
        "_deadline",
        "_far",
        "_is_stopped",
        "_lag",
        "_left",
        "_make",
        "_route",
        "_said",
        "_sent",
        "_under_way",
        "_versions",
    )

    def __init__(
        self,
        far: Far,
        route: LaneRoute,
        said: LaneSaid,
        *,
        make: Callable[[], Request],
        deadline: Deadline,
    ) -> None:
        if route.words:
            # They are counted from the end: see `LaneRoute`.
            words = [np.empty(n, dtype) for dtype, n in reversed(route.words)]
            said = said._replace(outs=[*said.outs, *words])
        self._far, self._route, self._said, self._make = far, route, said, make
        self._deadline = deadline
        #: Lanes that have the call and have not answered yet.
        self._under_way: list[tuple[LaneFrame, Lane]] = []
        #: Requests that are to go by message, and messages that have gone.
        self._left: list[tuple[Request, Sequence[int]]] = []
        self._sent: list[CallFuture[Reply]] = []
        self._versions: list[tuple[int, int]] = []
        self._lag = 0
        self._is_stopped = False

    @classmethod
    def of(
        cls, far: Far, route: LaneRoute, request: Request, deadline: Deadline
    ) -> LaneCall:
        """Return a call along a route, not begun yet."""
        step, target = request.step, request.target
        arrays, outs = request.arrays, () if target is None else target.flats
        if route.arrays is not None:
            arrays, outs = route.arrays
        said = LaneSaid(
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
        return cls(far, route, said, make=request.checked, deadline=deadline)

    def run(self, meanwhile: Meanwhile | None = None) -> Reply:
        """Begin it, and return the answers of the shards.

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
        Ctrl-C may end it anywhere while it uses lanes: a lane that the thread has not
        given back is nobody's. Where this is the main thread another one sends the
        messages.
        """
        self.begin()
        try:
            if meanwhile is not None:
                self._versions += meanwhile()
            if not self._left:
                self._receive()
            if not self._left:
                return Reply(self._versions, self._lag)
        except BaseException:
            self.call_off()
            raise
        return shielded(self.finish, self.stop)

    def begin(self) -> None:
        """Send it to all hosts that there is a lane to."""
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
        try:
            for frame in route.frames:
                form = frame.form
                lane = route.lanes.take(form.worker, form.store)
                if lane is None:
                    self._left.append((self._make(), frame.asked))
                    continue
                self._under_way.append((frame, lane))
                try:
                    lane.ask(frame, said, left, wait_ms)
                except _LEFT as error:
                    self._fall_back(-1, error)
        except BaseException:
            self.call_off()
            raise

    def finish(self) -> Reply:
        """Return the answers of the shards, by message or by lane."""
        try:
            while self._left or self._under_way:
                self.send_left()
                self._receive()
            replies = [sent.result() for sent in self._sent]
            return joined([Reply(self._versions, self._lag), *replies])
        except BaseException:
            self.call_off()
            raise

    def send_left(self) -> None:
        """Send the requests that no lane has by message."""
        while self._left:
            if self._is_stopped:
                raise concurrent.futures.CancelledError
            request, shards = self._left.pop(0)
            self._sent.append(self._far.send(request, shards, self._deadline))

    def stop(self) -> None:
        """Make it end soon, from any thread; the calling thread itself ends it."""
        self._is_stopped = True
        for _, lane in [*self._under_way]:
            lane.shut()
        for sent in [*self._sent]:
            sent.stop()

    def call_off(self) -> None:
        """End the lanes that are inside of it, and the messages."""
        while self._under_way:
            frame, lane = self._under_way.pop()
            self._route.lanes.end(frame.form.worker, lane, by_caller=True)
        for sent in self._sent:
            sent.stop()
        # Until they end the loop may read or fill the caller's arrays.
        concurrent.futures.wait(self._sent, STOP_SECONDS)

    def _receive(self) -> None:
        """Take the answers from the lanes, until one leaves a request to messages."""
        outs, counters = self._said.outs, self._far.counters
        while self._under_way and not self._left:
            frame, lane = self._under_way[0]
            try:
                try:
                    rows = lane.answer(frame, outs)
                except LaneSilentError:
                    rows = self._await(frame, lane)
            except _LEFT as error:
                self._fall_back(0, error)
                return
            del self._under_way[0]
            self._route.lanes.give_back(frame.form.worker, lane)
            counters.lane_calls += 1
            counters.lane_nbytes += frame.call_nbytes
            codes = rows[3::4]
            if codes == frame.applied or not any(code & PARKED for code in codes):
                self._versions += zip(frame.shards, rows[1::4], strict=True)
                self._lag = max(self._lag, *rows[2::4])
                for move in frame.moves:
                    move.put(outs)
            else:
                self._leave(frame, codes)

    def _leave(self, frame: LaneFrame, codes: Sequence[int]) -> None:
        """Leave a call that a host has parked to messages."""
        self._far.counters.fell_back("it has to be waited for")
        request = self._make()
        if all(code & APPLIED for code in codes):
            request = request.waiting()
        self._left.append((request, frame.asked))

    def _await(self, frame: LaneFrame, lane: Lane) -> tuple[int, ...]:
        """Return the answer of a host that is silent, for as long as it may be.

        Meanwhile the event loop asks the directory whether the wait is in vain, as for
        a message that is late; if it is, the loop shuts the lane.
        """
        end, may_wait = self._deadline.end, self._route.may_wait
        left = math.inf if end is None else end - time.monotonic()
        if left <= 0 or (self._said.min_version is None and not may_wait):
            raise LaneSilentError("a host answers nothing")
        seconds = min(left, WAIT_SECONDS + frame.patience)
        watch = self._far.watch(
            frame.form.worker, frame.shards, self._route.run, lane.shut
        )
        try:
            lane.begin(seconds, left)
            return lane.answer(frame, self._said.outs)
        finally:
            watch.stop()

    def _fall_back(self, at: int, error: Exception) -> None:
        """Leave a request to messages that a lane has no answer to."""
        frame, lane = self._under_way.pop(at)
        if isinstance(error, LaneRefusedError):
            self._route.lanes.give_back(frame.form.worker, lane)
        else:
            late = self._deadline.is_over
            self._route.lanes.end(frame.form.worker, lane, by_caller=late)
        self._far.counters.fell_back(reason_of(error))
        logger.debug("%s goes on by message: %r", self._deadline.what, error)
        self._left.append((self._make(), frame.asked))


class LaneFuture(CallFuture[Reply]):
    """A call that its thread has sent to all hosts; it takes the result later.

    Parameters
    ----------
    link : Link
        The way to the cluster.
    call : LaneCall
        The call, not begun yet.
    """

    def __init__(self, link: Link, call: LaneCall) -> None:
        super().__init__(link.loop)
        self._call, self._owner = call, threading.get_ident()
        call.begin()
        call.send_left()

    def result(self, timeout: float | None = None) -> Reply:
        """Return the answers of the shards, once they are there."""
        if not self.done():
            try:
                self.set_result(self._call.finish())
            except BaseException as error:  # noqa: BLE001 - raised below
                self.set_exception(error)
        return super().result(timeout)

    def stop(self) -> None:
        """Make it end soon, from any thread; the thread that began it ends it."""
        self._call.stop()
        if threading.get_ident() == self._owner:
            self._call.call_off()
            self._cancel()


def start(
    far: Far, request: Request, shards: Sequence[int], deadline: Deadline
) -> CallFuture[Reply]:
    """Begin a call from a thread, which takes its result: by lanes, if possible."""
    route = far.find_lanes(request, shards)
    if route is None:
        return far.send(request, shards, deadline)
    return LaneFuture(far.link, LaneCall.of(far, route, request, deadline))
