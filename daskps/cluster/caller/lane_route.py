"""How the calls along a route take lanes: what each host is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.cluster.caller.lane_form import LaneForm

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.caller.lanes import Lanes
    from daskps.cluster.caller.routes import Request
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.caller.targets import ReadSlice, Target

#: Of the arrays of a call to one host.
SMALL_NBYTES = 65_536


class LaneRoute:
    """A route as lanes take it.

    It holds no arrays: what a loop has let go of must not be kept alive here.

    Parameters
    ----------
    lanes : Lanes
        The lanes of this process.
    meta : StoreMap
        The store.
    request : Request
        A call along the route.
    shards : sequence of int
        The shards of it that are meant.
    """

    __slots__ = ("forms", "is_small", "lanes", "may_wait", "rest", "run", "slices")

    def __init__(
        self, lanes: Lanes, meta: StoreMap, request: Request, shards: Sequence[int]
    ) -> None:
        self.lanes, self.run = lanes, request.step.run
        #: Whether its calls may have to wait for other trainers.
        self.may_wait = self.run != 0
        target, owners = request.target, meta.where.owners
        #: What is read of which shard.
        self.slices: Mapping[int, tuple[ReadSlice, ...]]
        self.slices = {} if target is None else target.slices
        #: What of it is read of shards that are not meant.
        self.rest = {s: of for s, of in self.slices.items() if s not in shards}
        hosts: dict[str, list[int]] = {}
        for shard in shards:
            hosts.setdefault(owners[shard], []).append(shard)
        forms = []
        for worker, of in hosts.items():
            given = [
                (name, start, stop)
                for shard in of
                for _, name, start, stop in request.route.slices[shard]
                if request.arrays
            ]
            call = request.call(meta, of, 0.0, "")
            forms.append(LaneForm(worker, call, given, self.slices))
        self.forms = tuple(forms)
        #: Whether its calls cost their hosts little but the interpreter's lock.
        self.is_small = all(form.call_nbytes <= SMALL_NBYTES for form in forms)

    def reads_as(self, target: Target | None) -> bool:
        """Return whether it reads what a target does, to the same places."""
        if target is None:
            return True
        return self.slices is target.slices or self.slices == target.slices
