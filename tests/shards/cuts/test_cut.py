"""Cuts through shards that hear of the same steps at different times."""

from __future__ import annotations

import numpy as np
import pytest

from daskps.consistency import ASP, BSP
from daskps.errors import ConsistencyError, RunCancelledError, StoreClosedError
from daskps.layout.arrays import Layout
from daskps.shards import cut_requests
from daskps.shards.cuts.cut import Order, ShardReport, agree
from daskps.shards.memory.segment import Segment
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, GRADIENT, READ, Item, Ready, Step, Ticket
from tests.invariants import validate
from tests.shards.making import Adding, copy_parts, done, held, make

RUN = 7
CUT = "cut"


class Store:
    """Shards of one element each, and what is done to all of them."""

    def __init__(self, n: int = 2) -> None:
        layout = Layout.build({"w": ((n,), "float64")}, n)
        self.shards = [make(layout, i, ruled=[0]) for i in range(n)]

    def send(self, shard: int, *steps: Step) -> list[Ticket]:
        tickets = [Ticket(step) for step in steps]
        self.shards[shard].submit(tickets)
        validate(self.shards[shard])
        return tickets

    def begin(self) -> list[ShardReport]:
        return [self.begin_at(i) for i in range(len(self.shards))]

    def begin_at(self, i: int) -> ShardReport:
        return cut_requests.begin_cut(self.shards[i], CUT, i)

    def take(self, reports: list[ShardReport]) -> list[Ticket]:
        orders = agree(reports)
        return [self.take_at(i, orders[i]) for i in range(len(self.shards))]

    def take_at(self, i: int, order: Order) -> Ticket:
        ticket = Ticket(Step())
        found = cut_requests.follow_order(self.shards[i], CUT, order, ticket)
        assert (ticket in found) == (ticket.outcome is not None)
        validate(self.shards[i])
        return ticket

    def end(self, i: int) -> list[Ticket]:
        found = cut_requests.end_cut(self.shards[i], CUT)
        validate(self.shards[i])
        return found

    def copies(self, tickets: list[Ticket]) -> list[float]:
        return [self.copy(i, t) for i, t in enumerate(tickets)]

    def copy(self, i: int, ticket: Ticket) -> float:
        out = np.empty(1)
        segment = self.shards[i].segment
        size = len(segment.vectors[0]["float64"])
        assert copy_parts(
            self.shards[i].segment, done(ticket), [("float64", 0, size, out[:size])]
        )
        return float(out[0])

    def value(self, i: int) -> float:
        segment = self.shards[i].segment
        return float(held(segment)[0][0])


def push(sequence: int, value: float | None = None, producer: int = 1, **kwargs):
    """Add 2 to the power of the sequence number: the sum tells the set."""
    data = np.array([float(2**sequence) if value is None else value])
    options = {"producer": producer, "sequence": sequence, **kwargs}
    return Step(ADD, (Item(0, 0, data),), **options)


def tick(rank: int, clock: int, **kwargs) -> Step:
    options = {"tick": True, "sequence": clock, "floor": clock, **kwargs}
    items = (Item(0, 0, np.array([float(2**clock)])),)
    return Step(GRADIENT, items, run=RUN, rank=rank, clock=clock, **options)


def waits(ticket: Ticket) -> bool:
    return ticket.outcome is None


@pytest.mark.parametrize(
    ("n", "meant"),
    [(2, ((0, 1),)), (3, ((0, 1), (2, 3))), (70, ((0, 1), (62, 70)))],
)
def test_owner_that_is_followed_leaves_no_step_in_doubt(n, meant):
    """What an idle producer pushed last went to some shards, one after the other."""
    store = Store(n)
    shards = {i for start, stop in meant for i in range(start, stop)}
    for number in range(3):
        for i in shards:
            store.send(i, push(number, floor=number, touched=meant))
    for i in shards:
        before = store.shards[i]
        store.shards[i] = Shard(before.segment, {0: Adding()}, before.generation)
    tickets = store.take(store.begin())
    assert not any(map(waits, tickets))
    assert store.copies(tickets) == [7.0 * (i in shards) for i in range(n)]


def test_step_on_its_way_is_still_waited_for_at_a_new_owner():
    store = Store(3)
    store.send(0, push(0, touched=((0, 2),)))
    store.shards[0] = Shard(store.shards[0].segment, {0: Adding()})
    _, second, third = store.take(store.begin())
    assert waits(second)
    assert not waits(third)


