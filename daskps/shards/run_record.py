"""The words of a run in a shard's record, and the check of who may take part in it."""

from __future__ import annotations

import struct
from typing import Final

from daskps.consistency import Policy, encoded, measures_delay
from daskps.epochs import Epochs
from daskps.errors import (
    ClockError,
    ConsistencyError,
    ContributionLostError,
    IllegalStateError,
    RunCancelledError,
)
from daskps.shards.memory.format import (
    CLOCK,
    DAMPING,
    DELAYS,
    EPOCH,
    FIRST,
    LIVE,
    N_DELAYS,
    N_RANKS,
    NEXT,
    PER_EPOCH,
    POLICY,
    RANK_FLOOR,
    RANK_WORDS,
    ROUNDS,
    RUN,
    STALENESS,
    TICKS,
    VERSION,
    Record,
)
from daskps.shards.steps import ADD, GRADIENT, MODEL, Step

#: The answers of a round to a step.
NEW: Final = "new"
REPEAT: Final = "repeat"
EARLY: Final = "early"
#: Codes of the policies in a record; 0 is no run at all. MEASURED is an ASP whose
#: trainers say with a push what they have read.
POLICY_CODES = {"bsp": 1, "ssp": 2, "asp": 3}
MEASURED: Final = 4
#: Policies under which each step that is new is applied as it comes.
_SIMPLE: Final = (POLICY_CODES["ssp"], POLICY_CODES["asp"])


#: Bits of a step's number that one trainer of a rank counts with. Above them stands
#: which of the rank's trainers it is, under BSP, where one took another's place.
_STEP_BITS = 40
#: Trainers that a rank may have, one after the other.
MOST_ATTEMPTS = 1 << 20


#: Names of the kinds that trainers send, for messages.
_WORDS = {
    GRADIENT: "gradients (push)",
    MODEL: "values (assign, or average='models')",
    ADD: "deltas (add)",
}


def first_of(attempt: int) -> int:
    """Return the number that the steps of a rank's so-many-th trainer begin with."""
    return attempt << _STEP_BITS


def begin_run(
    record: Record, run: int, policy: Policy, n_ranks: int, *, epochs: Epochs
) -> None:
    """Write a run into a record, and where in its epochs it begins."""
    name, bound, damping = encoded(policy)
    code = MEASURED if measures_delay(policy) else POLICY_CODES[name]
    record.fixed[[RUN, POLICY, STALENESS, ROUNDS, N_RANKS]] = (
        run,
        code,
        bound,
        0,
        n_ranks,
    )
    record.plain[DAMPING] = _bits(damping)
    record.fixed[[EPOCH, PER_EPOCH, TICKS]] = epochs
    record.ranks[:n_ranks] = 0, 0, 1, 0, 0


def end_run(record: Record, version: int, epochs: Epochs) -> None:
    """Take the run out of a record, which is of `version` from then on, and there."""
    record.fixed[[RUN, POLICY, N_RANKS]] = 0
    record.fixed[VERSION] = version
    record.fixed[[EPOCH, PER_EPOCH, TICKS]] = epochs


def epochs_of(record: Record) -> Epochs:
    """Return where a shard is in its epochs, after its last round or step."""
    words = record.plain
    epochs = Epochs(words[EPOCH], words[PER_EPOCH], words[TICKS])
    if not (words[RUN] and epochs.per_epoch):
        return epochs
    if words[POLICY] == POLICY_CODES["bsp"]:
        return epochs._replace(clock=epochs.clock + words[ROUNDS])
    ranks, live = record.ranks[: words[N_RANKS], CLOCK], record.live[:, CLOCK]
    # A rank that has finished is at the end of the last epoch, or had no data.
    ticks = int(live.min() if len(live) else ranks.max())
    return epochs._replace(clock=epochs.clock + ticks)


def epoch_of(record: Record) -> int | None:
    """Return the epoch of the run in progress, None where it has none."""
    words = record.plain
    return epochs_of(record).ended if words[RUN] and words[PER_EPOCH] else None


def check_epochs(record: Record, epochs: Epochs) -> None:
    """Refuse a run that would begin with an epoch that there was already.

    Raises
    ------
    ConsistencyError
        Where another run has trained the store since somebody looked.
    """
    now = epochs_of(record)
    if epochs.place < now.place:
        raise ConsistencyError(
            f"a run was to begin with epoch {epochs.ended}, but the store has come to "
            f"epoch {now.following}: another run has trained it meanwhile; start the "
            f"run again"
        )


def repeats(record: Record, step: Step) -> bool:
    """Return whether a trainer's step was applied already (ASP, SSP).

    Raises
    ------
    ClockError
        When it was not, and the rank has finished.
    """
    if record.fixed[POLICY] == POLICY_CODES["bsp"]:
        raise IllegalStateError(
            f"a step of run {step.run} reached a shard without its mailboxes; attach "
            f"them first"
        )
    row = record.ranks[step.rank]
    if step.sequence < row[NEXT]:
        return True
    if not row[LIVE]:
        raise ClockError(finished(step))
    return False


def find_delay(record: Record, step: Step) -> int:
    """Return how many updates there were since a trainer has pulled; -1 where unasked.

    Only gradients have a delay, of runs that measure it.
    """
    if record.plain[POLICY] != MEASURED or not step.run or step.kind != GRADIENT:
        return -1
    return max(0, record.version - step.at_least)


