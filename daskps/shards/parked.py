"""The tickets that wait in a shard: as data, until a later call ends their wait.

It ends with the flip that a ticket may read. The bound of every policy is that of
:meth:`~daskps.shards.reader.Visibility.find_bound`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.errors import ClockError
from daskps.shards.memory.format import (
    FLIP,
    GATE,
    LIMIT,
    LIVE,
    POLICY,
    ROUNDS,
    RUN,
)
from daskps.shards.reader import BSP, NOT_YET, REFER, Visibility
from daskps.shards.steps import BARRIER, NO_WAIT, READ, Ready

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from daskps.shards.memory.segment import Segment
    from daskps.shards.run_state import ShardRun
    from daskps.shards.steps import Ticket


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
    reads, clock = Visibility(segment, step.run, step.rank), step.clock + step.tick
    in_rounds = record.plain[POLICY] == BSP
    if step.wait == BARRIER:
        return ready if record.plain[ROUNDS] >= clock else None
    found = reads.find_bound(flip, clock)
    if found == NOT_YET:
        return None
    if found == REFER and record.ranks[step.rank, LIVE]:
        # A trainer that starts again needs the round before the last one.
        earlier = flip_of_round(segment, step.run, clock)
        if earlier is None:
            return round_gone(segment, clock)
        version = segment.record(earlier).version
        return Ready(earlier, version, ticket.duplicate, exact=True)
    # The latest, for a trainer that has finished.
    exact = in_rounds and found != REFER
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


class ParkedTickets:
    """Tickets that wait for a publication, in the order in which they came.

    Parameters
    ----------
    segment : Segment
        The memory.
    run_state : ShardRun
        The state of the run in progress.
    """

    def __init__(self, segment: Segment, run_state: ShardRun) -> None:
        self.tickets: list[Ticket] = []
        self._segment, self._run_state = segment, run_state
        #: The sight of the shard at which they were asked last; None to ask them again.
        self.asked: object = None

    def settle(self, tickets: Iterable[Ticket]) -> list[Ticket]:
        """Finish tickets that need not wait, park the rest; return those finished."""
        done = []
        for ticket in tickets:
            if ticket.outcome is None:
                ticket.outcome = find_outcome(self._segment, ticket)
            if ticket.outcome is None:
                self.tickets.append(ticket)
            else:
                done.append(ticket)
        return done

    def take_stale(self) -> list[Ticket]:
        """Hand all of them out, to be asked again, where that may end a wait."""
        if not self.tickets or not self.is_stale:
            return []
        self.asked = self._sight()
        waiting, self.tickets = self.tickets, []
        return waiting

    @property
    def is_stale(self) -> bool:
        """Whether something was published that they were not asked at."""
        return bool(self.tickets) and self.asked != self._sight()

    def _sight(self) -> object:
        """Return all that may end a wait: a flip, a gate, a fence."""
        header = self._segment.header
        return header[FLIP], header[GATE], header[LIMIT], self._run_state.stopped

    def cancel(self, gone: Collection[int]) -> None:
        """Forget tickets, by their ids."""
        self.tickets = [t for t in self.tickets if id(t) not in gone]
