"""Requests of a cut (all shards at one moment) to a shard, under the shard's mutex."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.shards.cuts.cut import Cut, CutName, Order, ShardReport, broken, report
from daskps.shards.memory.format import RUN

if TYPE_CHECKING:
    from collections.abc import Iterable

    from daskps.shards.shard import Shard
    from daskps.shards.steps import Ticket


def begin_cut(shard: Shard, name: CutName, index: int) -> ShardReport:
    """Hold every new step from now on, or in a BSP run every round; report.

    The shard must have no other cut in progress.
    """
    shard.cut = Cut(name)
    shard.set_gate()
    return report(index, shard.segment, shard.in_flight)


def follow_order(
    shard: Shard, name: CutName, order: Order, ticket: Ticket
) -> list[Ticket]:
    """Let through what the cut lacks; `ticket` is done when the shard has reached it.

    Its outcome says which flip to copy, or why the cut must start again.
    """
    cut = shard.cut
    if cut is None or cut.name != name:
        ticket.outcome = broken("it was released here")
        return [ticket]
    cut.follow(order, ticket, shard.in_flight)
    held, cut.held = cut.held, []
    return shard.submit(held)


def holds_steps(shard: Shard, name: CutName) -> bool:
    """Return whether a cut still holds every new step."""
    return shard.cut is not None and shard.cut.name == name


def end_cut(shard: Shard, name: CutName) -> list[Ticket]:
    """Release what waits for a cut; twice is fine."""
    if not holds_steps(shard, name):
        return []
    return shard.release_cut("it was released here")


def acknowledge_steps(shard: Shard, run: int, owner: int, floor: int) -> list[Ticket]:
    """Hear that an owner's steps below `floor` were answered or given up."""
    if owner < 0 and shard.segment.current.fixed[RUN] != run:
        return []
    shard.in_flight.raise_floor(owner, floor)
    if shard.cut is None:
        return []
    shard.cut.acknowledge(owner, floor)
    return shard.cut.advance(shard.segment)


def mark_owners_lost(
    shard: Shard, name: CutName, owners: Iterable[int]
) -> list[Ticket]:
    """Wait no longer for the steps of some owners."""
    if shard.cut is None or shard.cut.name != name:
        return []
    shard.cut.mark_lost(owners)
    return shard.cut.advance(shard.segment)
