"""Finds the flip at which a read may read, or that it must wait, and copies.

The bound of every policy is written once, in :meth:`TrainerReads.find_bound`. A trainer
that maps the memory asks without the lock, by :meth:`TrainerReads.find_flip`; for a
ticket, under the lock, :func:`find_outcome` asks, and says what else there is to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from daskps.errors import ClockError
from daskps.shards.deputy import CLOSED
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
    VERSION,
    WRITING,
)
from daskps.shards.memory.sides import runs
from daskps.shards.run_record import CODES
from daskps.shards.steps import BARRIER, NO_WAIT, READ, Ready

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.shards.memory.segment import Segment
    from daskps.shards.steps import Ticket
    from daskps.typing import Array

#: Said instead of a flip: wait, or leave it to the shard.
NOT_YET, ASK = -1, -2
BSP, SSP = CODES["bsp"], CODES["ssp"]
#: The clocks of more ranks than this are for NumPy to look at.
MOST_RANKS = 64


class TrainerReads:
    """The reads of one trainer at one shard.

    Parameters
    ----------
    segment : Segment
        The shard's memory.
    run, rank : int
        The trainer's run and its number in it.
    """

    def __init__(self, segment: Segment, run: int, rank: int) -> None:
        self._segment, self._run = segment, run
        self._header = segment.header
        one, other = segment.records
        self._records = one.plain, other.plain
        self._ranks_at = one.ranks_at
        self._live_at = self._ranks_at + rank * RANK_WORDS + LIVE
        self._generation = self._header[GENERATION]
        #: Clocks by which the slowest live trainer was behind at the last look.
        self.lag = 0

    def find_flip(self, clock: int) -> int:
        """Return the flip that the trainer may read at its clock; or NOT_YET, or ASK."""
        header = self._header
        flip = header[FLIP]
        if (
            self._records[flip & 1][RUN] != self._run
            or header[GATE] == CLOSED
            or header[GENERATION] != self._generation
        ):
            return ASK
        return self.find_bound(flip, clock)

    def find_bound(self, flip: int, clock: int) -> int:
        """Return `flip` where its record lets the trainer read; or NOT_YET, or ASK.

        ASK is for what is not at this flip: the round before the last one, and what a
        trainer reads that has finished.
        """
        words = self._records[flip & 1]
        if words[POLICY] == BSP:
            ahead = clock - words[ROUNDS]
            if ahead > 0:
                return NOT_YET
            return flip if ahead == 0 and words[self._live_at] else ASK
        lag = clock - self.find_slowest(flip, clock)
        if words[POLICY] == SSP and lag > words[STALENESS]:
            return NOT_YET
        self.lag = max(0, lag)
        return flip

    def find_slowest(self, flip: int, clock: int) -> int:
        """Return the least clock of the trainers that are waited for, or `clock`."""
        words, at = self._records[flip & 1], self._ranks_at
        n_ranks = words[N_RANKS]
        if n_ranks > MOST_RANKS:
            clocks = self._segment.records[flip & 1].live[:, CLOCK]
            return int(clocks.min()) if len(clocks) else clock
        return min(
            (
                words[at + CLOCK]
                for at in range(at, at + n_ranks * RANK_WORDS, RANK_WORDS)
                if words[at + LIVE]
            ),
            default=clock,
        )

    def side(self, flip: int) -> int:
        """Return which buffer holds all weights at a flip, or MIXED."""
        return self._records[flip & 1][SIDE]

    def side_of(self, flip: int, position: int) -> int:
        """Return which buffer holds the weights of a piece at a flip."""
        return self._segment.records[flip & 1].weight_sides[position]

    def version(self, flip: int) -> int:
        """Return the version at a flip."""
        return self._records[flip & 1][VERSION]

    def is_whole(self, flip: int) -> bool:
        """Return whether what was copied since belongs to that flip."""
        header = self._header
        return header[WRITING] <= flip + 1 and header[FLIP] >= flip


class LatestReads(TrainerReads):
    """The reads of one shard by handles, which see whatever is in force."""

    def find_flip(self, clock: int) -> int:
        """Return the flip in force where it has reached the version `clock`; or ASK."""
        header = self._header
        flip = header[FLIP]
        if header[GATE] == CLOSED or header[GENERATION] != self._generation:
            return ASK
        return flip if self._records[flip & 1][VERSION] >= clock else ASK


def find_outcome(segment: Segment, ticket: Ticket) -> Ready | Exception | None:
    """Return how a ticket ends whose arrays, if any, were accepted; None to wait.

    The outcome depends on the flip word alone: a ticket that waits at one flip need
    not be asked about again before the next.
    """
    step, flip = ticket.step, segment.flip
    if step.wait == NO_WAIT:
        return Ready(flip, ticket.version, ticket.duplicate)
    ready = Ready(flip, segment.record(flip).version, ticket.duplicate)
    if step.run and step.rank >= 0:
        return _outcome_in_run(segment, ticket, ready)
    return None if step.wait == READ and ready.version < step.at_least else ready


def _outcome_in_run(
    segment: Segment, ticket: Ticket, ready: Ready
) -> Ready | Exception | None:
    """Return how the ticket of a trainer ends, which is `ready` at the flip in force."""
    step, flip, record = ticket.step, ready.flip, segment.record(ready.flip)
    reads, clock = TrainerReads(segment, step.run, step.rank), step.clock + step.tick
    in_rounds = record.plain[POLICY] == BSP
    if step.wait == BARRIER:
        return ready if record.plain[ROUNDS] >= clock else None
    found = reads.find_bound(flip, clock)
    if found == NOT_YET:
        return None
    if found == ASK and record.ranks[step.rank, LIVE]:
        # A trainer that starts again needs the round before the last one.
        earlier = flip_of_round(segment, step.run, clock)
        if earlier is None:
            return round_gone(segment, clock)
        version = segment.record(earlier).version
        return Ready(earlier, version, ticket.duplicate, exact=True)
    # The latest, for a trainer that has finished.
    exact = in_rounds and found != ASK
    return Ready(flip, ready.version, ticket.duplicate, reads.lag, exact)


def flip_of_round(segment: Segment, run: int, rounds: int) -> int | None:
    """Return the flip that holds a run after so many rounds, if one still does.

    Under BSP every publication but the first is one round, so the buffer that is not
    in force holds the round before.
    """
    flips = [segment.flip]
    if segment.writing == segment.flip:
        flips.append(segment.flip - 1)
    for flip in flips:
        words = segment.record(flip).plain
        if words[RUN] == run and words[ROUNDS] == rounds:
            return flip
    return None


def round_gone(segment: Segment, clock: int) -> ClockError:
    """Return the error of a read of a round that is not there any more."""
    return ClockError(
        f"round {clock} is gone from this shard, which is at round "
        f"{segment.current.plain[ROUNDS]} and keeps one before it"
    )


def copy_parts(
    segment: Segment,
    ready: Ready,
    parts: Sequence[tuple[str, int, int, Array]],
    copy: Callable[[Array, Array], None] = np.copyto,
) -> Ready | None:
    """Copy elements out without the lock.

    Parameters
    ----------
    segment : Segment
        The shard's memory.
    ready : Ready
        Where to read.
    parts : sequence of (dtype, start, stop, out)
        The elements to copy, of the shard's vector of that dtype.
    copy : callable
        Copies to the first array what the second one holds.

    Returns
    -------
    Ready or None
        The read that was made, or None when an update ran into the copy.
    """
    record = segment.record(ready.flip)
    for dtype, start, stop, out in parts:
        at = 0
        for weights in runs(segment, record, (dtype, start, stop)):
            copy(out[at : at + len(weights)], weights)
            at += len(weights)
    return ready if segment.writing <= ready.flip + 1 else None
