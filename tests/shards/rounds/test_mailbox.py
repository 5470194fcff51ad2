"""Mailboxes that two state machines over the same memory fill in turns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.consistency import ASP, BSP
from daskps.errors import (
    ContributionLostError,
    NoOptimizerError,
    ProtocolError,
    RunCancelledError,
)
from daskps.layout.arrays import Layout
from daskps.reduction import reduce_all
from daskps.shards import cut_requests
from daskps.shards.deputy import OPEN, READING, NotHereError, gate_of
from daskps.shards.memory.format import GENERATION, ROUNDS
from daskps.shards.memory.segment import Segment
from daskps.shards.rounds import sums
from daskps.shards.rounds import words as tablework
from daskps.shards.rounds.mailbox import FORMAT_AT, MAGIC_AT, Mailbox, n_slices
from daskps.shards.rounds.words import Compiled
from daskps.shards.run_record import first_of
from daskps.shards.shard import Shard
from daskps.shards.steps import (
    ASK,
    GRADIENT,
    MODEL,
    Item,
    Ready,
    Step,
    Ticket,
)
from tests.invariants import bound_of, nodes_of, validate
from tests.seams import form_by, judge_all
from tests.shards.making import (
    RUN,
    A,
    C,
    Momentum,
    contents,
    counts,
    done,
    failed,
    leaf,
    send,
    weights,
)

#: Three pieces: two with a rule, of several parts to form each, and one without.
LAYOUT = Layout.build(
    {"a": ((9,), "float32"), "b": ((5,), "float16"), "c": ((3,), "float32")}, 1
)
#: Two pieces as most are: sums of steps with both of them are formed at once.
WHOLE = Layout.build({"a": ((9,), "float32"), "b": ((5,), "float32")}, 1)
#: One piece, whose second half another shard has.
SECOND = Layout.build({"a": ((18,), "float32")}, 2)
RULES = {0: Momentum(), 1: Momentum()}
SLOTS = dict.fromkeys(RULES, (0.0,))
N_PIECES = 3


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "TILE_NBYTES", 16)


def memory_of(
    n_ranks: int, reduce: Any, layout: Layout = LAYOUT
) -> np.ndarray[Any, Any]:
    return np.zeros(Mailbox.nbytes_of(layout.pieces[0], n_ranks, reduce), np.uint8)


def pair(n_ranks: int, reduce: Any = "mean", layout: Layout = LAYOUT) -> Any:
    """The owner of a shard and its deputy, both in a run; and the mailboxes."""
    segment = Segment(layout, 0, SLOTS, durable=True)
    segment.words[GENERATION] = 1
    owner, memory = Shard(segment, RULES), memory_of(n_ranks, reduce, layout)
    owner.begin_run(RUN, BSP(), n_ranks, reduce, memory=memory)
    return owner, another(segment.buffer, memory, n_ranks, reduce, layout), memory


def another(
    buffer: Any,
    memory: Any,
    n_ranks: int,
    reduce: Any = "mean",
    layout: Layout = LAYOUT,
) -> Shard:
    deputy = Shard.as_deputy(Segment(layout, 0, SLOTS, buffer, durable=True), RULES)
    deputy.run_state.attach_rounds(RUN, n_ranks, reduce, memory)
    return deputy


def heir(
    buffer: Any,
    memory: Any,
    n_ranks: int,
    reduce: Any = "mean",
    layout: Layout = LAYOUT,
) -> Shard:
    """Who takes over from an owner that died."""
    shard = Shard(Segment(layout, 0, SLOTS, buffer, durable=True), RULES)
    shard.run_state.attach_rounds(RUN, n_ranks, reduce, memory)
    shard.take_over()
    validate(shard)
    return shard


def gradient(rank: int, arrays: Any, weight: float = 1.0, clock: int = 0) -> Step:
    found = tuple(Item(p, 0, data) for p, data in arrays.items())
    kind: Any = {
        "run": RUN,
        "rank": rank,
        "clock": clock,
        "sequence": clock,
        "tick": True,
    }
    return Step(GRADIENT, found, weight=weight, **kind)


def rough(rng: np.random.Generator, n: int) -> Any:
    """Numbers whose sum depends on the order of its additions."""
    return (rng.normal(size=n) * 10.0 ** rng.integers(-4, 5, n)).astype("f4")


def stacked_median(stacked: Any, weights: Any) -> Any:
    return np.median(stacked, axis=0) + weights.sum()


# -- bits and room --------------------------------------------------------------


@given(
    st.data(),
    st.integers(1, 20),
    st.sampled_from(["mean", "sum", stacked_median]),
    st.integers(0, 2**32 - 1),
)
def test_any_order_at_any_of_two_gives_the_bits_of_one_reduction(
    data, size, reduce, seed
):
    rng = np.random.default_rng(seed)
    shards = pair(size, reduce)[:2]
    order = data.draw(st.permutations(range(size)))
    finished = data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    held = data.draw(st.booleans())
    nodes, before = {}, weights(shards[0])
    if held:
        cut_requests.begin_cut(shards[0], "cut", 0)
    for rank in order:
        # A cut lets deputies only read.
        shard = shards[0] if held else shards[rng.integers(2)]
        assert weights(shard) == before
        assert len(nodes_of(shard.round)) <= bound_of(shard.round)
        if rank in finished:
            shards[0].finish_rank(RUN, rank)
            continue
        present = [p for p in (0, 1) if rng.random() < 0.7]
        arrays = {p: rough(rng, [9, 5][p]) for p in present}
        weight = float(rng.choice([0.0, 1.0, 0.3, 32.0]))
        kept = {p: a.copy() for p, a in arrays.items()}
        send(shard, gradient(rank, arrays, weight))
        assert all((arrays[p] == a).all() for p, a in kept.items())
        if weight:
            nodes[rank] = leaf(list(kept.items()), weight, reduce)
    if held:
        assert shards[0].rounds_of(RUN) == 0
        cut_requests.end_cut(shards[0], "cut")
    alone = Shard(Segment(LAYOUT, 0, SLOTS), RULES)
    reduced = reduce_all(nodes, size, reduce)
    for sequence, (position, total) in enumerate(sorted(reduced.items())):
        items = (Item(position, 0, total),)
        send(alone, Step(GRADIENT, items, producer=1, sequence=sequence))
    for shard in shards:
        assert shard.rounds_of(RUN) == 1
        assert nodes_of(shard.round) == []
        for found, wanted in zip(weights(shard), weights(alone), strict=True):
            np.testing.assert_array_equal(found, wanted)
        validate(shard)


@pytest.mark.parametrize("size", [*range(1, 33), 63, 64, 65])
def test_the_worst_order_finds_a_free_slice(size):
    """Every other rank comes first; then each sum is made beside those it is of."""
    owner, deputy, _ = pair(size, "sum")
    one, most = np.ones(9, "f4"), 0
    for rank in [*range(0, size, 2), *range(1, size, 2)]:
        most = max(most, len(nodes_of(owner.round)))
        deputy.submit([Ticket(gradient(rank, {A: one}))])
    assert most == min(-(-size // 2), size - 1)
    assert n_slices(size, "sum") == -(-size // 2) + 1
    assert n_slices(size, stacked_median) == size
    assert owner.rounds_of(RUN) == 1


def test_models_are_averaged_by_two():
    owner, deputy, _ = pair(2)
    one, three = (np.full(9, v, "f4") for v in (1.0, 3.0))
    send(owner, gradient(0, {C: one[:3]})._replace(kind=MODEL))
    send(deputy, gradient(1, {C: three[:3]}, 3.0)._replace(kind=MODEL))
    assert weights(owner)[C] == [2.5] * 3


def test_memory_is_what_was_said():
    for size in (1, 2, 5, 64):
        owner, _, memory = pair(size)
        last = owner.round.mailbox.slice(n_slices(size, "mean") - 1)
        end = last.arrays[C].ctypes.data + last.arrays[C].nbytes
        assert 0 <= memory.ctypes.data + len(memory) - end < 64
        with pytest.raises(ProtocolError, match=f"need {len(memory):,} bytes"):
            Mailbox(owner.segment.pieces, size, "mean", memory[:-1])


# -- two processes ----------------------------------------------------------------


def test_pushes_before_the_tick_stay_with_the_process_that_got_them():
    owner, deputy, memory = pair(2)
    before = memory.copy()
    first = gradient(0, {A: np.ones(9, "f4")})._replace(tick=False)
    send(owner, first)
    words = owner.round.find_table().words.tolist()
    assert deputy.round.find_table().words.tolist() == words
    n_tables = 128 + 2 * 192
    np.testing.assert_array_equal(memory[n_tables:], before[n_tables:])
    send(owner, gradient(0, {A: np.ones(9, "f4")})._replace(sequence=1))
    send(deputy, gradient(1, {A: np.zeros(9, "f4")}))
    assert weights(owner)[A] == pytest.approx([-0.3] * 9)


def test_repeat_is_one_at_either():
    owner, deputy, _ = pair(2)
    one = gradient(0, {A: np.ones(9, "f4")})
    send(owner, one)
    assert done(send(deputy, one)[0]).duplicate
    send(deputy, gradient(1, {A: np.ones(9, "f4")}))
    assert done(send(owner, one)[0]).duplicate
    assert counts(owner)[0] == counts(deputy)[0] == 2


def test_early_step_parked_at_one_joins_after_the_round_ends_at_the_other():
    owner, deputy, _ = pair(2)
    one = {A: np.ones(9, "f4")}
    send(deputy, gradient(0, one))
    (early,) = send(deputy, gradient(0, one, clock=1))
    assert not early.applied
    send(owner, gradient(1, one))
    assert deputy.parked.is_stale
    assert deputy.submit([]) == [early]
    send(owner, gradient(1, one, clock=1))
    assert owner.rounds_of(RUN) == 2


def test_round_held_at_the_owner_is_applied_by_it():
    owner, deputy, _ = pair(2)
    one = {A: np.ones(9, "f4")}
    send(deputy, gradient(0, one))
    owner.hold_run(RUN)
    assert failed(send(deputy, gradient(1, one)), NotHereError)
    send_held = Ticket(gradient(1, one))
    owner.submit([send_held])
    assert owner.rounds_of(RUN) == 0
    owner.hold_run(RUN, 1)
    assert owner.rounds_of(RUN) == 1


def test_round_that_fails_is_left_to_the_owner():
    owner, deputy, memory = pair(2)
    bad = {C: np.ones(3, "f4")}
    send(deputy, gradient(0, bad))
    before, kept = contents(owner), memory.copy()
    (ticket,) = send(deputy, gradient(1, bad))
    assert isinstance(ticket.outcome, NotHereError)
    assert contents(owner) == before
    np.testing.assert_array_equal(memory, kept)
    assert failed(send(owner, ticket.step), NoOptimizerError)
    assert owner.rounds_of(RUN) == deputy.rounds_of(RUN) == 0
    assert owner.run_state.find_position(RUN).is_stuck
    assert failed(send(deputy, ticket.step), NotHereError)
    owner.end_run(RUN, "over")
    assert failed(send(deputy, ticket.step), NotHereError)
    assert failed(send(owner, ticket.step), NoOptimizerError)


def test_numbers_that_cannot_be_weighed_change_nothing():
    """The mean of whole numbers is none: said before the first byte is written."""
    layout = Layout.build({"n": ((4,), "int64")}, 1)
    owner = Shard(Segment(layout, 0, {}), {})
    owner.begin_run(RUN, BSP(), 2, "mean")
    for rank in (0, 1):
        items = (Item(0, 0, np.arange(4)),)
        one = gradient(rank, {})._replace(kind=MODEL, items=items)
        (ticket,) = send(owner, one)
    assert isinstance(ticket.outcome, TypeError)
    assert weights(owner) == [[0] * 4]
    assert owner.segment.writing == owner.segment.flip


def test_new_run_takes_the_memory_over():
    owner, deputy, memory = pair(2)
    one = {A: np.ones(9, "f4")}
    send(deputy, gradient(0, one))
    owner.begin_run(RUN + 1, BSP(), 2, memory=memory)
    assert not deputy.round
    late = [Ticket(gradient(1, one)), Ticket(gradient(1, one)._replace(run=RUN + 1))]
    deputy.submit(late)
    assert failed(late, NotHereError)
    deputy.run_state.attach_rounds(RUN + 1, 2, "mean", memory)
    assert nodes_of(deputy.round) == []


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"run": RUN + 1}, id="run"),
        pytest.param({"n_ranks": 3}, id="ranks"),
        pytest.param({"reduce": stacked_median}, id="slices"),
        pytest.param({"word": MAGIC_AT}, id="magic"),
        pytest.param({"word": FORMAT_AT}, id="format"),
        pytest.param({"cut": 1}, id="length"),
        pytest.param({"cut": 10**9}, id="nothing"),
    ],
)
def test_memory_that_holds_something_else_is_refused(other):
    _, deputy, memory = pair(4)
    taken = {"run": RUN, "n_ranks": 4, "reduce": "mean", **other}
    word, cut = taken.pop("word", None), taken.pop("cut", 0)
    if word is not None:
        memory[:128].view(np.int64)[word] += 1
    with pytest.raises(ProtocolError, match="mailboxes"):
        deputy.run_state.attach_rounds(
            memory=memory[: max(0, len(memory) - cut)], **taken
        )
    assert deputy.round is not None


def test_run_that_is_over_is_not_attached_to():
    owner, deputy, memory = pair(2)
    owner.end_run(RUN, "test")
    with pytest.raises(RunCancelledError):
        deputy.run_state.attach_rounds(RUN, 2, "mean", memory)


def test_run_that_its_owner_has_ended_takes_no_step():
    owner, deputy, _ = pair(2)
    before = owner.segment.buffer.copy()
    owner.end_run(RUN, "test")
    ended = owner.segment.buffer.copy()
    assert deputy.step(gradient(0, {A: np.ones(9, "f4")})) == ASK
    assert (owner.segment.buffer == ended).all()
    assert (before != ended).any()


def test_round_without_its_mailboxes_takes_no_step():
    segment = pair(2)[0].segment
    same = Segment(LAYOUT, 0, SLOTS, segment.buffer, durable=True)
    (ticket,) = [Ticket(gradient(0, {A: np.ones(9, "f4")}))]
    Shard(same, RULES).submit([ticket])
    assert "attach" in str(ticket.outcome)
    assert segment.current.fixed[ROUNDS] == 0


def test_run_without_rounds_after_one_with_them():
    owner, deputy, _ = pair(2)
    owner.begin_run(RUN + 1, ASP(), 1)
    assert owner.round is deputy.round is None
    one = gradient(0, {A: np.ones(9, "f4")})._replace(run=RUN + 1)
    assert isinstance(send(deputy, one)[0].outcome, Ready)


# -- owners that die --------------------------------------------------------------


def part(rank: int, value: float, sequence: int, **more: Any) -> Step:
    arrays = {A: np.full(9, value, "f4")}
    return gradient(rank, arrays)._replace(sequence=sequence, tick=False, **more)


def taken_over(size: int = 2) -> tuple[Shard, Callable[[], Shard]]:
    """An owner in a run, and a function that takes over from it."""
    owner, _, memory = pair(size)
    return owner, lambda: heir(owner.segment.buffer, memory, size)


def test_next_round_takes_no_tick_before_all_shards_know_who_has_finished():
    """Also the next owner knows, and a message may come that knows of fewer ranks."""
    owner, deputy, memory = pair(4, layout=SECOND)
    one = {A: np.ones(9, "f4")}
    send(owner, gradient(1, one), gradient(2, one))
    assert owner.finish_rank(RUN, 0) == []
    # The open round goes on, by the owner alone.
    assert failed(send(deputy, gradient(3, one)), NotHereError)
    send(owner, gradient(3, one))
    assert owner.rounds_of(RUN) == 1
    early = send(owner, gradient(1, one, clock=1), gradient(2, one, clock=1))
    owner.finish_rank(RUN, 3)
    assert owner.finish_rank(RUN, 3) == []
    assert not any(ticket.outcome or ticket.applied for ticket in early)
    mine = heir(owner.segment.buffer, memory, 4, layout=SECOND)
    early = send(mine, *(ticket.step for ticket in early))
    assert mine.hear_finished(RUN + 1, 2) == mine.hear_finished(RUN, 1) == []
    assert (mine.rounds_of(RUN), gate_of(mine.segment)) == (1, READING)
    assert set(map(id, mine.hear_finished(RUN, 2))) == set(map(id, early))
    assert (mine.rounds_of(RUN), gate_of(mine.segment)) == (2, OPEN)
    assert not any(done(ticket).duplicate for ticket in early)
    # What is told again holds nothing back.
    assert mine.finish_rank(RUN, 3) == mine.hear_finished(RUN, 1) == []
    follow = another(mine.segment.buffer, memory, 4, layout=SECOND)
    send(follow, gradient(1, one, clock=2), gradient(2, one, clock=2))
    assert mine.rounds_of(RUN) == 3
    validate(mine)


def test_a_word_that_comes_late_lifts_no_fence():
    owner, _, _ = pair(2, layout=SECOND)
    one = {A: np.ones(9, "f4")}
    owner.finish_rank(RUN, 0)
    owner.hold_run(RUN)
    assert owner.hear_finished(RUN, 1) == []
    send(owner, gradient(1, one))
    assert owner.rounds_of(RUN) == 0
    # Those that are behind catch up.
    owner.hold_run(RUN, 1)
    assert owner.rounds_of(RUN) == 1


@pytest.mark.parametrize("tick", [True, False])
def test_pushes_before_the_tick_are_asked_for_again(tick):
    """They went with the owner; the same sums are made of all of the clock."""
    values = (0.1, 0.2, 0.7)
    owner, follow = taken_over()
    alone = pair(2)[0]
    for shard in (owner, alone):
        send(shard, part(0, values[0], 0), part(0, values[1], 1))
    mine = follow()
    last = part(0, values[2], 2)._replace(tick=tick)
    before = contents(mine)
    assert failed(send(mine, last), ContributionLostError)
    assert contents(mine) == before
    total = float(sum(map(np.float32, values), np.float32(0)))
    send(mine, last._replace(sequence=3, whole=True, items=part(0, total, 0).items))
    if not tick:
        send(mine, part(0, 0.0, 4)._replace(items=(), tick=True))
        send(alone, last)
        last = part(0, 0.0, 3)._replace(items=(), tick=True)
    send(alone, last)
    for shard in (mine, alone):
        send(shard, gradient(1, {A: np.ones(9, "f4")}))
        assert shard.rounds_of(RUN) == 1
    assert weights(mine) == weights(alone)


def test_whole_clock_counts_once_where_nothing_was_lost():
    """It goes to all shards, also where its parts, or its tick, arrived."""
    owner, _ = taken_over()
    whole = part(0, 3.0, 5, whole=True)._replace(tick=True)
    send(owner, part(0, 1.0, 0), part(0, 2.0, 1))
    assert not done(send(owner, whole)[0]).duplicate
    assert done(send(owner, whole._replace(sequence=6))[0]).duplicate
    send(owner, gradient(1, {A: np.full(9, 5, "f4")}))
    assert weights(owner)[A] == pytest.approx([-0.3 * 4] * 9)


def test_next_clock_asks_for_nothing():
    owner, follow = taken_over(1)
    send(owner, part(0, 1.0, 0), part(0, 1.0, 1)._replace(tick=True))
    send(follow(), gradient(0, {A: np.ones(9, "f4")}, clock=1))


def test_trainer_that_starts_again_owes_nothing():
    owner, follow = taken_over()
    send(owner, part(0, 1.0, 0))
    mine, at = follow(), first_of(2)
    assert mine.run_state.resume_rank(RUN, 0, 2) == (0, at)
    # Also to the next owner: it is in the memory that both have.
    assert failed(send(mine, part(0, 1.0, 1)._replace(tick=True)), RunCancelledError)
    (ticket,) = send(mine, gradient(0, {A: np.ones(9, "f4")})._replace(sequence=at))
    assert not done(ticket).duplicate


def test_trainer_that_ends_owes_nothing():
    owner, follow = taken_over()
    send(owner, part(0, 1.0, 0))
    mine = follow()
    mine.finish_rank(RUN, 0)
    send(mine, gradient(1, {A: np.ones(9, "f4")}))
    assert mine.rounds_of(RUN) == 1
    assert mine.round
    assert not mine.round.find_table().has_pushed(0)


@pytest.mark.parametrize("rank", [0, 31, 32, 69])
def test_each_rank_has_a_bit(rank):
    owner, _ = taken_over(70)
    send(owner, part(rank, 1.0, 0))
    assert owner.round
    table = owner.round.find_table()
    assert [r for r in range(70) if table.has_pushed(r)] == [rank]


def test_round_that_a_cut_held_back_is_applied():
    owner, follow = taken_over()
    one = {A: np.ones(9, "f4")}
    cut_requests.begin_cut(owner, "cut", 0)
    send(owner, gradient(0, one), gradient(1, one))
    assert owner.rounds_of(RUN) == 0
    assert follow().rounds_of(RUN) == 1
    assert gate_of(owner.segment) == OPEN


def test_round_that_a_fence_held_back_is_not():
    """All shards are about to end with the same round: the limit is in the segment."""
    owner, follow = taken_over()
    one = {A: np.ones(9, "f4")}
    owner.hold_run(RUN)
    send(owner, gradient(0, one), gradient(1, one))
    mine = follow()
    validate(mine)
    assert mine.rounds_of(RUN) == 0
    assert gate_of(mine.segment) == READING
    mine.hold_run(RUN, 1)
    assert mine.rounds_of(RUN) == 1
    # And no further.
    send(mine, gradient(0, one, clock=1), gradient(1, one, clock=1))
    assert follow().rounds_of(RUN) == 1
    mine.end_run(RUN, "over")
    mine.begin_run(RUN + 1, BSP(), 1)
    assert gate_of(mine.segment) == OPEN


@pytest.mark.parametrize("how", ["cut", "fence"])
def test_round_of_one_is_accepted_when_it_is_applied(how):
    """A reduction of the task graph brings it, to mailboxes that nobody else has."""
    owner, _, _ = pair(1)
    if how == "cut":
        cut_requests.begin_cut(owner, "cut", 0)
    else:
        owner.hold_run(RUN)
    (ticket,) = send(owner, gradient(0, {A: np.ones(9, "f4")}))
    assert owner.parked.tickets == [ticket]
    assert not nodes_of(owner.round)
    end = partial(owner.hold_run, RUN, 1)
    assert (cut_requests.end_cut(owner, "cut") if how == "cut" else end()) == [ticket]
    assert not done(ticket).duplicate
    assert owner.rounds_of(RUN) == 1


def test_round_of_one_goes_on_without_what_the_owner_had():
    owner, _, _ = pair(1)
    one = {A: np.ones(9, "f4")}
    send(owner, gradient(0, one))
    mine = Shard(Segment(LAYOUT, 0, SLOTS, owner.segment.buffer, durable=True), RULES)
    mine.run_state.attach_rounds(RUN, 1, "sum", None)
    mine.take_over()
    assert done(send(mine, gradient(0, one))[0]).duplicate
    send(mine, gradient(0, one, clock=1))
    assert mine.rounds_of(RUN) == 2


def test_step_that_came_early_joins_when_it_is_sent_again():
    owner, follow = taken_over()
    one = {A: np.ones(9, "f4")}
    send(owner, gradient(0, one))
    (early,) = send(owner, gradient(0, one, clock=1))
    mine = follow()
    (again,) = send(mine, early.step)
    assert mine.parked.tickets == [again]
    send(mine, gradient(1, one))
    assert not mine.parked.tickets
    send(mine, gradient(1, one, clock=1))
    assert mine.rounds_of(RUN) == 2


# -- crashes ----------------------------------------------------------------------


class Killed(BaseException):
    """The process is gone: nothing that catches errors may see it."""


class Watch:
    """Counts stores, and kills right after one of them."""

    def __init__(self, last: int) -> None:
        self.last, self.n = last, 0

    def stored(self) -> None:
        self.n += 1
        if self.n > self.last:
            raise Killed


class Words:
    """Words of memory whose stores are watched."""

    def __init__(self, words: Any, watch: Watch) -> None:
        self._words, self._watch = words, watch

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, at: Any) -> Any:
        return self._words[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        value = value._words if isinstance(value, Words) else value
        if isinstance(at, slice) and np.ndim(value) and len(value) > 1:
            values, parts = value.tolist(), self._words[at]
            half = len(values) // 2
            parts[:half] = value[:half]
            self._watch.stored()
        self._words[at] = value
        self._watch.stored()

    def tolist(self) -> Any:
        return self._words.tolist()

    def view(self, dtype: Any) -> Words:
        return Words(self._words.view(dtype), self._watch)


#: The functions that are compiled, as they are written.
PLAIN = Compiled(*(getattr(tablework, name) for name in Compiled._fields))


class Dying(Momentum):
    """A rule that may be killed between any two of its stores."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def write(self, w_in, w_out, g, slots, scalars, slots_out):
        w_out[: len(w_out) // 2] = 99
        self._watch.stored()
        super().write(w_in, w_out, g, slots, scalars, slots_out)
        self._watch.stored()


def watched(
    buffer: Any, memory: Any, n_ranks: int, watch: Watch, layout: Layout
) -> Shard:
    """A state machine all of whose stores are watched."""
    segment = Segment(layout, 0, SLOTS, buffer, durable=True)
    segment.header = Words(segment.header, watch)  # type: ignore[assignment]  # as the words
    shard = Shard(segment, dict.fromkeys(RULES, Dying(watch)))
    shard.run_state.attach_rounds(RUN, n_ranks, "mean", memory)
    assert shard.round
    open_round: Any = shard.round
    open_round.work = PLAIN
    open_round._records = [Words(words, watch) for words in open_round._records]
    form_by(open_round, PLAIN.form4)
    mailbox = open_round.mailbox
    mailbox.words = Words(mailbox.words, watch)
    for table in mailbox.tables:
        for name in ("array", "words", "ranks", "next", "first", "last", "bits"):
            setattr(table, name, Words(getattr(table, name), watch))
    for index in range(mailbox.n_slices):
        found = mailbox.slice(index)
        found.weights = Words(found.weights, watch)
    return shard


def rounds_of_three(*, ragged: bool) -> Iterator[Step]:
    """The steps of two rounds of three ranks, in an order that merges sums."""
    rng = np.random.default_rng(3)
    for clock, rank in itertools.product((0, 1), (2, 0, 1)):
        arrays = {A: rough(rng, 9), 1: rough(rng, 5)}
        if ragged and (clock, rank) == (0, 0):
            del arrays[1]
        yield gradient(rank, arrays, 0.3 + rank, clock)


#: Of the second layout every step has all pieces.
STEPS = {
    layout: list(rounds_of_three(ragged=layout is LAYOUT)) for layout in (LAYOUT, WHOLE)
}


def state(shard: Shard) -> Any:
    segment, record = shard.segment, shard.segment.current
    slots = [s.tolist() for p in (0, 1) for s in segment.slots_of(record, p)]
    return weights(shard), slots, record.ranks[:3].tolist(), shard.rounds_of(RUN)


@cache
def states(layout: Layout) -> list[Any]:
    """What the shard holds after so many steps, without a crash."""
    owner, _, _ = pair(3, layout=layout)
    found = [state(owner)]
    for one in STEPS[layout]:
        send(owner, one)
        found.append(state(owner))
    return found


def submit(shard: Shard, ticket: Ticket) -> None:
    """As a step that is not ordinary."""
    judge_all(shard)
    shard.submit([ticket])


def take(shard: Shard, ticket: Ticket) -> None:
    """Take a step without a ticket, which must be possible."""
    version = shard.step(ticket.step)
    assert version >= 0
    ticket.outcome = Ready(shard.segment.flip, version)


@pytest.mark.parametrize(
    ("way", "follower", "layout"),
    [
        (submit, another, LAYOUT),
        (submit, heir, LAYOUT),
        (take, heir, LAYOUT),
        (take, heir, WHOLE),
    ],
    ids=["followed", "inherited", "ordinary", "direct"],
)
@pytest.mark.parametrize("nth", range(6))
def test_step_killed_after_any_store_counts_once(nth, way, follower, layout):
    wanted, steps = states(layout), STEPS[layout]
    owner, _, memory = pair(3, layout=layout)
    send(owner, *steps[:nth])
    buffer, n_kills = owner.segment.buffer, 0
    for last in itertools.count():
        copies = buffer.copy(), memory.copy()
        shard = watched(*copies, 3, Watch(last), layout)
        ticket = Ticket(steps[nth])
        with suppress(Killed):
            way(shard, ticket)
        survivor = follower(*copies, 3, layout=layout)
        validate(survivor)
        assert state(survivor) in wanted[nth : nth + 2]
        killed = ticket.outcome is None
        assert killed or isinstance(ticket.outcome, Ready)
        (again,) = send(survivor, steps[nth])
        assert done(again).duplicate or killed
        assert state(survivor) == wanted[nth + 1]
        send(survivor, *steps[nth + 1 :])
        assert state(survivor) == wanted[-1]
        if not killed:
            break
        n_kills += 1
    assert n_kills >= 10
