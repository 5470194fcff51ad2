"""Races in the rounds of a BSP run, and of trainers that start again."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from daskps.consistency import BSP, SSP
from daskps.errors import (
    ClockError,
    ConsistencyError,
    ContributionLostError,
    PushRejectedError,
    RunCancelledError,
)
from daskps.shards import producers
from daskps.shards.cuts.cut import Cut
from daskps.shards.run_record import first_of
from daskps.shards.steps import (
    ADD,
    BARRIER,
    GRADIENT,
    MODEL,
    READ,
    Item,
    Step,
    Ticket,
)
from tests.invariants import validate
from tests.shards.making import (
    RUN,
    A,
    B,
    bsp,
    contents,
    done,
    failed,
    hot,
    items,
    make,
    read,
    seen,
    send,
    slots_of,
    step,
    weights,
)

# -- rounds --------------------------------------------------------------------


def test_a_round_that_completes_wakes_the_pulls_parked_for_it():
    shard = bsp(2)
    first, pull = send(shard, step(0, 0), read(0, 1))
    assert done(first).version == 0
    assert pull.outcome is None
    assert shard.parked.tickets == [pull]
    last = Ticket(step(1, 0, wait=READ))
    assert set(map(id, shard.submit([last]))) == {id(last), id(pull)}
    assert seen(shard, pull) == seen(shard, last) == [1, 1, 0, 0, 0]
    assert shard.parked.tickets == []
    validate(shard)


def test_a_pull_reads_the_round_of_its_clock_while_others_push_the_next():
    shard = bsp(2)
    send(shard, step(0, 0), step(1, 0), step(0, 1))
    (pull,) = send(shard, read(1, 1))
    assert seen(shard, pull) == [1, 1, 0, 0, 0]


def test_an_early_push_parks_until_its_round_opens():
    shard = bsp(2)
    send(shard, step(0, 0))
    (early,) = send(shard, step(0, 1))
    assert (early.outcome, early.applied) == (None, False)
    assert weights(shard)[A] == [0] * 5
    (_last,) = send(shard, step(1, 0))
    assert weights(shard)[A] == [1, 1, 0, 0, 0]
    assert early.applied
    assert not done(early).duplicate
    send(shard, step(1, 1))
    assert weights(shard)[A] == [2, 2, 0, 0, 0]


@pytest.mark.parametrize("by_cut", [False, True])
def test_a_step_alone_in_its_round_goes_on_where_that_may_be_applied(by_cut):
    """The gate stays as it is: the next round is held back, for a second copy."""
    shard = bsp(1)
    shard.hold_updates(shard.segment.flip + by_cut)
    if by_cut:
        shard.cut = Cut(("cut", 1))
    (early,) = send(shard, step(0, 0))
    assert (early.outcome, early.applied) == (None, False)
    if by_cut:
        shard.release_cut("it is over")
    else:
        shard.hold_updates(shard.segment.flip + 1)
    assert early.applied
    assert weights(shard)[A] == [1, 0, 0, 0, 0]


def test_two_rounds_complete_in_one_call():
    """A finished rank lets the parked push of the next round complete it, too."""
    shard = bsp(2)
    pulls = send(shard, read(0, 2), step(0, 0), step(0, 1), read(0, 1))
    shard.finish_rank(RUN, 1)
    validate(shard)
    assert shard.rounds_of(RUN) == 2
    assert seen(shard, pulls[0]) == [2, 0, 0, 0, 0]


def test_an_early_push_comes_before_a_later_one_of_its_rank():
    """Else its repeat-proof sequence number would make it a repeat: lost."""
    shard = bsp(2)
    send(shard, step(0, 0))
    (early,) = send(shard, step(0, 1, tick=False, sequence=1))
    found = send(shard, step(1, 0), step(0, 1, tick=True, sequence=2))
    assert not any(done(t).duplicate for t in (early, *found))
    send(shard, step(1, 1))
    assert weights(shard)[A] == [3, 2, 0, 0, 0]


def test_a_rank_counts_once_in_a_round_whatever_it_sends():
    """It gave up waiting for an answer and sends the same clock as another push."""
    shard = bsp(2)
    send(shard, step(0, 0, tick=False, sequence=0))
    (again,) = send(shard, step(0, 0, tick=False, sequence=0))
    assert done(again).duplicate
    _, again = send(shard, step(0, 0, sequence=1), step(0, 0, sequence=2))
    assert done(again).duplicate
    send(shard, step(1, 0))
    assert weights(shard)[A] == [2, 1, 0, 0, 0]


def test_a_step_of_a_round_that_is_complete_is_a_repeat_under_any_number():
    """Its rank gave up waiting, and the round ended meanwhile."""
    shard = bsp(2)
    send(shard, step(0, 0), step(1, 0))
    (again,) = send(shard, step(0, 0, sequence=5))
    assert done(again).duplicate
    assert weights(shard)[A] == [1, 1, 0, 0, 0]


def test_a_clock_that_skips_a_round_is_refused():
    shard = bsp(2)
    assert failed(send(shard, step(0, 2)), ClockError)
    # The one before may be what its owner took along.
    assert failed(send(shard, step(0, 1)), ContributionLostError)
    send(shard, step(0, 0))
    assert failed(send(shard, step(0, 2, sequence=1)), ClockError)
    send(shard, step(1, 0))
    assert weights(shard)[A] == [1, 1, 0, 0, 0]


def test_a_rank_that_finishes_is_not_waited_for():
    shard = bsp(3)
    send(shard, step(0, 0), step(1, 0))
    pulls = send(shard, read(0, 1), read(1, 1, BARRIER))
    woken = shard.finish_rank(RUN, 2)
    assert set(map(id, woken)) == set(map(id, pulls))
    assert seen(shard, pulls[0]) == [1, 1, 0, 0, 0]
    assert shard.finish_rank(RUN, 2) == []
    assert failed(send(shard, step(2, 1)), ClockError)


def test_a_rank_that_finishes_after_its_tick_still_counts():
    shard = bsp(2)
    send(shard, step(0, 0))
    shard.finish_rank(RUN, 0)
    send(shard, step(1, 0))
    send(shard, step(1, 1))
    assert weights(shard)[A] == [1, 2, 0, 0, 0]


def test_all_ranks_finish():
    shard = bsp(2)
    send(shard, step(0, 0))
    assert shard.finish_rank(RUN, 0) == []
    shard.finish_rank(RUN, 1)
    assert shard.rounds_of(RUN) == 1
    validate(shard)


def test_ranks_that_finish_without_a_tick_make_no_round():
    shard = bsp(2)
    for rank in (0, 1):
        assert shard.finish_rank(RUN, rank) == []
    assert shard.rounds_of(RUN) == 0
    validate(shard)


def test_pushes_without_a_tick_join_and_the_last_ones_weight_counts():
    shard = bsp(2, "mean")
    send(shard, step(0, 0, tick=False, sequence=0, weight=100.0))
    send(shard, step(0, 0, 2.0, tick=True, sequence=1, weight=3.0), step(1, 0, 4.0))
    assert weights(shard)[A] == [3 * 3 / 4, 4 / 4, 0, 0, 0]
    assert shard.segment.current.steps.tolist()[A] == 1


def test_a_round_without_weight_raises_no_version():
    shard = bsp(2)
    found = send(shard, step(0, 0, weight=0.0), step(1, 0, weight=0.0, wait=READ))
    assert seen(shard, found[1]) == [0] * 5
    assert shard.segment.current.version == 0
    send(shard, Step(run=RUN, rank=0, clock=1, tick=True, sequence=1))
    send(shard, Step(run=RUN, rank=1, clock=1, tick=True, sequence=1))
    assert shard.rounds_of(RUN) == 2
    assert shard.segment.current.version == 1  # a weight of 1, and no arrays


def test_a_rank_that_sits_out_is_not_in_the_mean():
    shard = bsp(2, "mean")
    send(shard, step(0, 0, 4.0), step(1, 0, 8.0, weight=0.0))
    assert weights(shard)[A] == [4, 0, 0, 0, 0]


def test_a_key_that_nobody_delivers_takes_no_step():
    shard = bsp(1)
    send(shard, step(0, 0))
    assert shard.segment.current.steps.tolist() == [1, 0, 0]
    assert slots_of(shard.segment)[B][0].tolist() == [0]


def test_models_are_averaged_and_slots_left_alone():
    shard = bsp(2, "mean")
    models = [step(r, 0, 4.0)._replace(kind=MODEL, weight=1.0 + 2 * r) for r in (0, 1)]
    send(shard, *models)
    assert weights(shard)[A] == [1, 3, 0, 0, 0]
    assert shard.segment.current.steps.tolist() == [0, 0, 0]
    assert shard.segment.current.version == 1


def test_what_was_sent_may_be_changed_and_is_not_changed():
    """Arrays of this process stay the caller's; those from the wire may be read-only."""
    shard = bsp(2, "mean")
    mine = hot(0)
    one = Step(GRADIENT, mine, run=RUN, rank=0, tick=True, weight=2.0)
    data = np.frombuffer(hot(1)[0].data.tobytes())
    other = Step(
        GRADIENT,
        (Item(A, 0, data),),
        run=RUN,
        rank=1,
        tick=True,
        owned=True,
        weight=2.0,
    )
    send(shard, one)
    assert mine[0].data.tolist() == [1, 0, 0, 0, 0]
    mine[0].data[:] = 99
    send(shard, other)
    assert weights(shard)[A] == [0.5, 0.5, 0, 0, 0]