def dampen(record: Record, step: Step, delay: int) -> Step | None:
    """Return a trainer's gradients as they count with their delay; None for not at all."""
    bound, damping = record.plain[STALENESS], _number(record.plain[DAMPING])
    if 0 <= bound < delay:
        return None
    if not damping:
        return step
    return step._replace(weight=step.weight * (1.0 + delay) ** -damping)


def delay_bucket(delay: int) -> int:
    """Return where a delay is counted: 0, 1, 2 to 3, 4 to 7, and so on; the last is open."""
    return min(delay.bit_length(), N_DELAYS - 1)


def delays_of(header: memoryview[int]) -> dict[int, int]:
    """Return how many gradients had a delay of so many updates or more, up to the next."""
    counts = header[DELAYS : DELAYS + N_DELAYS]
    return {(1 << at) >> 1: n for at, n in enumerate(counts) if n}


def _bits(number: float) -> int:
    (found,) = struct.unpack("<q", struct.pack("<d", number))
    return int(found)


def _number(bits: int) -> float:
    (found,) = struct.unpack("<d", struct.pack("<q", bits))
    return float(found)


def find_row(record: Record, rank: int) -> int:
    """Return which of its words the row of a rank begins at."""
    return record.ranks_at + rank * RANK_WORDS


def find_new(record: Record, step: Step) -> int:
    """Return where the row of a trainer is whose step is new; -1 for any other.

    Of runs without rounds: ASP and SSP.
    """
    words = record.plain
    if words[POLICY] not in _SIMPLE:
        return -1  # under MEASURED its age decides what becomes of it
    at = record.ranks_at + step.rank * RANK_WORDS
    is_new = words[at + NEXT] <= step.sequence and words[at + LIVE]
    return at if is_new else -1


def note_step(record: Record, at: int, step: Step) -> None:
    """Note a trainer's step as applied, whose row begins at a word (ASP, SSP)."""
    row = record.plain[at : at + RANK_WORDS]
    row[NEXT] = step.sequence + 1
    row[RANK_FLOOR] = max(row[RANK_FLOOR], step.floor)
    if step.tick:
        if step.clock >= row[CLOCK]:
            row[CLOCK] = step.clock + 1
        row[FIRST] = step.sequence + 1


def ended(run: int, reason: str) -> RunCancelledError:
    """Return what a step of a run that is over gets."""
    return RunCancelledError(f"run {run} takes no more steps: {reason}")


def judge_step(
    step: Step, state: tuple[int, bool, bool], following: int, uncommitted: int
) -> str:
    """Return whether a step under BSP is NEW, a REPEAT, or EARLY by one round.

    Parameters
    ----------
    step : Step
        The step that a trainer sends.
    state : (int, bool, bool)
        The open round, and whether the trainer's rank has ticked in it, or finished.
    following, uncommitted : int
        The next number of the rank, without and with pushes before its tick.

    Raises
    ------
    ClockError
        When its rank has finished, or has skipped a round.
    ContributionLostError
        When the shard lacks what its rank has sent in the round before.
    RunCancelledError
        When another trainer has taken the place of the one that sends it.
    """
    now, has_ticked, has_finished = state
    if step.sequence >> _STEP_BITS < following >> _STEP_BITS:
        # Also where it would complete what its successor has dropped.
        raise RunCancelledError(
            f"run {step.run} takes no more steps of this trainer {step.rank}: its worker "
            f"was taken for lost, and another one goes on in its place"
        )
    if step.sequence < uncommitted:
        return REPEAT
    if has_finished:
        raise ClockError(finished(step))
    if step.clock < now:
        # Sent again after a timeout, under a new number: the first one counts.
        return REPEAT
    if step.clock == now:
        return REPEAT if has_ticked else NEW
    if step.clock == now + 1:
        if has_ticked:
            return EARLY
        raise lacks(step, now)
    raise ClockError(
        f"rank {step.rank} sends clock {step.clock} while this shard is in round {now}; "
        f"a trainer ticks once per round, on every shard"
    )


def lost(step: Step) -> ContributionLostError:
    """Return what a step gets whose rank's pushes before it went with the owner."""
    return ContributionLostError(
        f"what trainer {step.rank} pushed before its tick at clock {step.clock} went "
        f"with the worker that had it; push all of it again"
    )


def lacks(step: Step, now: int) -> ContributionLostError:
    """Return what a step gets whose rank's last contribution went with the owner."""
    return ContributionLostError(
        f"what trainer {step.rank} sent of round {now} went with the machine that had it; "
        f"send that round again"
    )


def other_kind(step: Step, kind: str) -> ConsistencyError:
    """Return what a step gets of another kind than its round."""
    sent, others = _WORDS.get(step.kind, step.kind), _WORDS.get(kind, kind)
    return ConsistencyError(
        f"trainer {step.rank} sends {sent} at clock {step.clock}, where others have sent "
        f"{others}: a round has one kind, nothing of it was applied; have all trainers "
        f"call the same verb between two ticks"
    )


def finished(step: Step) -> str:
    """Return what a step of a finished rank is told."""
    return (
        f"rank {step.rank} has finished and is no longer waited for; its push at clock "
        f"{step.clock} was refused"
    )
