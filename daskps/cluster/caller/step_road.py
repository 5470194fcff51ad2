"""Roads of a trainer's steps to all shards of a store, each made ready once.

The trainer's own thread brings a step to shards of this process and machine; lanes
bring it to shards of other processes. Nearly all steps of a loop bring the same
parameters: from one to the next only numbers and the contents of arrays change.
"""

from __future__ import annotations

from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

from daskps.cluster.caller.lane import LaneSaid
from daskps.cluster.caller.lane_call import LaneCall
from daskps.cluster.caller.near_call import NearCall
from daskps.cluster.caller.reads import PreparedRead
from daskps.cluster.caller.routes import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from daskps.cluster.caller.far import Far
    from daskps.cluster.caller.lane_route import LaneRoute
    from daskps.cluster.caller.near import NearPart, NearRoute
    from daskps.cluster.caller.routes import Reply
    from daskps.cluster.caller.targets import ReadSlices
    from daskps.cluster.caller.ways import Ways
    from daskps.cluster.wire.deadline import Deadline
    from daskps.shards.steps import Step
    from daskps.typing import Array


class StepRoad:
    """The road of steps that tick and bring the same parameters.

    Parameters
    ----------
    far : Far
        The way to shards of other processes.
    ways : Ways
        How this process reaches the other shards.
    near : NearRoute
        The near and the far shards of the route.
    """

    def __init__(self, far: Far, ways: Ways, near: NearRoute) -> None:
        self._far, self._ways, self.near = far, ways, near
        #: Routes over lanes to the far shards, by kind of step and whether it reads.
        self.lanes: dict[tuple[str, bool], LaneRoute] = {}
        #: The last read after a step.
        self._read: tuple[ReadSlices, PreparedRead | None] = {}, None

    def step_near(
        self,
        request: Request,
        deadline: Deadline,
        taken: Sequence[tuple[int, int]],
        parts: Sequence[NearPart],
    ) -> list[tuple[int, int]]:
        """Deliver a step to near shards that do not take it at once.

        Parameters
        ----------
        request : Request
            The step.
        deadline : Deadline
            Its end.
        taken, parts
            The shards that have taken it, with their versions, and the others, as
            :meth:`NearRoute.try_step` returns them.

        Returns
        -------
        list of (int, int)
            The versions of all shards, also of those that only their owners can serve.
        """
        near = self.near
        call = NearCall(self._far, request, near, deadline, taken=taken, parts=parts)
        return call.run().versions

    def step_far(
        self,
        lanes: LaneRoute,
        step: Step,
        arrays: Mapping[Any, Array],
        outs: Sequence[Array],
        *,
        make: Callable[[], Request],
        deadline: Deadline,
    ) -> Reply:
        """Deliver a step by lanes to shards of other processes, and to near ones.

        Near shards get their part while the far ones answer.

        Parameters
        ----------
        lanes : LaneRoute
            The route of the step over lanes.
        step : Step
            The step.
        arrays : mapping of int to ndarray
            The arrays that it brings.
        outs : sequence of ndarray, shape (n,)
            The arrays that take the values of the far shards.
        make : callable
            Returns the same call as a request by message.
        deadline : Deadline
            Its end.

        Returns
        -------
        Reply
            The answers of the shards.
        """
        number = step.sequence
        said = LaneSaid(step.clock, number, number, step.weight, None, arrays, outs)
        call = LaneCall(self._far, lanes, said, make=make, deadline=deadline)
        if not self.near.parts:
            return call.run()
        return call.run(partial(self._join, step, arrays, make, deadline))

    def _join(
        self,
        step: Step,
        arrays: Mapping[Any, Array],
        make: Callable[[], Request],
        deadline: Deadline,
    ) -> list[tuple[int, int]]:
        """Deliver a step to the near shards, which nearly always take it at once."""
        near = self.near
        taken, parts = near.try_step(step, arrays)
        if parts:
            request = Request(near.route, make().step, arrays)
            return self.step_near(request, deadline, taken, parts)
        self._far.counters.local_calls += near.n_hosts
        return taken

    def read_near(
        self, slices: ReadSlices, clock: int, outs: Sequence[Array]
    ) -> int | None:
        """Read near shards; None where they must be asked.

        Returns by how many clocks the slowest trainer was behind.
        """
        known, read = self._read
        if known is not slices:
            read = PreparedRead.of(self._ways, slices)
            self._read = slices, read
        lag = None if read is None else read.read(repeat(clock), outs)
        if read is not None and lag is not None:
            self._far.counters.local_calls += read.n_hosts
        return lag
