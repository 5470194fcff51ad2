"""Which steps may not have reached all shards: what their producers say of them.

A producer says with each step below which number all its steps were answered or given
up (its *floor*), and which shards the step goes to if not to all. Of its newest step
the record says both. Of those before it, which may be in doubt where several are under
way, and of trainers' steps, only a cut needs either, so that is kept beside the record:
a shard that does not know it waits for a step that never comes until the cut is given
up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.shards.memory.format import MAX_PRODUCERS, N_PRODUCERS, PRODUCER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from daskps.shards.memory.segment import Segment
    from daskps.shards.steps import Intervals, Step

#: Owners known of, at most; those that have no row in the record go first.
_MOST = 4 * MAX_PRODUCERS


def owner_of(step: Step) -> int:
    """Return whose step it is: a producer's number, or -1 - rank of a trainer."""
    return -1 - step.rank if step.run else step.producer


class Floors:
    """Floors and targets of the steps one shard has applied.

    Parameters
    ----------
    segment : Segment
        The memory.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._floors: dict[int, int] = {}
        self._touched: dict[int, dict[int, Intervals]] = {}

    def note(self, step: Step) -> None:
        """Take what a step says besides its arrays."""
        owner = owner_of(step)
        if step.floor > self._floors.get(owner, 0):
            self.raise_floor(owner, step.floor)
        if step.touched is not None:
            self._touched.setdefault(owner, {})[step.sequence] = step.touched

    def floor(self, owner: int) -> int:
        """Return below which number all steps of an owner are settled."""
        return self._floors.get(owner, 0)

    def raise_floor(self, owner: int, floor: int) -> None:
        """Note that an owner's steps below `floor` were answered or given up."""
        if floor <= self._floors.get(owner, 0):
            return
        self._floors[owner] = floor
        if owner in self._touched:
            of = self._touched[owner]
            self._touched[owner] = {s: t for s, t in of.items() if s >= floor}
        if len(self._floors) > _MOST:
            self._prune()

    def touched(self) -> Iterator[tuple[int, int, Intervals]]:
        """Give owner, sequence number and shards of the steps not meant for all."""
        for owner, of in self._touched.items():
            floor = self.floor(owner)
            yield from ((owner, s, runs) for s, runs in of.items() if s >= floor)

    def forget_ranks(self) -> None:
        """Forget the trainers: another run numbers its steps from 0 again."""
        self._floors = {o: f for o, f in self._floors.items() if o >= 0}
        self._touched = {o: t for o, t in self._touched.items() if o >= 0}

    def _prune(self) -> None:
        record = self._segment.current
        rows = record.producers[: record.fixed[N_PRODUCERS], PRODUCER]
        kept = set(rows.tolist())
        self._floors = {o: f for o, f in self._floors.items() if o < 0 or o in kept}
        self._touched = {o: t for o, t in self._touched.items() if o < 0 or o in kept}
