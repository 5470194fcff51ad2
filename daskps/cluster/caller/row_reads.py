"""Reads of rows without a lock or a message, from shards that this process reaches."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from daskps.cluster.caller.shard_map import Prepared
from daskps.cluster.host.copy_routine import copier
from daskps.cluster.host.row_copies import copy_both
from daskps.shards.reads import LatestReads
from daskps.shards.steps import Ready

if TYPE_CHECKING:
    from collections.abc import Iterable

    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.caller.targets import Target
    from daskps.cluster.caller.ways import Ways
    from daskps.cluster.host.near_shards import NearShards
    from daskps.shards.memory.segment import Segment

#: How often the shards' owners are looked after: one that is gone publishes nothing more.
LOOK_SECONDS = 0.1


class RowSource(NamedTuple):
    """One shard that rows are read of."""

    segment: Segment
    looks: LatestReads
    serving: NearShards


class RowReads:
    """Reads of rows, and of arrays with them, by a handle.

    Any update of a table spoils a read that it runs into: that is tried once, and then
    left to the shard, which has its turn for it.

    Parameters
    ----------
    meta : StoreMap
        The store.
    ways : Ways
        How this process reaches its shards.
    """

    def __init__(self, meta: StoreMap, ways: Ways) -> None:
        self._ways = ways
        self._meta = meta
        self._known: Prepared[int, RowSource] = Prepared(meta, meta.layout.n_shards)
        #: When to look after the owners again.
        self._next_look = 0.0

    def clear(self) -> None:
        """Forget the shards, and with them their memory."""
        self._known.clear()

    def fill(self, target: Target, bounds: Iterable[int]) -> int:
        """Read all that a target asks for.

        Parameters
        ----------
        target : Target
            What is read, and where it goes.
        bounds : iterable of int
            The least version of each of its shards.

        Returns
        -------
        int
            How many hosts have what was read; 0 where shards must be asked.
        """
        if self._ways.run:
            return 0
        shards = target.shards
        if time.monotonic() > self._next_look:
            found = [self._find(shard) for shard in shards]
            if not all(one is not None and one.serving.is_live() for one in found):
                return 0
            self._next_look = time.monotonic() + LOOK_SECONDS
        hosts = set()
        for shard, least in zip(shards, bounds, strict=False):
            source = self._find(shard)
            flip = -1 if source is None else source.looks.find_flip(least)
            if source is None or flip < 0:
                return 0
            outs = target.outs(shard)
            asked = zip(target.ranges(shard), outs, strict=True)
            if not copy_both(
                source.segment,
                Ready(flip, 0),
                parts=[(*one, out) for one, out in asked],
                rows=target.row_reads(shard),
                copy=copier(sum(out.nbytes for out in outs)),
            ):
                return 0
            hosts.add(id(source.serving))
        return len(hosts)

    def _find(self, shard: int) -> RowSource | None:
        """Return a shard as this process has it; None where it has not."""
        source, where = self._known.find(shard), self._meta.where
        if source is None and (found := self._ways.find_shard(shard)) is not None:
            serving, hosted = found
            if not hosted.locks_reads:
                segment = hosted.shard.segment
                looks = LatestReads(segment, 0, -1)
                source = RowSource(segment, looks, serving)
                self._known.keep(shard, source, where)
        return source
