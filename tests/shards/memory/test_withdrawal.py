"""The last round of a run is taken back where other shards do not have it."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from daskps import optim
from daskps.backend.host import untouched
from daskps.consistency import BSP
from daskps.errors import IllegalStateError, RunCancelledError
from daskps.layout.arrays import Layout
from daskps.shards import producers
from daskps.shards.deputy import OPEN, READING, gate_of
from daskps.shards.memory import segment as segment_
from daskps.shards.memory.format import GENERATION
from daskps.shards.memory.segment import Segment
from daskps.shards.parked import flip_of_round
from daskps.shards.rounds.mailbox import Mailbox
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, GRADIENT, Item, RunPosition, Step, Ticket
from tests.invariants import validate
from tests.kernels.compiling import kept
from tests.shards.making import RUN, failed, held, send, slots_of, weights
from tests.shards.rounds.test_mailbox import Killed, Watch, Words

#: "b" gets no gradient in the round that is withdrawn, "c" has no rule, "d" is float16.
LAYOUT = Layout.build(
    {
        "a": ((40,), "float32"),
        "b": ((7,), "float32"),
        "c": ((3,), "int64"),
        "d": ((9,), "float16"),
    },
    1,
)
A, B, C, D = range(4)
RULED = (A, B, D)
SLOTS = dict.fromkeys(RULED, (0.0, 0.0))


@pytest.fixture(autouse=True, params=["together", "apart"])
def sides(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether all weights lie in one buffer, as in a small shard, or each piece in its own."""
    if request.param == "apart":
        monkeypatch.setattr(segment_, "TOGETHER_NBYTES", 0)


@pytest.fixture(scope="module")
def bound() -> Any:
    """Adam for each parameter: its slots are what an update in place loses."""
    kinds = {A: "f4", B: "f4", D: "f2"}
    rule = optim.Adam(0.1)
    return {i: optim.bind(rule, d, cache_dir=kept()) for i, d in kinds.items()}


def arrays(number: int, *positions: int) -> tuple[Item, ...]:
    rng = np.random.default_rng(number)
    sizes = [piece.size for piece in LAYOUT.pieces[0]]
    return tuple(Item(p, 0, rng.normal(size=sizes[p]).astype("f4")) for p in positions)


def tick(rank: int, clock: int, *positions: int) -> Step:
    items = arrays(10 * clock + rank, *positions)
    return Step(
        GRADIENT,
        items,
        run=RUN,
        rank=rank,
        clock=clock,
        tick=True,
        sequence=clock,
        weight=1.0 + rank,
    )


#: Three rounds of two trainers: the last is withdrawn, and leaves one piece alone.
ROUNDS = [
    [tick(0, 0, A, B, D), tick(1, 0, A, B)],
    [tick(0, 1, A, B), tick(1, 1, B, D)],
    [tick(0, 2, A), tick(1, 2, A, D)],
]


class Box:
    """A shard in memory that outlives who acts for it, and its mailboxes."""

    def __init__(self, bound: Any, *, durable: bool = True) -> None:
        self.bound, self.durable = bound, durable
        nbytes = Segment.needed_nbytes(LAYOUT, 0, SLOTS, durable=durable)
        self.buffer = untouched(nbytes)
        self.memory = untouched(Mailbox.nbytes_of(LAYOUT.pieces[0], 2, "mean"))

    def shard(self) -> Shard:
        segment = Segment(LAYOUT, 0, SLOTS, self.buffer, durable=self.durable)
        segment.words[GENERATION] = 1
        return Shard(segment, self.bound)

    def begun(self) -> Shard:
        shard = self.shard()
        first = Step(GRADIENT, arrays(99, A, B, D), producer=1)
        send(shard, first)
        shard.begin_run(RUN, BSP(), 2, "mean", memory=self.memory)
        return shard

    def heir(self) -> Shard:
        """Who goes on when a process has died."""
        shard = self.shard()
        if shard.run_state.is_bsp:
            shard.run_state.attach_rounds(RUN, 2, "mean", self.memory)
        shard.take_over()
        validate(shard)
        return shard

    def copy(self) -> Box:
        other = Box(self.bound)
        other.buffer[:], other.memory[:] = self.buffer, self.memory
        return other


