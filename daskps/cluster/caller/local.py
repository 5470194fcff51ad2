"""Shards that this process reaches itself, and steps that they take at once.

Nearly all steps of a trainer simply join the round of each shard, or the shard applies
them at once in a run without rounds, and no more is to do then. Steps that may have to
wait are calls, see :mod:`daskps.cluster.caller.local_shards`.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from daskps.errors import ShardBusyError
from daskps.shards.steps import ASK, Item, Step

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.caller.carriers import Carriers
    from daskps.cluster.caller.routes import PieceSlice, Route
    from daskps.cluster.caller.row_routes import RowBatch
    from daskps.cluster.caller.socket_route import SocketRoute
    from daskps.cluster.host.hosted import HostedShard, ReachableShards
    from daskps.typing import Array

#: How long a simple step waits for a shard's lock before it becomes a ticket.
SOON_SECONDS = 0.05
#: How soon a call looks again for a nearer way to shards that it reaches by message.
AGAIN_SECONDS = 1.0
#: How often a call looks after the shards' owners.
LOOK_SECONDS = 0.001


class LocalPart(NamedTuple):
    """One shard of a route as this process reaches it."""

    shard: int
    generation: int
    serving: ReachableShards
    hosted: HostedShard
    slices: tuple[PieceSlice, ...]


class SplitRoute:
    """A route split in two: the shards that this process reaches, and all others.

    Parameters
    ----------
    route : Route
        The route.
    carriers : Carriers
        How this process reaches the hosts.
    by_owner : bool
        Whether no process but the owner may act for a shard.
    """

    def __init__(
        self, route: Route, carriers: Carriers, *, by_owner: bool = False
    ) -> None:
        self.route = route
        parts: list[LocalPart] = []
        #: The other shards of the route: they are called by socket, else by message.
        self.remote: list[int] = []
        for shard, slices in route.slices.items():
            found = carriers.find_shard(shard, by_owner=by_owner)
            if found is None:
                self.remote.append(shard)
                continue
            serving, hosted = found
            generation = route.where.generations[shard]
            parts.append(LocalPart(shard, generation, serving, hosted, slices))
        # Trainers that begin with different shards wait less for each other.
        first = max(0, carriers.rank) % max(1, len(parts))
        self.parts = parts[first:] + parts[:first]
        #: Until when it holds: a way that is closed now may be open soon.
        self.until = time.monotonic() + AGAIN_SECONDS if self.remote else math.inf
        servings = {id(p.serving): p.serving for p in parts}
        #: Hosts that its calls reach without a message.
        self.n_hosts = len(servings)
        #: The hosts among them that are other processes.
        self._mapped = [s for s in servings.values() if not s.is_own]
        #: When to look after them again; never, where there are none.
        self.next_look = 0.0 if self._mapped else math.inf
        #: Routes over sockets of a trainer's steps to the remote shards, by kind of
        #: step and whether it reads.
        self.socket_routes: dict[tuple[str, bool], SocketRoute] = {}

    def is_live(self) -> bool:
        """Return whether all owners are there; for a moment they need no look then."""
        if not all(serving.is_live() for serving in self._mapped):
            return False
        self.next_look = time.monotonic() + LOOK_SECONDS
        return True

    def try_step(
        self,
        step: Step,
        arrays: Mapping[Any, Array],
        rows: Sequence[RowBatch] = (),
        *,
        check: bool = False,
    ) -> tuple[list[tuple[int, int]], Sequence[LocalPart]]:
        """Have each shard take a simple step, as nearly all are.

        With `check` each shard looks for NaN and infinity. Of several shards those that
        other threads use get their part last: updates of many rows take long.

        Returns
        -------
        list of (int, int)
            The shards that have taken it, with their versions.
        sequence of LocalPart
            The other shards: the step changed nothing there.
        """
        versions: list[tuple[int, int]] = []
        if time.monotonic() > self.next_look and not self.is_live():
            return versions, self.parts
        firsts, touched = self.route.firsts, self.route.touched
        # As `_replace` for each shard, at a third of what that takes.
        kind, middle = step.kind, step[2:-3]
        seconds = SOON_SECONDS if len(self.parts) == 1 or not rows else 0.0
        rest: Sequence[LocalPart] = self.parts
        while True:
            late = []
            for part in rest:
                shard, generation, _, hosted, slices = part
                items: list[Item] = []
                for position, name, start, stop in slices:
                    # As `Item(...)`, at half of what that takes.
                    at = firsts.get((shard, position), 0) if firsts else 0
                    values = position, at, arrays[name][start:stop], None, None
                    items.append(tuple.__new__(Item, values))
                if rows:
                    layout = hosted.layout
                    items += [of.item(layout, shard, sent=False) for of in rows]
                said = kind, items, *middle, generation, check, touched
                try:
                    version = hosted.try_step(tuple.__new__(Step, said), seconds)
                except ShardBusyError:
                    version = ASK
                if version == ASK:
                    late.append(part)
                else:
                    versions.append((shard, version))
            if seconds or not late:
                return versions, late
            rest, seconds = late, SOON_SECONDS