def test_quiet_store_is_cut_at_once():
    store = Store(3)
    for i in range(3):
        store.send(i, push(0), push(1, floor=1))
    tickets = store.take(store.begin())
    assert store.copies(tickets) == [3, 3, 3]
    assert [done(t).version for t in tickets] == [2, 2, 2]


def test_cut_waits_for_a_step_on_its_way():
    """Applied on shard 0, still travelling to shard 1, with a newer one behind it."""
    store = Store()
    store.send(0, push(0))
    first, second = store.take(store.begin())
    assert store.copy(0, first) == 1
    assert waits(second)
    (newer,) = store.send(1, push(1))
    assert waits(newer)
    (late,) = store.send(1, push(0))
    assert isinstance(late.outcome, Ready)
    assert store.copy(1, second) == 1
    assert waits(newer)
    assert store.end(1) == [newer]
    assert done(newer).version == 2
    assert store.value(1) == 3
    # The shards release on their own: nobody waits for the slowest.
    (ahead,) = store.send(0, push(1))
    assert waits(ahead)
    assert store.end(0) == [ahead]


def test_step_held_before_the_order_is_let_through():
    store = Store()
    store.send(0, push(0))
    reports = store.begin()
    held, other = store.send(1, push(0), push(0, 64.0, producer=2))
    assert waits(held)
    tickets = store.take(reports)
    assert done(held).version == 1
    assert waits(other)
    assert store.copies(tickets) == [1, 1]
    store.end(1)
    assert store.value(1) == 65


def test_step_between_two_beginnings_is_in_neither_or_both():
    """Shard 1 begins later; what came in between is held on shard 0."""
    store = Store()
    first = store.begin_at(0)
    (held,) = store.send(0, push(0))
    store.send(1, push(0))
    tickets = store.take([first, store.begin_at(1)])
    assert store.copies(tickets) == [1, 1]
    assert done(held).version == 1


def test_steps_that_overtook_each_other():
    store = Store()
    store.send(0, push(2), push(0))
    store.send(1, push(3), push(0))
    tickets = store.take(store.begin())
    assert all(map(waits, tickets))
    store.send(0, push(1), push(3))
    assert isinstance(tickets[0].outcome, Ready)
    store.send(1, push(2))
    assert store.copies(tickets) == [13, 13]


def test_release_wakes_held_steps_in_order():
    """The later of two assignments must win, whatever was let through."""
    store = Store()
    store.begin()
    held = [
        store.send(0, Step("assign", push(i).items, producer=1, sequence=i))[0]
        for i in range(3)
    ]
    assert store.end(0) == held
    assert [t.version for t in held] == [1, 2, 3]
    assert store.value(0) == 4
    assert store.end(0) == []


def test_reads_and_repeats_go_on():
    store = Store()
    store.send(0, push(0))
    store.begin()
    read, again, new = store.send(0, Step(wait=READ), push(0), push(1))
    assert isinstance(read.outcome, Ready)
    assert done(again).duplicate
    assert waits(new)
    (twice,) = store.send(0, push(1))
    assert waits(twice)
    store.end(0)
    assert not new.duplicate
    assert twice.duplicate
    assert store.value(0) == 3


def test_partial_push_is_waited_for_only_where_it_goes():
    store = Store(3)
    store.send(0, push(0, touched=((0, 2),)))
    tickets = store.take(store.begin())
    assert [waits(t) for t in tickets] == [False, True, False]
    store.send(1, push(0, touched=((0, 2),)))
    assert store.copies(tickets) == [1, 1, 0]


def test_targets_of_settled_pushes_are_forgotten():
    store = Store()
    for n in range(100):
        store.send(0, push(n, 1.0, floor=n, touched=((0, 1),)))
    assert len(list(store.shards[0].in_flight.touched())) == 1
    assert store.copies(store.take(store.begin())) == [100, 0]


def test_push_given_up_before_the_cut_is_not_waited_for():
    """A later push says that the one before it is settled."""
    store = Store()
    store.send(0, push(0))
    for i in range(2):
        store.send(i, push(1, floor=1))
    assert store.copies(store.take(store.begin())) == [3, 2]


def test_push_given_up_during_the_cut_is_not_waited_for():
    """The producer says so itself, or with its next push, which is held."""
    for say in (
        lambda store: cut_requests.acknowledge_steps(store.shards[1], 0, 1, 1),
        lambda store: store.send(1, push(1, floor=1)),
        lambda store: cut_requests.mark_owners_lost(store.shards[1], CUT, [1]),
    ):
        store = Store()
        store.send(0, push(0))
        _, waiting = store.take(store.begin())
        assert waits(waiting)
        say(store)
        assert store.copy(1, waiting) == 0


