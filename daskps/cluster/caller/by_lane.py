"""Calls to shards of other processes: by lanes where there are any, else by message."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps import codecs
from daskps.cluster.caller.far import Far
from daskps.cluster.caller.lane import LaneSaid
from daskps.cluster.caller.lane_call import LaneCall, LaneFuture
from daskps.cluster.caller.lane_form import told_once
from daskps.cluster.caller.lane_route import LaneRoute, looks_there
from daskps.cluster.caller.lane_row_frames import RowRoute
from daskps.cluster.caller.lane_rows import RowRoutes
from daskps.cluster.caller.lanes import Lanes, lanes_of
from daskps.cluster.caller.shard_map import Prepared

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from daskps.cluster.caller.call_future import CallFuture
    from daskps.cluster.caller.link import Link
    from daskps.cluster.caller.routes import Reply, Request
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.caller.ways import Ways
    from daskps.cluster.wire.deadline import Deadline

#: Number of routes kept ready for lanes: of reads, of pushes, and of both at once.
MOST_ROUTES = 24


class FarByLane(Far):
    """Calls to the shards of one store, by the lanes of this process.

    Parameters
    ----------
    link : Link
        The way to the cluster.
    meta : StoreMap
        The store.
    ways : Ways
        How this process reaches its hosts.
    size : int
        How many callers may wait at once: the trainers of a run.
    """

    def __init__(self, link: Link, meta: StoreMap, ways: Ways, size: int) -> None:
        super().__init__(link, meta, ways, size)
        self.lanes: Lanes = lanes_of(link)
        self._routes: Prepared[Hashable, LaneRoute] = Prepared(meta, MOST_ROUTES)
        self._rows = RowRoutes(self.lanes, meta)

    def start(
        self, request: Request, shards: Sequence[int], deadline: Deadline
    ) -> CallFuture[Reply]:
        """Begin a call from a thread, which takes its result."""
        route = self.find_lanes(request, shards)
        if route is None:
            return self.send(request, shards, deadline)
        return LaneFuture(self.link, call_of(self, route, request, deadline))

    def find_lanes(self, request: Request, shards: Sequence[int]) -> LaneRoute | None:
        """Return the route of a call over lanes; None where it may take none."""
        # Pieces that a caller gives away need a new form each time, and heads of frames
        # have no place for the pushes that it has given up.
        if request.given or request.step.given_up:
            return None
        has_words = request.codec and not codecs.named(request.codec).is_fixed
        if has_words or request.rows or (request.target and request.target.rows):
            rows = self._rows.find(request, shards)
            if rows is None:
                self.counters.fell_back("rows or words that lanes do not carry")
            return rows
        step, target = request.step, request.target
        looks = request.check is not None and looks_there(request, shards)
        key = (
            request.route,
            *shards,
            *told_once(step),
            request.codec,
            request.read_codec,
            target is None,
            looks,
        )
        known, where = self._routes.find(key), self.meta.where
        if known is None or not known.reads_as(target):
            known = LaneRoute(self.lanes, self.meta, request, shards, looks=looks)
            self._routes.keep(key, known, where)
        return known


def call_of(
    far: Far, route: LaneRoute, request: Request, deadline: Deadline
) -> LaneCall:
    """Return a call by lanes that is not begun yet."""
    step, target = request.step, request.target
    arrays, outs = request.arrays, () if target is None else target.flats
    if isinstance(route, RowRoute):
        arrays, outs = route.brings, route.outs
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
    return LaneCall(far, route, said, make=request.checked, deadline=deadline)