def after(box: Box, n: int) -> Shard:
    shard = box.begun()
    for steps in ROUNDS[:n]:
        send(shard, *steps)
    assert shard.rounds_of(RUN) == n
    return shard


def state(shard: Shard) -> Any:
    segment, record = shard.segment, shard.segment.current
    slots = [[s.tolist() for s in of] for of in slots_of(segment)]
    return weights(shard), slots, record.steps.tolist(), record.version


def go_on(shard: Shard, first: int = 1) -> None:
    """Push to one piece after the other, and train once more."""
    for sequence, position in enumerate((C, B, D, A), first):
        if position == C:
            step = Step(ADD, (Item(C, 0, np.arange(3)),), producer=1, sequence=sequence)
        else:
            given = arrays(sequence, position)
            step = Step(GRADIENT, given, producer=1, sequence=sequence)
        send(shard, step)
    shard.begin_run(RUN + 1, BSP(), 2, "mean")
    for step in ROUNDS[0]:
        send(shard, step._replace(run=RUN + 1))
    shard.end_run(RUN + 1, "over")


@pytest.mark.parametrize("durable", [True, False], ids=["durable", "private"])
def test_withdrawn_round_leaves_no_trace(bound, durable):
    """Weights, slots and steps are those of a shard that never had it, for ever."""
    shard, never = (after(Box(bound, durable=durable), n) for n in (3, 2))
    shard.hold_run(RUN)
    assert shard.run_state.find_position(RUN) == RunPosition(3, 4, has_last=True)
    had = held(shard.segment)[A].copy()
    shard.end_run(RUN, "over", rounds=2, version=5)
    never.end_run(RUN, "over", rounds=2, version=5)
    validate(shard)
    assert state(shard) == state(never)
    assert shard.segment.current.version == 5
    assert (had != held(shard.segment)[A]).any()
    assert shard.run_state.find_position(RUN).rounds == shard.rounds_of(RUN) == -1
    assert failed(send(shard, tick(0, 3, A)), RunCancelledError)
    for one in (shard, never):
        go_on(one)
        validate(one)
    assert state(shard) == state(never)
    assert gate_of(shard.segment) == OPEN


def test_each_publication_after_a_withdrawal_is_without_the_round(bound):
    """The record of the withdrawn round is overwritten by the next one."""
    shard = after(Box(bound), 3)
    segment = shard.segment
    wanted, had = weights(shard, segment.flip - 1), segment.current.version
    assert weights(shard) != wanted
    shard.end_run(RUN, "over", rounds=2)
    # Also where nobody says which it is to be: that one had the round.
    assert segment.current.version == had + 1
    assert weights(shard) == wanted
    shard.begin_run(RUN + 1, BSP(), 1)
    assert weights(shard) == weights(shard, segment.flip - 1) == wanted


def test_private_slots_have_a_second_buffer_only_in_rounds(bound):
    shard = Box(bound, durable=False).begun()
    segment = shard.segment
    assert segment.n_sides == 2
    assert segment.more_nbytes >= 2 * 4 * (40 + 7 + 9)
    send(shard, *ROUNDS[0])
    assert segment.current.slot_sides.tolist() == [1, 1, 0, 1]
    shard.end_run(RUN, "over")
    assert segment.n_sides == 1
    assert segment.current.slot_sides.tolist() == [0] * 4
    assert not segment.updates
    assert Box(bound).begun().segment.more_nbytes == 0


def test_producer_that_ends_during_the_run_stays_ended(bound):
    shard = after(Box(bound), 3)
    producers.close_producers(shard.segment, [1])
    shard.end_run(RUN, "over", rounds=2)
    assert producers.list_open(shard.segment.current) == []


def test_no_further_back_than_one_round(bound):
    shard = after(Box(bound), 3)
    before = state(shard)
    for rounds in (1, 4):
        with pytest.raises(IllegalStateError, match=f"is to end after round {rounds}"):
            shard.end_run(RUN, "over", rounds=rounds)
    segment = shard.segment
    segment.writing += 1  # a process died in the next publication
    with pytest.raises(IllegalStateError, match="cannot go back"):
        shard.end_run(RUN, "over", rounds=2)
    assert not shard.run_state.find_position(RUN).has_last
    assert state(shard) == before
    shard.end_run(RUN, "over", rounds=3, version=9)
    assert state(shard) == (*before[:3], 9)