def test_announcement_between_report_and_order_counts():
    store = Store()
    store.send(0, push(0))
    reports = store.begin()
    cut_requests.acknowledge_steps(store.shards[1], 0, 1, 1)
    assert store.copies(store.take(reports)) == [1, 0]


def test_excuse_is_for_this_cut_only():
    """A task that runs again has the same number: its next push is waited for."""
    store = Store()
    store.send(0, push(0))
    store.take(store.begin())
    cut_requests.mark_owners_lost(store.shards[1], CUT, [1])
    store.end(0)
    store.end(1)
    store.send(0, push(1))
    assert waits(store.take(store.begin())[1])


def test_one_of_two_waits():
    """Trainers under ASP: the last step of a rank may be in doubt, no other."""
    store = Store()
    for shard in store.shards:
        shard.begin_run(RUN, ASP(), 2)
    for clock in range(5):
        store.send(0, tick(0, clock), tick(1, clock))
    for clock in range(4):
        store.send(1, tick(0, clock), tick(1, clock))
    store.send(1, tick(1, 4))
    tickets = store.take(store.begin())
    assert [waits(t) for t in tickets] == [False, True]
    (ahead,) = store.send(0, tick(0, 5))
    assert waits(ahead)
    store.send(1, tick(0, 4))
    assert store.copies(tickets) == [62, 62]


def test_trainer_that_finished_or_gave_up_is_not_waited_for():
    for say in (
        lambda shard: shard.finish_rank(RUN, 0),
        lambda shard: cut_requests.acknowledge_steps(shard, RUN, -1, 1),
    ):
        store = Store()
        for shard in store.shards:
            shard.begin_run(RUN, ASP(), 1)
        store.send(0, tick(0, 0))
        _, waiting = store.take(store.begin())
        say(store.shards[1])
        assert store.copy(1, waiting) == 0


def test_announcement_of_another_run_is_ignored():
    store = Store()
    for shard in store.shards:
        shard.begin_run(RUN, ASP(), 1)
    store.send(0, tick(0, 0))
    _, waiting = store.take(store.begin())
    cut_requests.acknowledge_steps(store.shards[1], RUN - 1, -1, 1)
    assert waits(waiting)


def test_bsp_cut_serves_the_last_round_all_have():
    """Shard 0 is a round ahead; nobody is waited for, nothing gets further."""
    store = Store()
    for shard in store.shards:
        shard.begin_run(RUN, BSP(), 2, "sum")
    for i in range(2):
        store.send(i, tick(0, 0), tick(1, 0))
    store.send(0, tick(0, 1), tick(1, 1))
    store.send(1, tick(0, 1))
    reports = store.begin()
    assert [r.rounds for r in reports] == [2, 1]
    # Complete now, but frozen: else the buffer that is copied would be written.
    ahead = store.send(0, tick(0, 2, wait=READ), tick(1, 2, wait=READ))
    behind = store.send(1, tick(1, 1, wait=READ))
    assert all(map(waits, [*ahead, *behind]))
    tickets = store.take(reports)
    assert store.copies(tickets) == [2, 2]
    assert [done(t).version for t in tickets] == [1, 1]
    assert store.end(0) == ahead
    assert store.end(1) == behind
    assert [store.value(0), store.value(1)] == [14, 6]


def test_bsp_cut_whose_round_is_gone_starts_again():
    store = Store()
    for shard in store.shards:
        shard.begin_run(RUN, BSP(), 1, "sum")
    store.begin()
    store.send(0, tick(0, 0))
    store.end(0)
    store.begin_at(0)
    store.send(0, tick(0, 1))
    store.end(0)
    store.begin_at(0)
    ticket = store.take_at(0, Order((), RUN, 0))
    assert isinstance(ticket.outcome, ConsistencyError)


def test_run_on_some_shards_only_starts_again():
    store = Store()
    store.shards[0].begin_run(RUN, ASP(), 1)
    with pytest.raises(ConsistencyError, match="some of the shards"):
        agree(store.begin())


