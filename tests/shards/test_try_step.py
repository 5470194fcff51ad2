"""Steps that a shard takes without a ticket, and those it leaves as they are."""

from __future__ import annotations

from typing import Any

import dask
import numpy as np
import pytest

from daskps.consistency import ASP, BSP, SSP, Policy
from daskps.shards import cut_requests, producers
from daskps.shards.memory.format import CHANGED_ROW, GENERATION, MAX_PRODUCERS
from daskps.shards.memory.publication import Publication
from daskps.shards.shard import Shard
from daskps.shards.steps import (
    ADD,
    ASK,
    ASSIGN,
    GRADIENT,
    MODEL,
    NOTHING,
    READ,
    Item,
    Ready,
    Step,
    Ticket,
)
from tests.invariants import nodes_of, validate
from tests.seams import judge_all
from tests.shards.making import (
    RUN,
    A,
    B,
    C,
    Momentum,
    bsp,
    contents,
    counts,
    hot,
    items,
    make,
    send,
    step,
    weights,
)


def shard_of(n_ranks: int = 2) -> Shard:
    shard = bsp(n_ranks)
    shard.segment.words[GENERATION] = shard.generation
    return shard


def take(shard: Shard, given: Step) -> int:
    return shard.step(given)


def test_steps_with_and_without_tickets_make_the_same_rounds():
    taken, asked = shard_of(3), shard_of(3)
    judge_all(asked)
    for clock in range(3):
        for rank in (2, 0, 1):
            given = step(rank, clock, 0.1 + rank, weight=1.0 + rank)
            if rank == clock:
                given = given._replace(kind=NOTHING, items=())
            (ticket,) = send(asked, given)
            assert take(taken, given) == ticket.version
            validate(taken)
            assert contents(taken) == contents(asked)
    assert taken.segment.current.version == 3
    assert counts(taken)[0] == counts(asked)[0]


def finished(shard: Shard) -> None:
    shard.finish_rank(RUN, 0)


def cut(shard: Shard) -> None:
    cut_requests.begin_cut(shard, "cut", 0)


def fenced(shard: Shard) -> None:
    shard.hold_run(RUN)


def ended(shard: Shard) -> None:
    shard.end_run(RUN, "test")


def another(shard: Shard) -> None:
    shard.begin_run(RUN + 1, BSP(), 2)


def abandoned(shard: Shard) -> None:
    shard.abandon(RuntimeError("gone"))


def moved(shard: Shard) -> None:
    shard.segment.words[GENERATION] += 1


def failed(shard: Shard) -> None:
    shard.hold_run(RUN, error=RuntimeError("over"))


def parked(shard: Shard) -> None:
    shard.submit([Ticket(Step(run=RUN, rank=1, clock=1, wait=READ))])


def before_its_tick(shard: Shard) -> None:
    shard.submit([Ticket(step(1, 0, tick=False))])


def pushed_to_a_dead_owner(shard: Shard) -> None:
    shard.submit([Ticket(step(0, 0, tick=False))])
    assert shard.round is not None
    shard.round._unticked.clear()


def in_already(shard: Shard) -> None:
    send(shard, step(0, 0))


@pytest.mark.parametrize(
    "event",
    [
        finished,
        cut,
        fenced,
        ended,
        another,
        abandoned,
        moved,
        parked,
        pushed_to_a_dead_owner,
        in_already,
    ],
)
def test_shard_decides_about_a_step_after(event):
    shard = shard_of()
    assert take(shard_of(), step(0, 0)) == 0
    event(shard)
    before = contents(shard)
    assert take(shard, step(0, 0)) == ASK
    assert contents(shard) == before


@pytest.mark.parametrize("event", [cut, fenced])
def test_no_step_completes_a_round_that_is_held(event):
    """The others are in; the shard keeps the last step for later."""
    shard = shard_of()
    send(shard, step(1, 0))
    event(shard)
    assert take(shard, step(0, 0)) == ASK
    assert shard.rounds_of(RUN) == 0


@pytest.mark.parametrize(
    "more",
    [
        {"clock": 1},
        {"rank": 1, "clock": 1},
        {"rank": 1, "sequence": -1},
        {"rank": 1, "kind": MODEL},
        {"rank": 1, "kind": ADD},
        {"rank": 1, "run": RUN + 1},
    ],
)
def test_shard_decides_about_a_step_with(more: dict[str, Any]):
    shard = shard_of()
    send(shard, step(0, 0))
    before = contents(shard)
    assert take(shard, step(0, 0)._replace(**more)) == ASK
    assert contents(shard) == before


@pytest.mark.parametrize("rank", [-1, 2, 1000])
def test_rank_that_is_none_joins_no_round(rank):
    shard = bsp(2, lambda stacked, weights: stacked.sum(0))
    before = contents(shard)
    assert take(shard, step(0, 0)._replace(rank=rank)) == ASK
    assert contents(shard) == before
    assert shard.round is not None
    assert nodes_of(shard.round) == []


