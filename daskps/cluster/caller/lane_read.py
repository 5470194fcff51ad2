"""Reads by lanes, made ready once, like the reads of near shards."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from daskps.cluster.caller import routes
from daskps.cluster.caller.lane import LaneSaid
from daskps.cluster.caller.near import AGAIN_SECONDS
from daskps.cluster.caller.socket_carrier import Sockets
from daskps.cluster.caller.targets import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from daskps.cluster.caller.far import Far
    from daskps.cluster.caller.lane_route import LaneRoute
    from daskps.cluster.caller.routes import Request, Step
    from daskps.cluster.caller.targets import ReadSlice
    from daskps.cluster.wire.deadline import Deadline
    from daskps.typing import Array


class LaneRead:
    """One read of shards of other processes, ready to be repeated into any arrays.

    It holds none of them: arrays that a loop has let go of must not live on here.

    Parameters
    ----------
    far : Far
        The way to the shards.
    request : Request
        The read, which may go to any arrays.
    route : LaneRoute
        The same read as a route over lanes.
    seen : dict of int to int, optional
        Takes the version that was read of each shard.
    """

    def __init__(
        self,
        far: Far,
        request: Request,
        route: LaneRoute,
        seen: dict[int, int] | None = None,
    ) -> None:
        self._far, self._request, self._route, self._seen = far, request, route, seen
        #: Until when it holds: a way that is closed today may be open soon.
        self.until = time.monotonic() + AGAIN_SECONDS

    @classmethod
    def of(
        cls,
        far: Far,
        slices: Mapping[int, Sequence[ReadSlice]],
        step: Step,
        seen: dict[int, int] | None = None,
    ) -> LaneRead | None:
        """Return a read of slices; None where the read may take no lane."""
        target = Target({s: tuple(of) for s, of in slices.items()}, (), dict)
        request = routes.read(far.meta, target, None, step)
        route = far.find_lanes(request, tuple(slices))
        return None if route is None else cls(far, request, route, seen)

    def read(
        self,
        clock: int,
        outs: Sequence[Array],
        deadline: Deadline,
        read_near: Callable[[], int | None] | None = None,
    ) -> int | None:
        """Read into arrays; return by how many clocks the slowest trainer was behind.

        Parameters
        ----------
        clock : int
            The trainer's clock; outside runs 0.
        outs : sequence of ndarray, shape (n,)
            The arrays to fill.
        deadline : Deadline
            Its end.
        read_near : callable, optional
            Reads the rest, and returns the same of it; None where that was not
            possible, as this does then. It runs while the hosts read, or afterwards
            where they have little work: they then need the interpreter's lock above all.
        """
        said, make = LaneSaid(clock, outs=outs), partial(self._make, clock, outs)
        call = Sockets(self._far, self._route, said, make=make, deadline=deadline)
        lag: int | None = 0
        if read_near is None:
            reply = call.run()
        elif self._route.is_small:
            reply, lag = call.run(), read_near()
        else:

            def meanwhile() -> Sequence[tuple[int, int]]:
                nonlocal lag
                lag = read_near()
                return ()

            reply = call.run(meanwhile)
        if self._seen is not None:
            self._seen.update(reply.versions)
        return None if lag is None else max(lag, reply.lag)

    def _make(self, clock: int, outs: Sequence[Array]) -> Request:
        """Return the same read as a request by message."""
        request = self._request
        step = request.step._replace(clock=clock)
        target = Target(self._route.slices, outs, dict)
        return request._replace(step=step, target=target)
