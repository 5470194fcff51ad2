"""The tickets that wait in a shard: as data, until a later call ends their wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.shards.memory.format import FLIP, GATE, LIMIT
from daskps.shards.reads import find_outcome

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
        What becomes of the run in progress.
    """

    def __init__(self, segment: Segment, run_state: ShardRun) -> None:
        self.tickets: list[Ticket] = []
        self._segment, self._run_state = segment, run_state
        #: What they were asked at last.
        self._asked: object = None

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
