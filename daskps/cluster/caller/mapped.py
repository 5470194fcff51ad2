"""Shards of another worker of the machine, mapped into this process."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING

import numpy as np

from daskps.cluster.host.hosted import HostedShard, ReachableShards
from daskps.cluster.host.rules import Rules
from daskps.cluster.machine.blocks import owner_of
from daskps.cluster.machine.folder import CarrierClosed
from daskps.cluster.machine.membership import HERE, Machine
from daskps.errors import ProtocolError, RunCancelledError
from daskps.shards.deputy import CLOSED, gate_of
from daskps.shards.memory.segment import Segment
from daskps.shards.shard import Shard

if TYPE_CHECKING:
    from daskps.cluster.caller.shard_map import RunMembership, StoreMap

logger = logging.getLogger(__name__)
#: How long a call waits here before the shard's owner waits in its place. The owner
#: hears more: that a run was cancelled, a store deleted, a worker lost.
PATIENCE_SECONDS = 1.0


class MappedShards(ReachableShards):
    """Shards of one worker as a process of the same machine reaches them.

    Parameters
    ----------
    meta : StoreMap
        The store.
    worker : str
        The owner of the shards.
    joined : RunMembership, optional
        The run whose trainer calls.
    machine : Machine
        The machine where it looks for the shards' memory.

    Raises
    ------
    CarrierClosed
        Where one of them cannot be mapped here.
    """

    def __init__(
        self,
        meta: StoreMap,
        worker: str,
        joined: RunMembership | None,
        *,
        machine: Machine = HERE,
    ) -> None:
        super().__init__(np.empty, PATIENCE_SECONDS)
        where = meta.where
        shards = where.hosts.get(worker, ())
        places = {s: where.segments[s] for s in shards if s in where.segments}
        if not places or len(places) < len(shards):
            raise CarrierClosed("it has no shards, or they are in private memory")
        self._members = machine.visit(meta.cluster)
        weakref.finalize(self, self._members.leave)
        rules = Rules(meta.layout, meta.rules)
        slots = rules.slots
        for shard, place in places.items():
            block = self._members.attach(place)
            self._owner = owner_of(place.name)
            segment = Segment(meta.layout, shard, slots, block.buffer, durable=True)
            deputy = Shard.as_deputy(segment, rules, cache_dir=rules.cache_dir)
            self.shards[meta.uid, shard] = HostedShard(
                meta.name, meta.layout, shard, deputy, block=block
            )
            if joined is not None:
                self._join(joined, shard, deputy)

    def _join(self, joined: RunMembership, shard: int, deputy: Shard) -> None:
        """Find the mailboxes of a run; without them its steps go to the owner."""
        place = joined.mailboxes.get(shard)
        if place is None:
            return
        try:
            buffer = self._members.attach(place).body
            deputy.run_state.attach_rounds(
                joined.run, joined.size, joined.reduce, buffer
            )
        except (CarrierClosed, ProtocolError, RunCancelledError) as reason:
            logger.debug("no mailboxes of run %d here: %s", joined.run, reason)

    @property
    def is_closed(self) -> bool:
        """Whether the owner has freed a shard; one that moved has another generation."""
        return any(gate_of(s.shard.segment) == CLOSED for s in self.shards.values())

    def make_room(self, hosted: HostedShard, producer: int, seconds: float) -> None:
        """Leave that to the owner: its deputies hand steps back that find no room."""

    def is_live(self) -> bool:
        """Return whether their owner is there, as far as this process can tell.

        A process that ends leaves the machine first: calls of other threads of it go on
        by message, and hear from the owner that it is closed.
        """
        try:
            return self._members.lives(self._owner)
        except CarrierClosed:
            return False

    def close(self) -> None:
        """Let go of the shards' memory, and of the mailboxes."""
        self.shards.clear()