def test_what_was_sent_before_the_tick_stays_the_callers():
    """Each is added to the one before, which is kept."""
    shard = bsp(2)
    first = step(0, 0, tick=False, sequence=0)
    send(shard, first, step(0, 0, tick=False, sequence=1))
    assert first.items[0].data.tolist() == [1, 0, 0, 0, 0]
    first.items[0].data[:] = 99
    send(shard, step(0, 0, sequence=2), step(1, 0))
    assert weights(shard)[A] == [3, 1, 0, 0, 0]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_order_in_which_ranks_come_leaves_no_bit_behind(order):
    shard = bsp(3, "mean")
    values = np.array([[1e16, 1.0, 0.1, 1e-9, 3.0], [1.0] * 5, [-1e16, 0.3, 7, 7, 7]])
    for rank in order:
        gradient = items({A: values[rank]})
        send(shard, Step(GRADIENT, gradient, run=RUN, rank=rank, tick=True, weight=0.3))
    tree = ((values[0] * 0.3 + values[1] * 0.3) + values[2] * 0.3) / (0.3 + 0.3 + 0.3)
    assert weights(shard)[A] == tree.tolist()


# -- trainers that start again ---------------------------------------------------


def test_a_restarted_rank_repeats_its_push_and_reads_the_round_before():
    shard = bsp(2)
    send(shard, step(0, 0), step(1, 0), step(0, 1), step(1, 1))
    # Another shard has not heard of clock 1: the trainer begins there again.
    (pull,) = send(shard, read(0, 1))
    assert seen(shard, pull) == [1, 1, 0, 0, 0]
    (again,) = send(shard, step(0, 1, wait=READ))
    assert done(again).duplicate
    assert seen(shard, again) == [2, 2, 0, 0, 0]
    assert failed(send(shard, read(0, 0)), ClockError)