@pytest.mark.parametrize("policy", [ASP(), BSP()])
def test_fence_ends_a_cut_and_refuses_held_steps(policy):
    store = Store()
    for shard in store.shards:
        shard.begin_run(RUN, policy, 2, "sum")
    store.send(0, tick(0, 0))
    first, second = store.take(store.begin())
    mine, other = store.send(1, tick(1, 0, wait=READ), push(0, producer=3))
    ended = store.shards[1].end_run(RUN, "cancelled")
    validate(store.shards[1])
    assert isinstance(mine.outcome, RunCancelledError)
    assert mine in ended
    if policy == ASP():
        assert other in ended
        assert store.value(1) == 1
        assert isinstance(second.outcome, ConsistencyError)
        assert second in ended
    assert store.shards[1].cut is None
    assert cut_requests.end_cut(store.shards[1], CUT) == []
    assert isinstance(first.outcome, Ready)


def test_hold_of_a_fence_ends_a_cut():
    """A fence must not wait for a cut: shards would end at different rounds."""
    store = Store()
    for shard in store.shards:
        shard.begin_run(RUN, BSP(), 1, "sum")
    store.begin()
    (first,) = store.send(0, tick(0, 0, wait=READ))
    store.send(1, tick(0, 0))
    for shard in store.shards:
        shard.hold_run(RUN)
        assert shard.cut is None
    for shard in store.shards:
        shard.hold_run(RUN, 1)
        validate(shard)
    assert isinstance(first.outcome, Ready)
    assert [store.value(0), store.value(1)] == [1, 1]


def test_run_that_begins_ends_a_cut():
    store = Store()
    store.send(0, push(0))
    _, waiting = store.take(store.begin())
    (held,) = store.send(1, push(1))
    begun = store.shards[1].begin_run(RUN, BSP(), 1, "sum")
    assert waiting in begun
    assert isinstance(waiting.outcome, ConsistencyError)
    assert held in begun
    assert isinstance(held.outcome, ConsistencyError)


def test_cancelled_held_step_is_never_applied():
    store = Store()
    store.begin()
    (held,) = store.send(0, push(0))
    assert store.shards[0].waiting == [held]
    store.shards[0].cancel([held])
    assert store.shards[0].waiting == []
    assert store.end(0) == []
    assert store.value(0) == 0


def test_abandoned_shard_ends_its_cut():
    store = Store()
    store.send(0, push(0))
    _, waiting = store.take(store.begin())
    (held,) = store.send(1, push(1))
    error = StoreClosedError("gone")
    assert store.shards[1].abandon(error) == [held, waiting]
    assert held.outcome is error
    assert waiting.outcome is error


def test_order_of_a_cut_that_was_released_starts_again():
    store = Store()
    orders = agree(store.begin())
    store.end(0)
    ticket = Ticket(Step())
    assert cut_requests.follow_order(store.shards[0], CUT, orders[0], ticket) == [
        ticket
    ]
    assert isinstance(ticket.outcome, ConsistencyError)
    store.begin_at(0)
    assert cut_requests.end_cut(store.shards[0], "another") == []
    assert store.shards[0].cut is not None


def test_window_of_a_producer_far_ahead_on_one_shard():
    """Sixty partial pushes, one step on its way, and a bit on the window's edge."""
    store = Store()
    for n in range(63):
        store.send(0, push(n, 1.0, touched=((0, 1),)))
    store.send(0, push(63, 1.0))
    _, waiting = store.take(store.begin())
    assert waits(waiting)
    store.send(1, push(63, 1.0))
    assert store.copy(1, waiting) == 1


def test_agreement_of_many_is_quick_where_nothing_is_in_doubt():
    """A thousand trainers and a hundred shards take the scheduler no second."""
    n = 1000
    rows = np.stack([-1 - np.arange(n), *np.full((3, n), 5)], axis=1)
    rows[:, 2] = -1
    reports = [ShardReport(i, RUN, -1, rows) for i in range(100)]
    behind = rows.copy()
    behind[17, 1] = 4
    reports[3] = ShardReport(3, RUN, -1, behind)
    orders = agree(reports)
    assert {i for i, o in orders.items() if o.missing} == {3}
    assert orders[3].missing == ((-18, 5),)


def heir_of(shard: Shard) -> Shard:
    """Who goes on with a shard's memory, and knows nothing else of it."""
    before = shard.segment
    layout = Layout.build({"w": ((2,), "float64")}, 2)
    index = before.pieces[0].shard
    segment = Segment(layout, index, {0: (0.0,)}, before.buffer)
    heir = Shard(segment, {0: Adding()}, shard.generation)
    heir.take_over()
    return heir


