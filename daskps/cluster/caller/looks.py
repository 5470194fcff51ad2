"""Looks at a shard for reads without a lock, for a trainer or a handle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.cluster.machine.pauses import Pause
from daskps.shards.reads import NOT_YET, LatestReads, TrainerReads

if TYPE_CHECKING:
    from daskps.cluster.caller.ways import Ways
    from daskps.shards.memory.segment import Segment

#: How long a read waits without asking the shards, and how much of it without a sleep.
WAIT_SECONDS, SPIN_SECONDS = 0.01, 0.0005
#: How often a read looks after the shards' owners: an owner that is gone publishes
#: nothing more, and reads of its memory would look as if nobody pushed.
LOOK_SECONDS = 0.1


def looks_at(segment: Segment, ways: Ways) -> TrainerReads:
    """Return the object that finds the flip at which a trainer or a handle may read."""
    if ways.run:
        return TrainerReads(segment, ways.run, ways.rank)
    return LatestReads(segment, 0, -1)


class NotedReads(TrainerReads):
    """The reads of one trainer at one shard, each with the version that it has read.

    Parameters
    ----------
    segment : Segment
        The shard's memory.
    ways : Ways
        The ways of the trainer that reads.
    shard : int
        The shard's number.
    seen : dict of int to int
        Takes the version, by that number.
    """

    def __init__(
        self, segment: Segment, ways: Ways, shard: int, seen: dict[int, int]
    ) -> None:
        super().__init__(segment, ways.run, ways.rank)
        self._shard, self._seen = shard, seen

    def is_whole(self, flip: int) -> bool:
        """Return whether the copy made since belongs to that flip, and note it."""
        version = self.version(flip)
        found = super().is_whole(flip)
        if found:
            self._seen[self._shard] = version
        return found


def wait(looks: TrainerReads, clock: int) -> int:
    """Wait a little for the other trainers: a round is short, where they are near."""
    pause = Pause(SPIN_SECONDS)
    while (flip := looks.find_flip(clock)) == NOT_YET and pause.seconds < WAIT_SECONDS:
        pause()
    return flip
