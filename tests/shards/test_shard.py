"""Races of producers, readers and trainers without rounds, fences, errors."""

from __future__ import annotations

import numpy as np
import pytest

from daskps.consistency import ASP, BSP, SSP
from daskps.errors import (
    ClockError,
    ConsistencyError,
    IllegalStateError,
    NoOptimizerError,
    PushRejectedError,
    RunCancelledError,
    StaleGenerationError,
)
from daskps.shards.cuts.cut import Cut
from daskps.shards.steps import (
    ADD,
    ASK,
    ASSIGN,
    BARRIER,
    GRADIENT,
    READ,
    Item,
    RunPosition,
    Step,
    Ticket,
)
from tests.invariants import validate
from tests.shards.making import (
    RUN,
    A,
    B,
    C,
    Loops,
    bsp,
    contents,
    copy_parts,
    counts,
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

# -- pushes ----------------------------------------------------------------------


def test_pushes_that_are_held_are_one_publication_then():
    """A second copy has to get first what they would write over; reads go on."""
    shard = make()
    flip = shard.segment.flip
    shard.hold_updates(flip, pushes=True)
    one, two, pull = send(shard, added(1), added(2), Step(wait=READ))
    assert (one.outcome, two.outcome, shard.segment.flip) == (None, None, flip)
    assert weights(shard)[A] == [0] * 5
    assert seen(shard, pull) == [0] * 5
    assert shard.step(added(3)) == ASK
    shard.hold_updates(flip, pushes=True)
    assert one.outcome is None
    shard.hold_updates(flip + 1, pushes=True)
    assert [done(one).version, done(two).version] == [1, 2]
    assert (shard.segment.flip, weights(shard)[A]) == (flip + 1, [2, 0, 0, 0, 0])
    (three,) = send(shard, added(3))
    assert three.outcome is None
    assert shard.abandon(StaleGenerationError()) == [three]


def test_a_cut_holds_the_pushes_that_were_held_before_it():
    shard = make()
    shard.hold_updates(shard.segment.flip, pushes=True)
    (push,) = send(shard, added(1))
    shard.cut = Cut(("cut", 1))
    shard.hold_updates(None)
    assert push.outcome is None
    assert weights(shard)[A] == [0] * 5
    shard.release_cut("it is over")
    assert done(push).version == 1


def test_pushes_go_on_where_rounds_alone_are_held():
    """Before a copy has asked for the first time, and where it gets a copy of arrays."""
    shard = make()
    shard.hold_updates(shard.segment.flip)
    (push,) = send(shard, added(1))
    assert done(push).version == 1


def added(sequence: int) -> Step:
    return Step(ADD, hot(0), producer=1, sequence=sequence)


# -- SSP and ASP -----------------------------------------------------------------


def test_ssp_waits_for_the_slowest_live_rank_and_no_longer():
    shard = make()
    shard.begin_run(RUN, SSP(1), 3)
    send(shard, step(0, 0), step(1, 0))
    (pull,) = send(shard, read(0, 1))
    assert done(pull).lag == 1
    send(shard, step(0, 1))
    (pull,) = send(shard, read(0, 2))
    assert pull.outcome is None
    send(shard, step(2, 0))
    assert done(pull).lag == 1
    (late,) = send(shard, step(0, 2, wait=READ))
    assert late.outcome is None
    assert late.applied
    assert shard.finish_rank(RUN, 1) == []
    assert shard.finish_rank(RUN, 2) == [late]
    assert seen(shard, late) == [3, 1, 1, 0, 0]


def test_asp_never_waits_and_counts_each_push_as_a_step():
    shard = make()
    shard.begin_run(RUN, ASP(), 2)
    found = send(shard, *(step(0, c, wait=READ) for c in range(9)))
    assert [done(t).lag for t in found] == list(range(1, 10))
    assert [t.version for t in found] == list(range(1, 10))
    assert shard.segment.current.steps.tolist()[A] == 9


@pytest.mark.parametrize("why", ["over", "stopped", "abandoned"])
def test_a_reason_that_many_hear_keeps_nothing_of_them(why):
    """Of each that raises it the frames, with arrays in them, would stay in it."""
    shard, error = make(), RunCancelledError("its client left")
    shard.begin_run(RUN, ASP(), 1)
    if why == "over":
        shard.end_run(RUN, "over", error)
    elif why == "stopped":
        shard.hold_run(RUN, error=error)
    else:
        shard.abandon(error)
    n_frames = []
    for _ in range(3):
        (ticket,) = send(shard, step(0, 0))
        assert ticket.outcome is error
        with pytest.raises(RunCancelledError) as caught:
            raise error
        n_frames.append(len(caught.traceback))
    assert n_frames == n_frames[:1] * 3


def test_pushes_from_outside_are_welcome_under_asp():
    shard = make()
    shard.begin_run(RUN, ASP(), 1)
    send(shard, step(0, 0), Step(ADD, hot(4), producer=1))
    assert weights(shard)[A] == [1, 0, 0, 0, 1]


def test_a_repeat_after_the_end_of_its_rank_is_a_repeat():
    shard = make()
    shard.begin_run(RUN, ASP(), 2)
    send(shard, step(0, 0))
    shard.finish_rank(RUN, 0)
    (again,) = send(shard, step(0, 0))
    assert done(again).duplicate
    assert failed(send(shard, step(0, 1)), ClockError)


# -- fences and errors -------------------------------------------------------------


@pytest.mark.parametrize("policy", [BSP(), SSP(0)])
def test_a_fence_wakes_all_who_wait_and_refuses_the_rest(policy):
    shard = make()
    shard.begin_run(RUN, policy, 2)
    (outside,) = send(shard, Step(wait=READ, at_least=100))
    waiting = send(shard, step(0, 0, wait=READ), read(0, 1), read(0, 1, BARRIER))
    before = weights(shard)
    woken = shard.end_run(RUN, "somebody pressed Ctrl-C")
    validate(shard)
    assert set(map(id, woken)) == set(map(id, waiting))
    assert failed(waiting, RunCancelledError)
    late = send(shard, step(1, 0), read(1, 0))
    assert failed(late, RunCancelledError)
    assert "Ctrl-C" in str(late[0].outcome)
    assert weights(shard) == before
    assert shard.parked.tickets == [outside]
    with pytest.raises(RunCancelledError):
        shard.run_state.resume_rank(RUN, 0)
    assert shard.finish_rank(RUN, 0) == []
    assert shard.end_run(RUN, "again") == []


def test_a_run_that_has_ended_does_not_begin_again():
    shard = bsp(1)
    shard.end_run(RUN, "over")
    with pytest.raises(RunCancelledError):
        shard.begin_run(RUN, BSP(), 1)
    validate(shard)


def test_a_run_whose_end_comes_first_does_not_begin():
    """Its beginning was still on the way."""
    shard = make()
    shard.end_run(RUN, "its client left")
    with pytest.raises(RunCancelledError, match="its client left"):
        shard.begin_run(RUN, BSP(), 1)
    assert shard.rounds_of(RUN) == -1
    shard.begin_run(RUN + 1, BSP(), 1)


def test_a_step_of_the_run_before_is_refused():
    shard = bsp(1)
    shard.end_run(RUN, "over")
    shard.begin_run(RUN + 1, ASP(), 1)
    assert failed(send(shard, step(0, 0)), RunCancelledError)
    assert weights(shard)[A] == [0] * 5


def test_a_run_that_begins_twice_begins_once():
    shard = bsp(2)
    send(shard, step(0, 0))
    assert shard.begin_run(RUN, BSP(), 2, "sum") == []
    send(shard, step(1, 0))
    assert shard.rounds_of(RUN) == 1


def test_a_run_that_was_never_ended_here_makes_way_and_wakes_its_trainers():
    shard = bsp(2)
    (pull,) = send(shard, read(0, 1))
    assert shard.begin_run(RUN + 1, ASP(), 1) == [pull]
    assert failed([pull], RunCancelledError)
    validate(shard)


@pytest.mark.parametrize("n", [0, 1025])
def test_a_run_too_large_for_a_record_is_refused(n):
    with pytest.raises(IllegalStateError, match="ranks reached a shard"):
        make().begin_run(RUN, BSP(), n)


def broken(stacked, weights):
    raise ZeroDivisionError("this reduce function raises")


def test_an_error_in_a_reduce_function_ends_the_run_and_wakes_everybody():
    shard = bsp(3, broken)
    before = weights(shard)
    early = send(shard, step(0, 0), step(0, 1), read(1, 1))[1:]
    shard.submit([Ticket(step(1, 0))])
    woken = shard.submit([Ticket(step(2, 0))])
    validate(shard)
    assert [type(t.outcome) for t in woken] == [ZeroDivisionError] * 3
    assert failed(early, ZeroDivisionError)
    assert weights(shard) == before
    assert shard.parked.tickets == []
    assert shard.segment.current.version == 0
    assert shard.end_run(RUN, "the directory hears of it") == []
    assert failed(send(shard, step(1, 1)), ZeroDivisionError)
    send(shard, Step(ADD, hot(0), producer=1))
    assert weights(shard)[A] == [1, 0, 0, 0, 0]


def test_an_error_that_a_finishing_rank_sets_off_wakes_everybody():
    shard = bsp(2, broken)
    found = send(shard, step(0, 0, wait=READ), read(0, 1))
    assert shard.finish_rank(RUN, 1) == found
    assert failed(found, ZeroDivisionError)
    validate(shard)


def test_an_error_in_prepare_changes_nothing_but_its_own_push():
    shard = make()
    steps = [Step(GRADIENT, hot(i), producer=1, sequence=i) for i in range(3)]
    steps[1] = steps[1]._replace(lr=0.25)
    first, bad, last = send(shard, *steps)
    assert isinstance(bad.outcome, ArithmeticError)
    assert not bad.applied
    assert (first.version, last.version) == (1, 2)
    assert weights(shard)[A] == [1, 0, 1, 0, 0]
    assert shard.segment.current.steps.tolist()[A] == 2
    # It was not applied, so the same number may come again.
    (again,) = send(shard, steps[1]._replace(lr=None))
    assert not done(again).duplicate
    assert weights(shard)[A] == [1, 1, 1, 0, 0]


def test_a_repeat_is_a_repeat_even_where_prepare_raises_by_now():
    shard = make()
    one = Step(GRADIENT, hot(0), producer=1)
    send(shard, one)
    (again,) = send(shard, one._replace(lr=0.25))
    assert done(again).duplicate


@pytest.mark.parametrize(
    "item",
    [
        Item(A, 0, np.ones(6)),
        Item(A, 1, np.ones(5)),
        Item(A, -1, np.ones(2)),
        Item(A, 0, np.ones(5, "f4")),
        Item(A, 0, np.ones((1, 5))),
        Item(A, 0, np.ones(10)[::2]),
        Item(3, 0, np.ones(1)),
        Item(-1, 0, np.ones(1)),
        Item(C, 0, np.ones(4)),
        Item(A, 0, np.ones(5), np.arange(1)),
        Item(B, 0, np.ones(1), np.array([0])),
        Item(A, 0, np.ones(5), np.arange(0)),
    ],
)
@pytest.mark.parametrize(("run", "n_before"), [(0, 0), (0, 1), (RUN, 0)])
def test_an_array_that_does_not_fit_is_refused_before_anything_is_written(
    item, run, n_before
):
    shard = bsp(1) if run else make()
    for sequence in range(n_before):  # from then on the plan of such a push is kept
        send(shard, Step(GRADIENT, hot(0), producer=1, sequence=sequence))
    before = contents(shard)
    good = hot(0)
    bad = Step(GRADIENT, (*good, item), run=run, rank=0 if run else -1, tick=bool(run))
    (ticket,) = send(shard, bad)
    assert isinstance(ticket.outcome, PushRejectedError)
    assert contents(shard) == before
    if run:
        send(shard, step(0, 0))
        assert weights(shard)[A] == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("run", [0, RUN])
def test_rows_are_refused_by_the_name_of_what_has_none(run):
    shard = bsp(1) if run else make()
    rows = Item(A, 0, np.ones(5), np.array([7]))
    bad = Step(GRADIENT, (rows,), run=run, rank=0 if run else -1, tick=bool(run))
    (ticket,) = send(shard, bad)
    assert isinstance(ticket.outcome, PushRejectedError)
    assert "rows by their ids" in str(ticket.outcome)
    assert "'a' (float64), which is no table" in str(ticket.outcome)


def test_a_gradient_of_a_part_is_refused_in_a_round():
    shard = bsp(1)
    part = Step(GRADIENT, [Item(A, 1, np.ones(2))], run=RUN, rank=0, tick=True)
    assert failed(send(shard, part), PushRejectedError)


def test_a_gradient_without_a_rule_is_refused():
    shard = make(ruled=[0])
    before = contents(shard)
    step = Step(GRADIENT, items({A: np.ones(5), B: 1.0}), producer=1)
    assert failed(send(shard, step), NoOptimizerError)
    assert contents(shard) == before


class Dying(Loops):
    """A rule that dies in the middle of writing, as it should never do."""

    def scalars(self, step, lr=None, epoch=None, factor=0):
        return (1.0,)

    def write(self, w_in, w_out, g, slots, scalars, slots_out):
        w_out[:] = -1e9
        if g[0] == 13:
            raise MemoryError("in the middle")
        np.add(w_in, g, out=w_out)


def test_an_update_that_dies_half_way_is_never_seen():
    """The buffer it left is worthless in all pieces, whatever comes next touches."""
    shard = make(rule=Dying())
    send(shard, Step(GRADIENT, items({A: np.ones(5), B: 1.0}), producer=1, sequence=0))
    send(shard, Step(GRADIENT, items({B: 1.0}), producer=1, sequence=1))
    before = weights(shard)
    bad = Step(
        GRADIENT, items({A: np.ones(5), B: 13.0}), producer=1, sequence=2, wait=READ
    )
    (ticket,) = send(shard, bad)
    assert isinstance(ticket.outcome, MemoryError)
    assert weights(shard) == before
    assert shard.segment.current.version == 2
    send(shard, Step(ADD, items({C: np.ones(4)}, np.int64), producer=1, sequence=3))
    assert weights(shard)[:2] == before[:2]
    send(shard, Step(GRADIENT, hot(0), producer=1, sequence=4))
    assert weights(shard) == [[2, 1, 1, 1, 1], [2], [1] * 4]


def test_a_round_that_dies_half_way_ends_the_run():
    shard = bsp(1, rule=Dying())
    send(shard, step(0, 0))
    tickets = send(shard, step(0, 1, 13.0, wait=READ), read(0, 2))
    assert isinstance(tickets[0].outcome, MemoryError)
    assert failed(tickets, MemoryError)
    assert weights(shard)[A] == [1, 0, 0, 0, 0]
    # It holds, until all shards end with the same round.
    assert shard.run_state.find_position(RUN) == RunPosition(1, 1, is_stuck=True)
    assert failed(send(shard, step(0, 1)), MemoryError)
    with pytest.raises(MemoryError):
        shard.finish_rank(RUN, 0)


def test_sums_that_overflow_warn_nobody():
    shard = bsp(2)
    send(shard, step(0, 0, 1.7e308), step(1, 0, 1.7e308, weight=1e300))
    send(shard, step(0, 1, 1.7e308), step(1, 1, -1.7e308))
    shard = make()
    huge = Step(GRADIENT, hot(0, 1e308), weight=1e308, producer=1)
    send(shard, huge, Step(ADD, hot(0, 1e308), producer=1, sequence=1))


# -- outside a run -----------------------------------------------------------------


@pytest.mark.parametrize("kind", [GRADIENT, ADD, ASSIGN])
def test_a_run_in_rounds_has_the_store_to_itself(kind):
    shard = bsp(2)
    before = contents(shard)
    (ticket,) = send(shard, Step(kind, hot(0), producer=1))
    assert isinstance(ticket.outcome, ConsistencyError)
    assert "sync='bsp'" in str(ticket.outcome)
    assert contents(shard) == before
    (pull,) = send(shard, Step(wait=READ))
    assert seen(shard, pull) == [0] * 5


def test_a_stale_generation_is_refused():
    shard = make()
    before = contents(shard)
    late = Step(ADD, hot(0), producer=1, generation=2)
    assert failed(
        send(shard, late, Step(wait=READ, generation=0)), StaleGenerationError
    )
    assert contents(shard) == before


def test_a_pull_waits_for_the_version_it_asks_for():
    shard = make()
    pulls = send(shard, *(Step(wait=READ, at_least=v) for v in (0, 1, 3)))
    assert [t.outcome is None for t in pulls] == [False, True, True]
    tickets = [Ticket(Step(ADD, hot(0), producer=1, sequence=s)) for s in range(2)]
    assert shard.submit(tickets) == [*tickets, pulls[1]]
    assert done(pulls[1]).version == 2
    shard.cancel([pulls[2]])
    send(shard, *(Step(ADD, hot(0), producer=1, sequence=s) for s in (2, 3)))
    assert pulls[2].outcome is None


def test_a_repeat_changes_nothing_and_costs_no_reader_its_copy():
    shard = make()
    one = Step(ADD, hot(0), producer=1)
    send(shard, one)
    before, flips = contents(shard), (shard.segment.flip, shard.segment.writing)
    again, inside = send(shard, one, one._replace(wait=READ))
    assert done(again).duplicate
    assert done(inside).duplicate
    assert contents(shard) == before
    assert (shard.segment.flip, shard.segment.writing) == flips
    assert counts(shard) == (1, 2)


def test_a_repeat_in_the_same_batch_is_a_repeat():
    shard = make()
    one = Step(ADD, hot(0), producer=1)
    first, again = send(shard, one, one)
    assert (done(first).duplicate, done(again).duplicate) == (False, True)
    assert weights(shard)[A] == [1, 0, 0, 0, 0]


def test_an_empty_push_is_acknowledged_and_is_no_update():
    shard = make()
    (ticket,) = send(shard, Step(GRADIENT, producer=1))
    assert done(ticket).version == 0
    assert done(send(shard, Step(GRADIENT, producer=1))[0]).duplicate


def test_a_weight_scales_a_gradient_outside_a_run():
    shard = make()
    mine = hot(0)
    send(shard, Step(GRADIENT, mine, weight=0.5, producer=1))
    assert weights(shard)[A] == [0.5, 0, 0, 0, 0]
    assert mine[0].data.tolist() == [1, 0, 0, 0, 0]


def test_an_abandoned_shard_ends_those_who_wait_and_those_who_come():
    shard = make()
    (pull,) = send(shard, Step(wait=READ, at_least=1))
    error = ConnectionError("the worker closes")
    assert shard.abandon(error) == [pull]
    assert pull.outcome is error
    assert send(shard, Step(ADD, hot(0), producer=1))[0].outcome is error


# -- reading without the lock ------------------------------------------------------


def test_a_copy_is_good_while_one_publication_is_under_way():
    shard = make()
    out = np.empty(5)
    parts = [("float64", 0, 5, out)]
    ready = done(send(shard, Step(wait=READ))[0])
    send(shard, Step(ADD, hot(0), producer=1, sequence=0))
    assert copy_parts(shard.segment, ready, parts) is ready
    assert out.tolist() == [0] * 5
    shard.segment.writing += 1  # the next one writes its first byte
    assert copy_parts(shard.segment, ready, parts) is None
    shard.segment.writing -= 1
    send(shard, Step(ADD, hot(0), producer=1, sequence=1))
    assert copy_parts(shard.segment, ready, parts) is None
    new = done(send(shard, Step(wait=READ))[0])
    assert copy_parts(shard.segment, new, parts) is new
    assert out.tolist() == [2, 0, 0, 0, 0]


# -- slots -------------------------------------------------------------------------


@pytest.mark.parametrize("durable", [False, True])
def test_a_run_may_begin_with_fresh_slots(durable):
    shard = make(initial=0.5, durable=durable)
    send(shard, Step(GRADIENT, items({A: np.ones(5), B: 1.0}), producer=1))
    assert slots_of(shard.segment)[A][0].tolist() == [1.5] * 5
    before = weights(shard)
    shard.begin_run(RUN, BSP(), 1)
    assert slots_of(shard.segment)[A][0].tolist() == [1.5] * 5
    shard.end_run(RUN, "over")
    shard.begin_run(RUN + 1, BSP(), 1, reset=True)
    assert [s[0].tolist() for s in slots_of(shard.segment)[:2]] == [[0.5] * 5, [0.5]]
    assert shard.segment.current.steps.tolist() == [0, 0, 0]
    assert weights(shard) == before
    validate(shard)