def test_the_round_before_survives_what_producers_do():
    shard = make()
    send(shard, Step(ADD, hot(4, 0.0), producer=1, sequence=0))
    shard.begin_run(RUN, BSP(), 1)
    send(shard, step(0, 0))
    assert failed(send(shard, Step(ADD, hot(0), producer=2)), ConsistencyError)
    producers.close_producers(shard.segment, [1])
    (pull,) = send(shard, read(0, 0))
    assert seen(shard, pull) == [0] * 5


def test_a_restarted_rank_drops_what_it_had_not_ticked():
    shard = bsp(2)
    send(shard, step(0, 0, 50.0, tick=False, sequence=0))
    at = first_of(2)
    assert shard.run_state.resume_rank(RUN, 0, 2) == (0, at)
    send(shard, step(0, 0, 2.0, tick=False, sequence=at), step(0, 0, sequence=at + 1))
    send(shard, step(1, 0))
    assert weights(shard)[A] == [3, 1, 0, 0, 0]


def test_a_restarted_rank_that_had_ticked_goes_on_after_it():
    shard = bsp(2)
    send(shard, step(0, 0, tick=False, sequence=0), step(0, 0, tick=True, sequence=1))
    assert shard.run_state.resume_rank(RUN, 0, 2) == (1, first_of(2))
    send(shard, step(1, 0))
    assert shard.run_state.resume_rank(RUN, 0, 3) == (1, first_of(3))
    assert weights(shard)[A] == [2, 1, 0, 0, 0]


