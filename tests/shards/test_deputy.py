"""A second state machine over the same memory, as another process has one."""

from __future__ import annotations

import numpy as np
import pytest

from daskps.consistency import ASP, BSP, SSP
from daskps.shards import cut_requests, producers
from daskps.shards.cuts.cut import Order
from daskps.shards.deputy import CLOSED, NotHereError, set_gate
from daskps.shards.memory.format import GENERATION, MAX_PRODUCERS
from daskps.shards.memory.segment import Segment
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, GRADIENT, NO_WAIT, READ, Item, Ready, Step, Ticket
from tests.invariants import validate
from tests.shards.making import LAYOUT, RULED, A, Momentum, done, held

RULES = dict.fromkeys(RULED, Momentum())
SLOTS = dict.fromkeys(RULED, (0.0,))


def pair() -> tuple[Shard, Shard]:
    segment = Segment(LAYOUT, 0, SLOTS)
    segment.words[GENERATION] = 1
    same = Segment(LAYOUT, 0, SLOTS, segment.buffer)
    return Shard(segment, RULES), Shard.as_deputy(same, RULES)


def push(sequence: int, value: float = 1.0, **more) -> Step:
    items = (Item(A, 0, np.full(5, float(value))),)
    return Step(GRADIENT, items, producer=1, sequence=sequence, **more)


def submit(shard: Shard, step: Step) -> Ticket:
    ticket = Ticket(step)
    shard.submit([ticket])
    return ticket


def test_pushes_of_both_are_one_sequence_of_updates():
    owner, deputy = pair()
    alone, _ = pair()
    for number in range(6):
        shard = (owner, deputy)[number % 2]
        assert submit(shard, push(number, number)).version == number + 1
        submit(alone, push(number, number))
    for flip in (5, 6):
        np.testing.assert_array_equal(
            held(owner.segment, flip)[A], held(alone.segment, flip)[A]
        )
    assert deputy.segment.current.version == 6
    validate(owner)
    validate(deputy)


def test_push_to_one_is_a_repeat_to_the_other():
    owner, deputy = pair()
    submit(owner, push(0))
    again = submit(deputy, push(0))
    assert again.duplicate
    assert isinstance(again.outcome, Ready)
    assert owner.segment.current.version == 1


def test_read_parked_at_one_ends_with_a_push_to_the_other():
    owner, deputy = pair()
    waiting = submit(deputy, Step(wait=READ, at_least=1))
    assert waiting.outcome is None
    before = deputy.parked.is_stale
    submit(owner, push(0))
    assert (before, deputy.parked.is_stale) == (False, True)
    assert deputy.submit([]) == [waiting]
    assert done(waiting).version == 1


def test_ssp_pull_at_the_deputy_waits_for_a_tick_at_the_owner():
    owner, deputy = pair()
    owner.begin_run(7, SSP(0), 2)
    assert submit(deputy, Step(run=7, rank=0, tick=True)).outcome is not None
    waiting = submit(deputy, Step(run=7, rank=0, clock=1, wait=READ))
    assert waiting.outcome is None
    submit(owner, Step(run=7, rank=1, tick=True))
    assert deputy.submit([]) == [waiting]


def test_cut_lets_deputies_read_and_hands_their_pushes_back():
    owner, deputy = pair()
    submit(owner, push(0))
    cut_requests.begin_cut(owner, "cut", 0)
    assert isinstance(submit(deputy, push(1)).outcome, NotHereError)
    assert isinstance(submit(deputy, Step(wait=READ)).outcome, Ready)
    cut_requests.follow_order(owner, "cut", Order(), Ticket(Step()))
    cut_requests.end_cut(owner, "cut")
    assert submit(deputy, push(1)).version == 2


def test_fence_hands_deputies_steps_back_until_the_next_run():
    owner, deputy = pair()
    owner.begin_run(7, ASP(), 1)
    owner.hold_run(7)
    tick = Step(run=7, rank=0, tick=True)
    assert isinstance(submit(deputy, tick).outcome, NotHereError)
    owner.end_run(7, "test")
    owner.begin_run(8, ASP(), 1)
    assert isinstance(submit(deputy, tick._replace(run=8)).outcome, Ready)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(Step(run=9, rank=0, wait=READ), id="run that is over"),
        pytest.param(Step(wait=READ, generation=2), id="other generation"),
        pytest.param(push(0, touched=((0, 1),)), id="not meant for all shards"),
    ],
)
def test_what_the_owner_answers_for_is_handed_back_unchanged(step):
    owner, deputy = pair()
    before = owner.segment.buffer.copy()
    assert isinstance(submit(deputy, step).outcome, NotHereError)
    np.testing.assert_array_equal(owner.segment.buffer, before)


def test_shard_that_has_another_owner_by_now_is_left_to_that():
    """Who shared the memory with the former one does not know what it has noted."""
    owner, deputy = pair()
    owner.segment.words[GENERATION] += 1
    assert isinstance(submit(deputy, push(0)).outcome, NotHereError)
    assert owner.segment.current.version == 0


def test_wrong_push_is_refused_here_too():
    owner, deputy = pair()
    step = Step(ADD, (Item(A, 3, np.ones(5)),), producer=1, sequence=0)
    ours, theirs = submit(deputy, step).outcome, submit(owner, step).outcome
    assert type(ours) is type(theirs)
    assert str(ours) == str(theirs)


def test_waiting_read_ends_when_the_run_does():
    owner, deputy = pair()
    owner.begin_run(7, BSP(), 2)
    waiting = submit(deputy, Step(run=7, rank=0, clock=1, wait=READ))
    owner.end_run(7, "test")
    assert deputy.submit([]) == [waiting]
    assert isinstance(waiting.outcome, NotHereError)


def test_closed_gate_ends_every_wait_and_stays_closed():
    owner, deputy = pair()
    waiting = submit(deputy, Step(wait=READ, at_least=1))
    set_gate(owner.segment, CLOSED)
    owner.set_gate()
    assert deputy.parked.is_stale
    assert deputy.submit([]) == [waiting]
    assert isinstance(waiting.outcome, NotHereError)
    assert isinstance(submit(deputy, Step(wait=NO_WAIT)).outcome, NotHereError)


def test_push_that_finds_no_room_is_for_the_owner_who_asks_the_directory():
    owner, deputy = pair()
    for producer in range(MAX_PRODUCERS):
        submit(owner, Step(ADD, producer=10 + producer, sequence=0))
    assert isinstance(submit(deputy, push(0)).outcome, NotHereError)
    producers.close_producers(owner.segment, [10])
    assert submit(deputy, push(0)).version == owner.segment.current.version
