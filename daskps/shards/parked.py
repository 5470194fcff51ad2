"""The tickets that wait in a shard: as data, until a later call ends their wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.shards.deputy import OPEN
from daskps.shards.memory.format import (
    FLIP,
    GATE,
    GENERATION,
    LIMIT,
    LIVE,
    N_RANKS,
    POLICY,
    RANK_WORDS,
    ROUNDS,
    RUN,
    VERSION,
)
from daskps.shards.reader import BSP, REFER
from daskps.shards.reads import find_outcome
from daskps.shards.steps import READ, Ready, changes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from daskps.shards.memory.segment import Segment
    from daskps.shards.run_state import ShardRun
    from daskps.shards.steps import Ticket


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
        self._header = segment.header
        self._heads = [record.plain for record in segment.records]
        self._live_at = segment.records[0].ranks_at + LIVE
        #: The sight of the shard at which they were asked last.
        self._asked: object = None

    def end(self, ticket: Ticket, generation: int) -> bool:
        """Finish a ticket that has waited for its round, which is complete now.

        Returns whether it is one, at a shard of that generation.
        """
        flip = self._find_flip(ticket, generation)
        if flip < 0:
            return False
        version = self._heads[flip & 1][VERSION]
        if not ticket.applied:
            ticket.applied, ticket.version = True, ticket.version or version
        ticket.outcome = Ready(flip, version, ticket.duplicate, exact=True)
        return True

    def _find_flip(self, ticket: Ticket, generation: int) -> int:
        """Return the flip that a trainer in rounds may read, or REFER.

        That is what :func:`find_outcome` says of nearly all tickets that wait. REFER where
        it has to wait on, where there is more to it than to read, or there may be
        something against it.
        """
        step, header = ticket.step, self._header
        flip = header[FLIP]
        words = self._heads[flip & 1]
        if (
            step.wait != READ
            or not step.run
            or step.run != words[RUN]
            or words[POLICY] != BSP
            or not 0 <= step.rank < words[N_RANKS]
            or not words[self._live_at + step.rank * RANK_WORDS]
            or header[GATE] != OPEN
            or not header[GENERATION] == generation == step.generation
            or not (ticket.applied or not changes(step))
        ):
            return REFER
        return flip if step.clock + step.tick == words[ROUNDS] else REFER

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
        self._asked = self._sight()
        waiting, self.tickets = self.tickets, []
        return waiting

    @property
    def is_stale(self) -> bool:
        """Whether something was published that they were not asked at."""
        return bool(self.tickets) and self._asked != self._sight()

    def _sight(self) -> object:
        """Return all that may end a wait: a flip, a gate, a fence."""
        header = self._segment.header
        return header[FLIP], header[GATE], header[LIMIT], self._run_state.stopped

    def cancel(self, gone: Collection[int]) -> None:
        """Forget tickets, by their ids."""
        self.tickets = [t for t in self.tickets if id(t) not in gone]
