"""How old gradients are when they arrive, and what becomes of those that are too old."""

from __future__ import annotations

import numpy as np
import pytest

from daskps.consistency import ASP
from daskps.shards.memory.format import GENERATION, N_DROPPED
from daskps.shards.memory.segment import Segment
from daskps.shards.run_record import delays_of
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, GRADIENT, NOTHING, UNREAD, Step, Ticket
from tests.invariants import validate
from tests.shards.making import (
    LAYOUT,
    RULED,
    RUN,
    Adding,
    contents,
    counts,
    done,
    items,
    make,
    send,
    step,
    weights,
)


def begun(policy: ASP, n_ranks: int = 2, shard: Shard | None = None) -> Shard:
    found = shard or make()
    found.begin_run(RUN, policy, n_ranks)
    return found


def of(shard: Shard) -> tuple[int, dict[int, int]]:
    header = shard.segment.header
    return header[N_DROPPED], delays_of(header)


def test_above_the_bound_it_is_counted_and_not_applied() -> None:
    """Delays 0, 1, 2 of a bound of 1: the third changes nothing but the clock."""
    shard = begun(ASP(max_staleness=1))
    send(shard, step(0, 0, at_least=0), step(0, 1, at_least=0))
    before = weights(shard)
    [late] = send(shard, step(1, 0, at_least=0))
    assert done(late).version == 2
    assert weights(shard) == before
    assert before[0] == [2, 0, 0, 0, 0]
    assert of(shard) == (1, {0: 1, 1: 1, 2: 1})
    assert counts(shard) == (2, 0)
    assert shard.run_state.resume_rank(RUN, 1) == (1, 1)  # it has ticked
    send(shard, step(1, 1, at_least=2))
    assert weights(shard)[0] == [2, 1, 0, 0, 0]


def test_sent_again_it_counts_once_whatever_was_applied_meanwhile() -> None:
    """Dropped or applied, with more updates or a later read: what was done stays."""
    shard = begun(ASP(max_staleness=0))
    applied, dropped = step(0, 0, at_least=0), step(1, 0, at_least=0)
    send(shard, applied, dropped)
    before = contents(shard)
    again = send(shard, applied._replace(at_least=1), dropped._replace(at_least=1))
    assert [ticket.duplicate for ticket in again] == [True, True]
    assert contents(shard) == before
    assert of(shard) == (1, {0: 1, 1: 1})
    assert counts(shard) == (1, 2)


@pytest.mark.parametrize("power", [0.5, 1.0, 2])
def test_damping_multiplies_by_the_delay(power: float) -> None:
    """(1 + tau) ** -a, one after the other also where they queue in one batch."""
    shard = begun(ASP(damping=power), n_ranks=3)
    send(shard, *(step(rank, 0, at_least=0) for rank in range(3)))
    wanted = [(1.0 + delay) ** -power for delay in range(3)]
    assert weights(shard)[0] == [*wanted, 0, 0]
    send(shard, step(0, 1, value=2.0, weight=0.5, at_least=1))
    assert weights(shard)[0][0] == 1.0 + 3.0**-power
    assert of(shard) == (0, {0: 1, 1: 1, 2: 2})


def test_who_has_pulled_nothing_has_no_delay() -> None:
    shard = begun(ASP(max_staleness=0, damping=1.0))
    send(shard, *(step(0, clock, at_least=UNREAD) for clock in range(3)))
    assert weights(shard)[0] == [3, 0, 0, 0, 0]
    assert of(shard) == (0, {0: 3})


def test_deltas_and_pushes_from_outside_have_none() -> None:
    shard = begun(ASP(max_staleness=0, damping=1.0))
    send(shard, step(0, 0, at_least=0))
    send(shard, step(1, 0, at_least=0)._replace(kind=ADD))
    send(shard, Step(GRADIENT, items({0: [1.0] * 5}), producer=1))
    assert weights(shard)[0] == [2, 2, 1, 1, 1]
    assert of(shard) == (0, {0: 1})
    send(shard, Step(NOTHING, run=RUN, rank=1, clock=1, sequence=1, tick=True))
    assert of(shard) == (0, {0: 1})


def test_a_new_run_counts_anew_and_a_plain_one_nothing() -> None:
    shard = begun(ASP(max_staleness=0))
    send(shard, step(0, 0, at_least=0), step(1, 0, at_least=0))
    shard.end_run(RUN, "over")
    shard.begin_run(RUN + 1, ASP(), 2)
    send(shard, step(0, 0, at_least=0)._replace(run=RUN + 1))
    assert of(shard) == (1, {0: 1, 1: 1})
    shard.end_run(RUN + 1, "over")
    shard.begin_run(RUN + 2, ASP(damping=1), 2)
    assert of(shard) == (0, {})


def test_who_adopts_it_goes_on_with_bound_and_damping() -> None:
    """They are in the memory, as is what was taken: another process reads them there."""
    bindings = dict.fromkeys(RULED, Adding())
    segment = Segment(LAYOUT, 0, dict.fromkeys(RULED, (0.0,)))
    segment.words[GENERATION] = 1
    shard = begun(ASP(2, 1.0), shard=Shard(segment, bindings))
    send(shard, step(0, 0, at_least=0), step(1, 0, at_least=0))
    same = Segment(LAYOUT, 0, dict.fromkeys(RULED, (0.0,)), segment.buffer)
    next_owner = Shard(same, bindings)
    send(next_owner, step(1, 0, at_least=0), step(0, 1, at_least=0))
    assert weights(next_owner)[0] == [1 + 1 / 3, 1 / 2, 0, 0, 0]
    send(next_owner, step(1, 1, at_least=0))
    assert of(next_owner) == (1, {0: 1, 1: 1, 2: 2})


def test_a_deputy_does_the_same() -> None:
    bindings = dict.fromkeys(RULED, Adding())
    segment = Segment(LAYOUT, 0, dict.fromkeys(RULED, (0.0,)))
    segment.words[GENERATION] = 1
    shard = begun(ASP(max_staleness=0), shard=Shard(segment, bindings))
    same = Segment(LAYOUT, 0, dict.fromkeys(RULED, (0.0,)), segment.buffer)
    deputy = Shard.as_deputy(same, bindings)
    for machine, rank in ((deputy, 0), (deputy, 1)):
        ticket = Ticket(step(rank, 0, at_least=0))
        machine.submit([ticket])
        done(ticket)
    assert of(shard) == (1, {0: 1, 1: 1})
    assert weights(shard)[0] == [1, 0, 0, 0, 0]
    validate(shard)


def test_what_is_wrong_with_it_is_said_however_old_it_is() -> None:
    shard = begun(ASP(max_staleness=0))
    send(shard, step(0, 0, at_least=0))
    nan = step(1, 0, value=np.nan, at_least=0, check=True)
    [ticket] = send(shard, nan._replace(items=nan.items * 2))
    assert isinstance(ticket.outcome, Exception)
    assert of(shard) == (0, {0: 1})


@pytest.mark.parametrize(
    ("delay", "bucket"),
    [(0, 0), (1, 1), (3, 2), (4, 4), (7, 4), (255, 128), (256, 256), (10**6, 256)],
)
def test_buckets(delay: int, bucket: int) -> None:
    shard = begun(ASP(damping=1.0))
    shard.segment.current.plain[0] = delay
    send(shard, step(0, 0, at_least=0))
    assert of(shard) == (0, {bucket: 1})
