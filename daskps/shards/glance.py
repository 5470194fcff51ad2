"""A trainer's read without the lock: whether it may read now, and where.

What :mod:`daskps.shards.waiting` decides for a ticket under the lock, for the case that
nothing need be waited for, in few reads of plain words. Whatever else there is to say
is left to the shard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.shards.memory.format import (
    CLOCK,
    FLIP,
    GATE,
    GENERATION,
    LIVE,
    N_RANKS,
    POLICY,
    RANK_WORDS,
    ROUNDS,
    RUN,
    SIDE,
    STALENESS,
    WRITING,
    integers,
)
from daskps.shards.memory.gates import CLOSED
from daskps.shards.waiting import CODES

if TYPE_CHECKING:
    from daskps.shards.memory.segment import Segment

#: What a look says instead of a flip: wait, or leave it to the shard.
NOT_YET, ASK = -1, -2
BSP, SSP = CODES["bsp"], CODES["ssp"]
#: The clocks of more ranks than this are for NumPy to look at.
MOST_RANKS = 64


class Glance:
    """Looks at one shard for one trainer.

    Parameters
    ----------
    segment : Segment
        The shard's memory.
    run, rank : int
        The trainer's run and its number in it.
    """

    def __init__(self, segment: Segment, run: int, rank: int) -> None:
        self._run, self._rank = run, rank
        self._header = integers(segment.words)
        self._fixed = tuple(integers(r.fixed) for r in segment.records)
        self._ranks = tuple(integers(r.ranks.reshape(-1)) for r in segment.records)
        self._sides = tuple(r.weight_sides for r in segment.records)
        self._generation = int(segment.words[GENERATION])
        #: Clocks by which the slowest live trainer was behind at the last look.
        self.lag = 0

    def flip(self, clock: int) -> int:
        """Return the flip that the trainer may read at its clock; or NOT_YET, or ASK."""
        header = self._header
        flip = header[FLIP]
        fixed = self._fixed[flip & 1]
        if (
            fixed[RUN] != self._run
            or header[GATE] == CLOSED
            or header[GENERATION] != self._generation
        ):
            return ASK
        policy = fixed[POLICY]
        if policy == BSP:
            rounds = fixed[ROUNDS]
            if not self._ranks[flip & 1][self._rank * RANK_WORDS + LIVE]:
                return ASK
            if rounds == clock:
                return flip
            return NOT_YET if rounds < clock else ASK
        if fixed[N_RANKS] > MOST_RANKS:
            return ASK
        return self._unless_ahead(flip, clock)

    def _unless_ahead(self, flip: int, clock: int) -> int:
        fixed, ranks = self._fixed[flip & 1], self._ranks[flip & 1]
        slowest = min(
            (
                ranks[at + CLOCK]
                for at in range(0, fixed[N_RANKS] * RANK_WORDS, RANK_WORDS)
                if ranks[at + LIVE]
            ),
            default=clock,
        )
        if fixed[POLICY] == SSP and clock - slowest > fixed[STALENESS]:
            return NOT_YET
        self.lag = max(0, clock - slowest)
        return flip

    def side(self, flip: int) -> int:
        """Return which buffer holds all weights at a flip, or MIXED."""
        return self._fixed[flip & 1][SIDE]

    def side_of(self, flip: int, position: int) -> int:
        """Return which buffer holds the weights of a piece at a flip."""
        return self._sides[flip & 1][position]

    def is_whole(self, flip: int) -> bool:
        """Return whether what was copied since belongs to that flip."""
        header = self._header
        return header[WRITING] <= flip + 1 and header[FLIP] >= flip
