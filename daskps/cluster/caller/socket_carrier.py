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

import numpy as np

from daskps.cluster.caller.interrupts import shielded
from daskps.cluster.caller.lane import (
    LaneRefusedError,
    LaneSaid,
    LaneSilentError,
    reason_of,
)
from daskps.cluster.caller.routes import Reply
from daskps.cluster.caller.thread_call import ThreadCall
from daskps.cluster.lane.frames import APPLIED, PARKED
from daskps.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.cluster.caller.call_future import CallFuture
    from daskps.cluster.caller.far import Far
    from daskps.cluster.caller.lane import Lane
    from daskps.cluster.caller.lane_form import LaneFrame
    from daskps.cluster.caller.lane_route import LaneRoute
    from daskps.cluster.caller.routes import Request
    from daskps.cluster.caller.thread_call import Left
    from daskps.cluster.wire.deadline import Deadline

logger = logging.getLogger(__name__)
#: How long a call may wait at its host on a lane; by message it waits on. Calls of runs
#: wait for other trainers, all others for something that ends soon.
WAIT_SECONDS = 20.0
WAIT_MS, SOON_MS = int(1000 * WAIT_SECONDS), 500
#: Errors of a lane after which a call goes on by message.
_LEFT = (OSError, ProtocolError, LaneRefusedError)


class Sockets:
    """The frames of one call, and the sockets that carry them.

    Parameters
    ----------
    far : Far
        Knows the hosts, and counts.
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
        "_make",
        "_route",
        "_said",
        "_under_way",
        "lag",
        "left",
        "versions",
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
        #: Requests that are to go by message.
        self.left: Left = []
        self.versions: list[tuple[int, int]] = []
        self.lag = 0

    @classmethod
    def of(
        cls, far: Far, route: LaneRoute, request: Request, deadline: Deadline
    ) -> Sockets:
        """Return the frames of a request along a route."""
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
        call = ThreadCall(self, self._deadline, self._far.send)
        return shielded(call.result, call.stop)

    @property
    def is_under_way(self) -> bool:
        """Whether a host has not answered."""
        return bool(self._under_way)

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
        for frame in route.frames:
            form = frame.form
            lane = route.lanes.take(form.worker, form.store)
            if lane is None:
                self.left.append((self._make(), frame.asked))
                continue
            self._under_way.append((frame, lane))
            try:
                lane.ask(frame, said, left, wait_ms)
            except _LEFT as error:
                self._fall_back(-1, error)

    def stop(self) -> None:
        """Shut the sockets: the thread that waits for one gets an error."""
        for _, lane in [*self._under_way]:
            lane.shut()

    def cancel(self) -> None:
        """End the sockets that are inside of it."""
        while self._under_way:
            frame, lane = self._under_way.pop()
            self._route.lanes.end(frame.form.worker, lane, by_caller=True)

    def take(self) -> None:
        """Take the answers of the hosts, until one leaves a request to messages."""
        outs, counters = self._said.outs, self._far.counters
        while self._under_way and not self.left:
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
                self.versions += zip(frame.shards, rows[1::4], strict=True)
                self.lag = max(self.lag, *rows[2::4])
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
        self.left.append((request, frame.asked))

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
        self.left.append((self._make(), frame.asked))


def start(
    far: Far, request: Request, shards: Sequence[int], deadline: Deadline
) -> ThreadCall | CallFuture[Reply]:
    """Begin a call, or a part of it: over sockets if possible, else by message."""
    route = far.find_lanes(request, shards)
    if route is None:
        return far.send(request, shards, deadline)
    call = ThreadCall(Sockets.of(far, route, request, deadline), deadline, far.send)
    call.begin()
    return call
