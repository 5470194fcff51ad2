"""Finds steps that a shard does not serve: they are fenced, or another's to take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.errors import ClockError, ConsistencyError, StaleGenerationError
from daskps.shards import producers
from daskps.shards.deputy import CLOSED, OPEN, RELEASED, gate_of
from daskps.shards.memory.format import GENERATION, N_RANKS, POLICY, RUN
from daskps.shards.run_record import POLICY_CODES
from daskps.shards.steps import SCALE, changes

if TYPE_CHECKING:
    from daskps.shards.memory.format import Record
    from daskps.shards.memory.segment import Segment
    from daskps.shards.run_state import ShardRun
    from daskps.shards.steps import Step, Ticket


def find_refusal(
    ticket: Ticket, segment: Segment, run_state: ShardRun, generation: int
) -> Exception | None:
    """Return why a shard of a generation does not serve a ticket, None where it does."""
    step, record = ticket.step, segment.current
    if step.generation != generation:
        return StaleGenerationError(
            f"a message for generation {step.generation} of a shard that is at "
            f"{generation}; ask the directory where it lives and send again"
        )
    if step.run and step.run != record.plain[RUN]:
        return run_state.why_over(step.run)
    if step.run == run_state.stopped[0] != 0:
        return run_state.why_stopped
    return None if ticket.applied else _find_misplacement(step, record)


def _find_misplacement(step: Step, record: Record) -> Exception | None:
    """Return why a step of the run in progress, or of none, may not take part."""
    run = record.fixed[RUN]
    if step.run:
        n_ranks = record.fixed[N_RANKS]
        if step.rank >= n_ranks or (step.rank < 0 and changes(step)):
            return ClockError(
                f"rank {step.rank} is none of the {n_ranks} trainers of run {run}"
            )
    elif changes(step) and record.fixed[POLICY] == POLICY_CODES["bsp"]:
        if step.kind == SCALE and step.clock == run:
            return None  # its trainers wait for it
        article = "an" if step.kind.startswith("a") else "a"
        return ConsistencyError(
            f"run {run} has this store to itself (sync='bsp'), {article} {step.kind} "
            f"from outside was refused; push through its trainers, wait until it ends, "
            f"or train with sync='ssp' or 'asp'"
        )
    return None


def is_for_owner(
    step: Step, segment: Segment, run_state: ShardRun, generation: int
) -> bool:
    """Return whether a deputy hands a step back before it looks at it."""
    gate = gate_of(segment)
    if gate in (CLOSED, RELEASED) or segment.header[GENERATION] != generation:
        return True
    if not changes(step):
        return False
    if gate != OPEN or step.touched is not None:
        return True
    if not step.run:
        return producers.lacks_room(segment.current, step.producer)
    # Where it is without the mailboxes of the run in progress.
    has_none = run_state.is_bsp and run_state.round is None
    return has_none and step.run == run_state.run