@pytest.mark.parametrize(
    "data", [np.zeros(4), np.zeros(5, "f4"), np.zeros(10)[::2], np.zeros((5, 1))]
)
def test_shard_decides_about_arrays_that_do_not_fit(data):
    shard = shard_of()
    assert take(shard, step(0, 0)._replace(items=[Item(A, 0, data)])) == ASK


def test_round_that_fails_is_left_to_the_shard():
    shard = bsp(1, reduce=lambda stacked, weights: stacked[0] * np.nan)
    shard.segment.words[GENERATION] = shard.generation
    before = weights(shard)
    assert take(shard, step(0, 0)) == ASK
    assert weights(shard) == before
    ticket = Ticket(step(0, 0))
    shard.submit([ticket])
    assert "NaN" in str(ticket.outcome)


def test_overflow_of_a_sum_warns_of_nothing_where_it_is_allowed():
    with dask.config.set({"daskps.finite": "allow"}):
        shard = shard_of()
    huge = items({A: np.full(5, 1e308)})
    for rank in (0, 1):
        assert take(shard, step(rank, 0)._replace(items=huge)) >= 0
    assert np.isinf(weights(shard)[A]).all()
    (again,) = send(shard, step(0, 0)._replace(items=hot(0)))
    assert isinstance(again.outcome, Ready)
    assert again.duplicate


# -- pushes that are updates of their own ------------------------------------------


def open_shard(policy: Policy | None = None) -> Shard:
    """A shard with two rules whose producer 1 has pushed before."""
    shard = make(rule=Momentum())
    if policy is not None:
        shard.begin_run(RUN, policy, 2)
    send(shard, push(0))
    return shard


def push(sequence: int, value: float = 0.5, **more: Any) -> Step:
    """A gradient for "a" and "b" from outside of runs."""
    arrays = items({A: np.full(5, value), B: value})
    options: dict[str, Any] = {
        "items": arrays,
        "producer": 1,
        "sequence": sequence,
        "floor": sequence,
    }
    return Step(GRADIENT, **(options | more))


@pytest.mark.parametrize("policy", [None, ASP(), SSP(2)])
def test_pushes_with_and_without_tickets_have_the_same_bits(policy):
    taken, asked = open_shard(policy), open_shard(policy)
    judge_all(asked)
    steps = [
        push(1),
        push(9, weight=3.0),
        push(10, lr=0.1, touched=((0, 1), (70, 90))),
        push(80, items=items({B: 0.25})),
        push(81, floor=7),
    ]
    if policy is not None:
        steps += [
            step(0, 0),
            step(1, 0, weight=0.1),
            step(0, 1)._replace(kind=NOTHING, items=()),
            step(1, 1, floor=1),
            push(82),
        ]
    for given in steps:
        (ticket,) = send(asked, given)
        assert take(taken, given) == ticket.version
        validate(taken)
        assert contents(taken) == contents(asked)
    assert counts(taken) == counts(asked)
    assert list(taken.in_flight.touched()) == list(asked.in_flight.touched())
    assert taken.segment.header[CHANGED_ROW] > 0


def in_rounds(shard: Shard) -> None:
    shard.begin_run(RUN, BSP(), 2)


def gone(shard: Shard) -> None:
    producers.close_producers(shard.segment, [1])
    for at in range(MAX_PRODUCERS):
        send(shard, push(0, producer=2 + at))


@pytest.mark.parametrize("event", [cut, abandoned, moved, in_rounds, gone])
def test_shard_decides_about_a_push_after(event):
    shard = open_shard()
    event(shard)
    before = contents(shard)
    assert take(shard, push(1)) == ASK
    assert contents(shard) == before


@pytest.mark.parametrize(
    "more",
    [
        {"sequence": 0},
        {"sequence": -1},
        {"producer": 2},
        {"kind": ADD},
        {"kind": ASSIGN},
        {"kind": NOTHING, "items": ()},
        {"items": items({C: [1, 2, 3, 4]}, np.int64)},
        {"items": hot(0)[0:1] + items({B: [1.0, 2.0]})},
        {"items": items({A: np.zeros(5)}, "f4")},
        {"run": RUN, "rank": 0, "tick": True},
    ],
)
def test_push_is_taken_as_its_ticket_is_with(more: dict[str, Any]):
    taken, asked = open_shard(), open_shard()
    before, given = contents(taken), push(1)._replace(**more)
    version = take(taken, given)
    (ticket,) = send(asked, given)
    assert contents(taken) == contents(asked)
    if version == ASK:
        assert contents(taken) == before
    else:
        assert isinstance(ticket.outcome, Ready)
        assert ticket.version == version
        assert counts(taken) == counts(asked)


def test_push_whose_rule_raises_is_left_to_the_shard():
    shard = make()
    send(shard, push(0))
    assert take(shard, push(1, lr=0.25)) == ASK
    (ticket,) = send(shard, push(1, lr=0.25))
    assert isinstance(ticket.outcome, ArithmeticError)
    assert take(shard, push(1)) == 2


