"""Acting for a shard in a process that does not own it.

Whoever maps a shard's segment and has its lock may advance it: all that a shard knows
lies in there. What the owner alone keeps (why a run has ended, what a cut holds back,
which steps were not meant for all shards) a deputy cannot answer for; it hands the
step back untouched, and its caller sends it to the owner.

The owner says in the segment's *gate* how far deputies may go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.shards import run_record
from daskps.shards.memory.format import GENERATION, RUN
from daskps.shards.memory.gates import CLOSED, N_GATES, OPEN, RELEASED, gate_of
from daskps.shards.shard import Shard

if TYPE_CHECKING:
    from daskps.shards.arrays.planning import Bindings
    from daskps.shards.memory.segment import Segment
    from daskps.shards.steps import Step, Ticket


class NotHereError(Exception):
    """A step that only the owner of the shard can take; nothing was changed."""


class Deputy(Shard):
    """The state machine over a segment that another process owns.

    Parameters
    ----------
    segment : Segment
        The memory.
    bindings : Bindings
        The update rule of each parameter index that has one.
    cache_dir : str, optional
        Where compiled functions are kept.
    """

    def __init__(
        self, segment: Segment, bindings: Bindings, *, cache_dir: str | None = None
    ) -> None:
        generation = int(segment.words[GENERATION])
        super().__init__(segment, bindings, generation, cache_dir=cache_dir)

    def _refused(self, ticket: Ticket) -> bool:
        """Hand back whatever the owner would refuse, or alone can take."""
        step = ticket.step
        if (
            self._is_closed_to(step)
            or self.segment.words[GENERATION] != self.generation
            or super()._refused(ticket)
        ):
            ticket.outcome = NotHereError()
        return ticket.outcome is not None

    def _is_closed_to(self, step: Step) -> bool:
        gate = gate_of(self.segment)
        if gate in (CLOSED, RELEASED):
            return True
        if not run_record.changes(step):
            return False
        if gate != OPEN or step.touched is not None:
            return True
        if step.run:
            return step.run == self.segment.current.fixed[RUN] and self._lacks_rounds
        return self.needs_room(step.producer)

    @property
    def _lacks_rounds(self) -> bool:
        """Whether steps go to mailboxes that this process does not have."""
        return self.is_bsp and self.rounds is None

    def _fail(self, run: int, error: Exception) -> None:
        """Leave it to the owner to end the run: nothing came of the step here."""
        raise NotHereError from error

    def _sight(self) -> int:
        # A gate that closes lets nobody wait on.
        return self.segment.flip * N_GATES + gate_of(self.segment)
