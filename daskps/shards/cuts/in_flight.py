"""Steps that may not have reached all shards: what their producers say of them.

A producer says with each step below which number all its steps were answered or given
up (its *floor*), and which shards the step goes to if not to all. The record has the
floor in the row of the producer, or of the rank, and of a producer's newest step where
it goes. Of the steps before that one, which may be in doubt where several are under
way, and of trainers' steps, only a cut needs the latter, so that is kept beside the
record: a shard that does not know it waits for a step that never comes until the cut is
given up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.shards import producers
from daskps.shards.memory.areas import RECORD
from daskps.shards.memory.format import (
    FLOOR,
    MAX_PRODUCERS,
    N_PRODUCERS,
    N_RANKS,
    PRODUCER,
    RANK_FLOOR,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from daskps.shards.memory.format import Words
    from daskps.shards.memory.segment import Segment
    from daskps.shards.steps import Intervals, Step

#: Owners whose targets are known, at most; those without a row in the record go first.
_MOST = 4 * MAX_PRODUCERS


def owner_of(step: Step) -> int:
    """Return whose step it is: a producer's number, or -1 - rank of a trainer."""
    return -1 - step.rank if step.run else step.producer


class InFlight:
    """Floors and targets of the steps one shard has applied.

    Parameters
    ----------
    segment : Segment
        The memory.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        #: By owner and number where steps go that are not meant for all shards.
        self.targets: dict[int, dict[int, Intervals]] = {}

    def note(self, step: Step) -> None:
        """Take what an applied step says besides its arrays, and the record has not."""
        owner = -1 - step.rank if step.run else step.producer
        if step.touched is not None:
            self.targets.setdefault(owner, {})[step.sequence] = step.touched
        if owner in self.targets:
            self._drop(owner, step.floor)

    def floor(self, owner: int) -> int:
        """Return below which number all steps of an owner are settled."""
        row, column = self._find(owner)
        return 0 if row is None else int(row[column])

    def raise_floor(self, owner: int, floor: int) -> None:
        """Note that an owner's steps below `floor` were answered or given up."""
        row, column = self._find(owner)
        if row is None and owner >= 0:
            # This may have overtaken its first step.
            producers.open_row(self._segment, owner, floor)
        elif row is not None and floor > row[column]:
            at = self._segment.current.index_of(row, column)
            self._segment.amend(RECORD, ((at, floor),))
        self._drop(owner, floor)

    def _find(self, owner: int) -> tuple[Words | None, int]:
        """Return the row of an owner in the record in force, and where its floor is."""
        record = self._segment.current
        if owner >= 0:
            return producers.find_row(record, owner), FLOOR
        rank = -1 - owner
        return record.ranks[rank] if rank < record.plain[N_RANKS] else None, RANK_FLOOR

    def _drop(self, owner: int, floor: int) -> None:
        """Forget where steps below a floor go."""
        of = self.targets.pop(owner, {})
        if left := {s: t for s, t in of.items() if s >= floor}:
            self.targets[owner] = left
        if len(self.targets) > _MOST:
            self._prune()

    def touched(self) -> Iterator[tuple[int, int, Intervals]]:
        """Give owner, sequence number and shards of the steps not meant for all."""
        for owner, of in self.targets.items():
            floor = self.floor(owner)
            yield from ((owner, s, runs) for s, runs in of.items() if s >= floor)

    def forget_ranks(self) -> None:
        """Forget the trainers: another run numbers its steps from 0 again."""
        self.targets = {o: t for o, t in self.targets.items() if o >= 0}

    def _prune(self) -> None:
        record = self._segment.current
        rows = record.producers[: record.fixed[N_PRODUCERS], PRODUCER]
        kept = set(rows.tolist())
        self.targets = {o: t for o, t in self.targets.items() if o < 0 or o in kept}