@pytest.mark.parametrize("more", [{"rank": -1}, {"rank": 2}, {"run": RUN + 1}])
def test_shard_decides_about_an_asynchronous_step_with(more: dict[str, Any]):
    shard = open_shard(ASP())
    before = contents(shard)
    assert take(shard, step(0, 0)._replace(**more)) == ASK
    shard.finish_rank(RUN, 1)
    assert take(shard, step(1, 0)) == ASK
    send(shard, step(0, 0))
    assert contents(shard) != before


@pytest.mark.parametrize("policy", [ASP(), SSP(2)])
def test_repeat_of_an_asynchronous_step_counts_once(policy):
    shard = open_shard(policy)
    assert take(shard, step(0, 0)) == 2
    before = contents(shard)
    for sequence in (0, -1):
        assert take(shard, step(0, 0)._replace(sequence=sequence)) == 2
        assert contents(shard) == before
    assert counts(shard)[1] == 2


def test_tick_after_a_push_before_it_is_taken_as_its_ticket_is():
    taken, asked = shard_of(), shard_of()
    for shard in (taken, asked):
        before_its_tick(shard)
        send(shard, step(0, 0))
    given = step(1, 0)._replace(sequence=1)
    (ticket,) = send(asked, given)
    assert take(taken, given) == ticket.version == 1
    assert contents(taken) == contents(asked)


def test_push_wakes_who_waits_for_it():
    shard = open_shard()
    reader = Ticket(Step(wait=READ, at_least=2))
    assert shard.submit([reader]) == []
    assert take(shard, push(1)) == ASK
    ticket = Ticket(push(1))
    assert shard.submit([ticket]) == [ticket, reader]


def test_deputy_leaves_a_push_to_some_shards_to_the_owner():
    shard = open_shard()
    deputy = Shard.as_deputy(shard.segment, {})
    assert take(deputy, push(1, touched=((0, 1),))) == ASK


@pytest.mark.parametrize("between", ["close", "kill", "kill after the flip"])
def test_record_is_whole_after(between):
    """Only the row that the last push has changed is copied to the next record."""
    shard = open_shard()
    send(shard, push(0, producer=2), push(1, producer=2))
    segment = shard.segment
    for sequence in (1, 2):
        assert take(shard, push(sequence)) > 0
    if between == "close":
        producers.close_producers(segment, [2])
    elif between == "kill":
        left = segment.header[CHANGED_ROW]
        Publication(segment).record.producers[1] = 7
        segment.header[CHANGED_ROW] = left  # as by any other maker of publications
    else:
        publication = Publication(segment)
        left = segment.header[CHANGED_ROW]
        producers.note_push(publication.record, push(5, producer=2))
        publication.commit()
        segment.header[CHANGED_ROW] = left  # it did not come so far
    row = segment.current.producers[1].tolist()
    for sequence in (3, 4):
        assert take(shard, push(sequence)) > 0
        assert segment.current.producers[1].tolist() == row


# -- readers that wait for a round ---------------------------------------------------


def waiting(rank: int, clock: int, **said: Any) -> Ticket:
    return Ticket(Step(run=RUN, rank=rank, clock=clock, wait=READ, **said))


def is_parked(shard: Shard, ticket: Ticket) -> bool:
    return shard.submit([ticket]) == [] and ticket in shard.parked.tickets


def test_readers_that_wait_are_told_when_their_round_is_complete():
    shard = shard_of(3)
    readers = [waiting(0, 1), waiting(1, 1), waiting(2, 2)]
    assert all(is_parked(shard, reader) for reader in readers)
    steps = [Ticket(step(rank, 0, wait=READ)) for rank in (1, 2, 0)]
    done = [shard.submit([ticket]) for ticket in steps[:2]]
    # Asked again, though nothing was published: nobody is told of the open round.
    shard.parked.asked = None
    assert shard.submit([]) == []
    done.append(shard.submit(steps[2:]))
    assert [len(of) for of in done] == [0, 0, 5]
    again = waiting(1, 1)
    assert not is_parked(shard, again)
    ready = Ready(shard.segment.flip, 1, exact=True)
    told = [*readers[:2], *steps, again]
    assert [of.outcome for of in told] == [ready] * len(told)
    assert {(of.applied, of.duplicate) for of in told[:-1]} == {(True, False)}
    assert readers[2].outcome is None


@pytest.mark.parametrize(
    "said", [{"run": RUN + 1}, {"rank": -1}, {"rank": 2}, {"generation": 5}]
)
def test_shard_decides_about_a_reader_with(said):
    shard = shard_of()
    ticket = Ticket(waiting(0, 1).step._replace(**said))
    assert not is_parked(shard, ticket)
    assert ticket.outcome is not None


def test_who_waits_is_asked_again_after_what_another_process_published():
    shard = shard_of()
    deputy = Shard.as_deputy(shard.segment, {})
    first, second = waiting(0, 1), waiting(0, 2)
    assert is_parked(shard, first)
    assert shard.round is not None
    deputy.run_state.attached = shard.round
    for rank in (0, 1):
        assert take(deputy, step(rank, 0)) >= 0
    assert first.outcome is None
    assert shard.submit([second]) == [first]
    assert shard.parked.tickets == [second]
