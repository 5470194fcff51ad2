"""When a step's wait is over, and what it may read then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.consistency import ASP, BSP, SSP, Policy, may_pull
from daskps.errors import ClockError
from daskps.shards.memory.format import (
    CLOCK,
    LIVE,
    POLICY,
    ROUNDS,
    RUN,
    STALENESS,
    Record,
)
from daskps.shards.steps import BARRIER, NO_WAIT, READ, Ready, Ticket

if TYPE_CHECKING:
    from daskps.shards.memory.segment import Segment

#: Codes of the policies in a record; 0 is no run at all.
CODES = {"bsp": 1, "ssp": 2, "asp": 3}


def policy_of(record: Record) -> Policy:
    """Return the policy of the run in progress, ASP where there is none."""
    code = int(record.fixed[POLICY])
    if code == CODES["bsp"]:
        return BSP()
    return SSP(int(record.fixed[STALENESS])) if code == CODES["ssp"] else ASP()


def outcome(segment: Segment, ticket: Ticket) -> Ready | Exception | None:
    """Return how a ticket ends whose arrays, if any, were accepted; None to wait.

    What it says depends on the flip word alone: a ticket that waits at one flip need
    not be asked about again before the next.
    """
    step, record = ticket.step, segment.current
    if step.wait == NO_WAIT:
        return Ready(segment.flip, ticket.version, ticket.duplicate)
    if not step.run or step.rank < 0:
        if step.wait == READ and record.version < step.at_least:
            return None
        return Ready(segment.flip, record.version, ticket.duplicate)
    return _of_trainer(segment, ticket)


def _of_trainer(segment: Segment, ticket: Ticket) -> Ready | Exception | None:
    step, record = ticket.step, segment.current
    clock = step.clock + step.tick
    policy = policy_of(record)
    in_rounds, rounds = isinstance(policy, BSP), int(record.fixed[ROUNDS])
    live = record.live[:, CLOCK]
    slowest = int(live.min()) if len(live) else clock
    if step.wait == BARRIER:
        met = (rounds if in_rounds else slowest) >= clock
    else:
        met = may_pull(policy, clock, slowest, rounds)
    if not met:
        return None
    if in_rounds and step.wait == READ and record.ranks[step.rank, LIVE]:
        return _exact(segment, ticket, clock)
    lag = 0 if in_rounds else max(0, clock - slowest)
    return Ready(segment.flip, record.version, ticket.duplicate, lag)


def _exact(segment: Segment, ticket: Ticket, clock: int) -> Ready | Exception:
    """Serve exactly the round of `clock`: the last one or the one before it.

    Under BSP every publication but the first is one round, so the buffer that is not
    in force holds the round before: a trainer that starts again needs it.
    """
    flip = flip_of_round(segment, ticket.step.run, clock)
    if flip is not None:
        version = segment.record(flip).version
        return Ready(flip, version, ticket.duplicate, exact=True)
    return gone(segment, clock)


def gone(segment: Segment, clock: int) -> ClockError:
    """Return the error of a read of a round that is not there any more."""
    return ClockError(
        f"round {clock} is gone from this shard, which is at round "
        f"{int(segment.current.fixed[ROUNDS])} and keeps one before it"
    )


def flip_of_round(segment: Segment, run: int, rounds: int) -> int | None:
    """Return the flip that holds a run after so many rounds, if one still does."""
    flips = [segment.flip]
    if segment.writing == segment.flip:
        flips.append(segment.flip - 1)
    for flip in flips:
        fixed = segment.record(flip).fixed
        if fixed[RUN] == run and fixed[ROUNDS] == rounds:
            return flip
    return None