def test_first_round_of_a_run_goes_back_to_its_beginning(bound):
    shard, never = after(Box(bound), 1), Box(bound).begun()
    assert not never.run_state.find_position(RUN).has_last
    shard.end_run(RUN, "over", rounds=0, version=3)
    never.end_run(RUN, "over", rounds=0, version=3)
    assert state(shard) == state(never)


def test_held_shard_that_is_told_why_waits_for_its_end(bound):
    """The trainers of a fence that has to wait for another shard are told at once."""
    shard = after(Box(bound), 2)
    early = Ticket(ROUNDS[2][0]._replace(wait="read"))
    assert shard.submit([early]) == []
    assert shard.hold_run(RUN, error=RunCancelledError("fenced")) == [early]
    assert failed([early, *send(shard, ROUNDS[2][1])], RunCancelledError)
    assert shard.run_state.find_position(RUN) == RunPosition(
        2, 3, is_stuck=True, has_last=True
    )
    assert gate_of(shard.segment) == READING
    # Nothing completes a round any more, whatever the limit.
    shard.hold_run(RUN, 3)
    assert shard.rounds_of(RUN) == 2
    for call in (shard.finish_rank, shard.run_state.resume_rank):
        with pytest.raises(RunCancelledError, match="fenced"):
            call(RUN, 0)
    shard.end_run(RUN, "over", rounds=1, version=7)
    assert shard.segment.current.version == 7


# -- crashes ------------------------------------------------------------------


def withdraw(shard: Shard) -> None:
    shard.end_run(RUN, "over", rounds=2, version=5)


def watched(box: Box, watch: Watch) -> Shard:
    """Who withdraws and is killed after one of its stores."""
    shard = box.shard()
    shard.run_state.attach_rounds(RUN, 2, "mean", box.memory)
    segment: Any = shard.segment
    segment.header = Words(segment.header, watch)
    record = segment.record(segment.flip + 1)
    for name in ("plain", "fixed"):
        setattr(record, name, Words(getattr(record, name), watch))
    return shard


def test_withdrawal_killed_after_any_store_is_done_again(bound):
    """Until the flip the shard has the round, after it the run is over."""
    box = Box(bound)
    shard = after(box, 3)
    shard.hold_run(RUN)
    before = state(shard)
    whole = box.copy()
    withdraw(whole.heir())
    wanted = state(whole.shard())
    n_kills = 0
    for last in itertools.count():
        left = box.copy()
        with suppress(Killed):
            withdraw(watched(left, Watch(last)))
            break
        n_kills += 1
        heir = left.heir()
        assert state(heir) in (before, wanted)
        if heir.run_state.is_bsp:
            # Steps that come meanwhile change nothing.
            assert heir.run_state.find_position(RUN).has_last
            assert heir.segment.limit == 3
            send(heir, tick(0, 3, A), tick(1, 3, A))
        else:
            assert state(heir) == wanted
        withdraw(heir)
        assert state(heir) == wanted
        go_on(heir)
        validate(heir)
    assert n_kills >= 12


def test_words_of_a_withdrawal_may_be_there_in_any_order(bound, rng):
    """As where a processor reorders stores, or a kill hits a copy of many words."""
    box = Box(bound)
    shard = after(box, 3)
    shard.hold_run(RUN)
    segment = shard.segment
    flip = segment.flip
    whole = box.copy()
    withdraw(whole.heir())
    wanted = state(whole.shard())
    old, new = (b.buffer.view(np.int64) for b in (box, whole))
    [at] = np.nonzero(old != new)
    header = len(segment.words)
    at = at[at >= header]
    assert len(at) >= 4
    for _ in range(50):
        left = box.copy()
        words = left.buffer.view(np.int64)
        some = at[rng.random(len(at)) < rng.random()]
        words[some] = new[some]
        half = left.shard().segment
        half.withdraws = half.writing = flip + 1
        heir = left.heir()
        withdraw(heir)
        assert state(heir) == wanted
        assert flip_of_round(heir.segment, RUN, 2) is None