@pytest.mark.parametrize("told", ["with a step", "alone"])
@pytest.mark.parametrize("owner", [1, -1], ids=["producer", "trainer"])
def test_heir_knows_what_was_given_up(owner, told):
    """Applied on shard 0, given up before it came to shard 1: no cut waits for it."""
    store = Store()
    run = RUN if owner < 0 else 0

    def send(i: int, sequence: int, floor: int) -> None:
        one = tick(0, sequence, floor=floor) if run else push(sequence, floor=floor)
        assert isinstance(store.send(i, one)[0].outcome, Ready)

    for i, shard in enumerate(store.shards):
        if run:
            shard.begin_run(run, ASP(), 1)
        send(i, 0, 0)
    send(0, 1, 2 if told == "with a step" else 0)
    if told == "alone":
        cut_requests.acknowledge_steps(store.shards[0], run, owner, 2)
    expected = [cut_requests.begin_cut(s, CUT, i) for i, s in enumerate(store.shards)]
    store.shards = [heir_of(shard) for shard in store.shards]
    reports = store.begin()
    for mine, theirs in zip(reports, expected, strict=True):
        np.testing.assert_array_equal(mine.rows, theirs.rows)
    tickets = store.take(reports)
    assert not any(map(waits, tickets))


@pytest.mark.parametrize("hears", [0, 1])
def test_word_that_a_push_was_given_up_may_come_before_it(hears):
    """It is the first of its producer, comes late to a shard, and to the other never."""
    store = Store()
    cut_requests.acknowledge_steps(store.shards[hears], 0, 1, 1)
    store.send(0, push(0))
    store.shards = [heir_of(shard) for shard in store.shards]
    assert store.copies(store.take(store.begin())) == [1, 0]


def test_a_push_above_a_floor_that_came_before_it_is_waited_for():
    store = Store()
    for shard in store.shards:
        cut_requests.acknowledge_steps(shard, 0, 1, 1)
    store.send(0, push(0), push(1, floor=1))
    first, second = store.take(store.begin())
    assert store.copy(0, first) == 3
    assert waits(second)
    store.send(1, push(1, floor=1))
    assert store.copy(1, second) == 2


def test_heir_of_a_shard_in_a_cut_holds_nothing_and_the_cut_begins_again():
    store = Store()
    store.send(0, push(0))
    _, second = store.take(store.begin())
    (late,) = store.send(1, push(1))
    assert waits(second)
    assert waits(late)
    store.shards[1] = heir_of(store.shards[1])
    # The call was under way: its caller sends it again, and it counts once.
    for duplicate in (False, True):
        (again,) = store.send(1, push(1))
        assert done(again).duplicate == duplicate
    assert isinstance(store.take_at(1, Order(((1, 0),))).outcome, ConsistencyError)
    store.end(0)
    tickets = store.take(store.begin())
    assert all(map(waits, tickets))
    store.send(0, push(1))
    store.send(1, push(0))
    assert store.copies(tickets) == [3, 3]


@pytest.mark.parametrize("begun", [True, False])
def test_heir_refuses_a_run_that_has_ended(begun):
    """Its beginning was late, or comes again."""
    store = Store(1)
    (shard,) = store.shards
    if begun:
        shard.begin_run(RUN, ASP(), 1)
    shard.end_run(RUN, "it was cancelled")
    layout = Layout.build({"w": ((1,), "float64")}, 1)
    same = Segment(layout, 0, {0: (0.0,)}, shard.segment.buffer)
    heir = Shard(same, {0: Adding()})
    before = heir.segment.buffer.tobytes()
    for one in (shard, heir):
        with pytest.raises(RunCancelledError):
            one.begin_run(RUN, ASP(), 1)
        (late,) = [Ticket(tick(0, 0))]
        one.submit([late])
        assert isinstance(late.outcome, RunCancelledError)
    assert heir.segment.buffer.tobytes() == before
    heir.begin_run(RUN + 1, ASP(), 1)


def test_heir_holds_a_fenced_run_where_it_was_held():
    store = Store(1)
    (shard,) = store.shards
    shard.begin_run(RUN, BSP(), 1)
    store.send(0, tick(0, 0))
    shard.hold_run(RUN)
    layout = Layout.build({"w": ((1,), "float64")}, 1)
    heir = Shard(Segment(layout, 0, {0: (0.0,)}, shard.segment.buffer), {0: Adding()})
    heir.run_state.attach_rounds(RUN, 1, "mean", None)
    heir.take_over()
    for one in (shard, heir):
        assert one.run_state.is_held
        ticket = Ticket(tick(0, 1))
        one.submit([ticket])
        assert waits(ticket)
        assert one.rounds_of(RUN) == 1
