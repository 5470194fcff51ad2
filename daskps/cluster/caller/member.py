"""A trainer's place in its run, as what it repeats sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.shard_map import StoreMap


class Member(Protocol):
    """One trainer of a run: what prepared reads, views and steps ask of its session."""

    meta: StoreMap
    shards: ShardClient
    run: int
    rank: int
    bsp: bool
    clock: int
    sequence: int
    #: Largest number of clocks a live trainer was behind one of its pulls.
    lag: int
