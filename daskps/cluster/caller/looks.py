"""How a read without a lock looks at a shard: who looks, and how long it waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.cluster.machine.pauses import Pause
from daskps.shards.reads import NOT_YET, LatestReads, TrainerReads

if TYPE_CHECKING:
    from daskps.cluster.caller.ways import Ways
    from daskps.shards.memory.segment import Segment

#: How long a read waits without asking the shards, and how much of it without a sleep.
WAIT_SECONDS, SPIN_SECONDS = 0.01, 0.0005
#: How often the shards' owners are looked after: one that is gone publishes nothing more,
#: and what is read from its memory would look as if nobody pushed.
LOOK_SECONDS = 0.1


def looks_at(segment: Segment, ways: Ways) -> TrainerReads:
    """Return what says at which flip a trainer may read a shard, or a handle."""
    if ways.run:
        return TrainerReads(segment, ways.run, ways.rank)
    return LatestReads(segment, 0, -1)


def wait(looks: TrainerReads, clock: int) -> int:
    """Wait a little for the other trainers: a round is short, where they are near."""
    pause = Pause(SPIN_SECONDS)
    while (flip := looks.find_flip(clock)) == NOT_YET and pause.seconds < WAIT_SECONDS:
        pause()
    return flip