def test_who_asks_where_a_rank_stands_changes_nothing():
    shard = bsp(2)
    send(shard, step(0, 0, 50.0, tick=False, sequence=0))
    assert shard.run_state.resume_rank(RUN, 0) == (0, 0)
    send(shard, step(0, 0, sequence=1), step(1, 0))
    assert weights(shard)[A] == [51, 1, 0, 0, 0]


def test_what_a_trainer_sends_whose_place_was_taken_counts_for_nothing():
    """Its worker was taken for lost: it goes on, or its message was late."""
    shard = bsp(2)
    send(shard, step(0, 0, 50.0, tick=False, sequence=0))
    shard.run_state.resume_rank(RUN, 0, 2)
    # The rest of a step whose beginning was dropped, all of it, and the next one.
    late = send(
        shard,
        step(0, 0, 50.0, sequence=1),
        step(0, 0, 100.0, sequence=2, whole=True),
        step(0, 0, 50.0, tick=False, sequence=3),
        step(0, 1, 50.0, sequence=4),
    )
    assert failed(late, RunCancelledError)
    assert "another one goes on" in str(late[0].outcome)
    send(shard, step(0, 0, sequence=first_of(2)), step(1, 0))
    assert weights(shard)[A] == [1, 1, 0, 0, 0]
    # The record says so too: the next round's table is made of it.
    assert failed(send(shard, step(0, 1, sequence=5)), RunCancelledError)
    validate(shard)


def test_step_that_waits_for_its_round_is_refused_when_its_place_was_taken():
    shard = bsp(2)
    _, early = send(shard, step(0, 0), step(0, 1, 50.0))
    assert early.outcome is None
    shard.run_state.resume_rank(RUN, 0, 2)
    send(shard, step(1, 0))
    assert failed([early], RunCancelledError)
    send(shard, step(0, 1, sequence=first_of(2)), step(1, 1))
    assert weights(shard)[A] == [2, 2, 0, 0, 0]


def test_place_is_taken_once():
    """The message that takes it may come again, when its trainer has begun."""
    shard, at = bsp(2), first_of(2)
    assert shard.run_state.resume_rank(RUN, 0, 2) == (0, at)
    send(shard, step(0, 0, tick=False, sequence=at))
    shard.run_state.resume_rank(RUN, 0, 2)
    send(shard, step(0, 0, sequence=at + 1), step(1, 0))
    assert weights(shard)[A] == [2, 1, 0, 0, 0]


def test_under_ssp_a_restarted_rank_repeats_the_pushes_of_its_open_clock():
    shard = make()
    shard.begin_run(RUN, SSP(1), 2)
    send(shard, step(0, 0, sequence=0))
    send(shard, step(0, 1, tick=False, sequence=1), step(0, 1, tick=False, sequence=2))
    assert shard.run_state.resume_rank(RUN, 0) == (1, 1)
    found = send(
        shard,
        step(0, 1, tick=False, sequence=1),
        step(0, 1, tick=False, sequence=2),
        step(0, 1, tick=True, sequence=3),
    )
    assert [done(t).duplicate for t in found] == [True, True, False]
    assert weights(shard)[A] == [4, 0, 0, 0, 0]


def test_a_piece_twice_in_a_step_is_summed():
    shard = bsp(1)
    send(shard, step(0, 0)._replace(items=(*hot(0), *hot(1, 2.0))))
    assert weights(shard)[A] == [1, 2, 0, 0, 0]


@pytest.mark.parametrize(("position", "start"), [(-1, 0), (4, 0), (99, 0), (A, 1)])
def test_an_array_that_is_not_of_the_shard_is_refused(position, start):
    shard = bsp(1)
    before = contents(shard)
    bad = Item(position, start, np.ones(5))
    assert failed(send(shard, step(0, 0)._replace(items=(bad,))), PushRejectedError)
    assert contents(shard) == before
    send(shard, step(0, 0))
    assert weights(shard)[A] == [1, 0, 0, 0, 0]


def test_a_rank_that_finishes_ends_the_round_that_the_others_wait_in():
    """Between two steps that join, one behind and one before the node it leaves."""
    for others in ((0, 1, 3), (3, 0, 1), (1, 3, 0)):
        shard = bsp(4)
        for rank in others:
            send(shard, step(rank, 0))
        assert shard.rounds_of(RUN) == 0
        shard.finish_rank(RUN, 2)
        validate(shard)
        assert shard.rounds_of(RUN) == 1
        assert weights(shard)[A] == [1, 1, 0, 1, 0]
