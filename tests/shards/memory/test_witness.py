"""What a witness is told is enough to follow a shard, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskps.consistency import ASP, BSP
from daskps.layout.arrays import Layout, compute_dtype
from daskps.shards import producers
from daskps.shards.arrays.operations import (
    TILE,
    PieceBuffers,
    PieceUpdate,
    run_operations,
)
from daskps.shards.deputy import OPEN, READING, NotHereError, gate_of
from daskps.shards.memory import publication
from daskps.shards.memory import segment as segment_
from daskps.shards.memory.areas import HEADER
from daskps.shards.memory.format import FENCED, GENERATION, LIMIT, Record
from daskps.shards.memory.publication import Publication
from daskps.shards.memory.segment import Segment
from daskps.shards.memory.witness import Change
from daskps.shards.shard import Shard
from daskps.shards.steps import (
    ADD,
    ASSIGN,
    GRADIENT,
    MODEL,
    Item,
    Ready,
    Step,
    Ticket,
)
from tests.invariants import validate
from tests.shards.making import RUN, Momentum, contents, failed, send

LAYOUT = Layout.build(
    {
        "w": ((TILE + 50,), "float32"),
        "h": ((300,), "float16"),
        "c": ((70,), "int64"),
        "z": ((0,), "float64"),
        "b": ((1,), "float64"),
    },
    1,
)
SIZES = [piece.size for piece in LAYOUT.pieces[0]]
DTYPES = [piece.parameter.dtype for piece in LAYOUT.pieces[0]]
#: Positions that have a rule, and with how many slots; "c" has none.
SLOTS = {0: (0.5,), 1: (0.0,), 4: (0.25,)}
RULED = (0, 1, 3)


def primary(durable: bool) -> Shard:
    segment = Segment(LAYOUT, 0, SLOTS, durable=durable)
    segment.words[GENERATION] = 1
    return Shard(segment, dict.fromkeys(SLOTS, Momentum()))


class Follower:
    """A copy of a shard: blocks of it, and what its witness was told since.

    What it is told it has prepared; it puts that in force when it hears of what comes
    next, which is also how it learns that the shard did.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard, self.of = shard, shard.segment
        self.segment = Segment(LAYOUT, 0, SLOTS, durable=True)
        #: Elements of each piece that it has.
        self.done = [0] * len(SIZES)
        for mine, its in zip(self.segment.records, self.of.records, strict=True):
            mine.words[:] = its.words
        self.segment.flip = self.of.flip
        self.kinds: set[str] = set()
        shard.watch(self.see)

    def copy(self, position: int, n: int) -> None:
        """Take the next block of a piece: both buffers, weights and slots."""
        lo = self.done[position]
        self.done[position] = hi = min(lo + n, SIZES[position])
        for side in (0, 1):
            mine, its = self.segment.weights[side], self.of.weights[side]
            mine[position][lo:hi] = its[position][lo:hi]
            slots = self.segment.slots[side][position], self.of.slots[side][position]
            for own, other in zip(*slots, strict=True):
                own[lo:hi] = other[lo:hi]

    def see(self, change: Change) -> None:
        segment = self.segment
        # Nothing of it has taken effect.
        assert self.of.flip == change.flip - (change.record is not None)
        if change.record is None:
            self.put_in_force(change.flip)
            into = segment.header if change.area == HEADER else segment.current.plain
            for at, value in change.words:
                into[at] = value
            self.kinds.add(change.area)
            return
        self.put_in_force(change.flip - 1)
        record = segment.record(change.flip)
        base = record if change.withdraws else segment.current
        was = base.weight_sides.tolist(), base.slot_sides.tolist()
        new = Record(change.record.copy(), len(SIZES))
        operations: dict[int, list[Any]] = {}
        for position, operation in change.operations:
            mine = operation.within(0, self.done[position])
            operations.setdefault(position, []).append(mine)
        for position in range(len(SIZES)):
            weights = was[0][position], new.weight_sides[position]
            slots = was[1][position], int(new.slot_sides[position])
            given = operations.get(position, [])
            self.change(position, weights, slots, given, change.resets)
        record.words[:] = new.words
        self.kinds |= {
            name for name in ("resets", "withdraws") if getattr(change, name)
        }

    def change(self, position, weights, slots, given, resets) -> None:
        segment = self.segment
        w_in, w_out = (segment.weights[side][position] for side in weights)
        before, after = (segment.slots[side][position] for side in slots)
        if resets:
            for slot, value in zip(after, segment.slot_init[position], strict=True):
                slot[:] = value
            before = after
        if slots[0] == slots[1]:
            before = after
        if given:
            assert weights[0] != weights[1]
            bound = any(operation.binding is not None for operation in given)
            target = PieceBuffers(w_in, w_out, before, after)
            if not bound:
                target = PieceBuffers(w_in, w_out, (), ())
            run_operations(given, target, large=False)
            if bound:
                return
        elif weights[0] != weights[1]:
            w_out[:] = w_in
        if before is not after:
            for slot, out in zip(before, after, strict=True):
                out[:] = slot

    def put_in_force(self, flip: int) -> None:
        assert flip in (self.segment.flip, self.segment.flip + 1)
        self.segment.flip = flip

    def check(self) -> None:
        """It has the same bits as the shard, as far as it has copied."""
        if self.of.flip != self.segment.flip:
            self.put_in_force(self.of.flip)
        # Of the records all that counts: rows that are used.
        for flip in (self.of.flip, self.of.flip - 1):
            one, two = self.of.record(flip), self.segment.record(flip)
            np.testing.assert_array_equal(one.words, two.words)
        for at in (LIMIT, FENCED):
            assert self.of.words[at] == self.segment.words[at]
        for position, n in enumerate(self.done):
            for side in (0, 1):
                mine = self.segment.weights[side][position][:n]
                its = self.of.weights[side][position][:n]
                assert mine.tobytes() == its.tobytes()
                slots = (
                    self.segment.slots[side][position],
                    self.of.slots[side][position],
                )
                for own, other in zip(*slots, strict=True):
                    assert own[:n].tobytes() == other[:n].tobytes()


class Story:
    """Whatever may happen to a shard, drawn at random."""

    def __init__(self, shard: Shard, rng: np.random.Generator) -> None:
        self.shard, self.rng = shard, rng
        self.sequence = 0
        self.run = RUN
        self.producers: list[int] = [1, 2, 3]

    def array(self, position: int, n: int, kind: str) -> Any:
        dtype = DTYPES[position]
        if kind in (GRADIENT, MODEL):
            dtype = compute_dtype(dtype)
        if dtype == "int64":
            return self.rng.integers(-5, 5, n)
        return self.rng.standard_normal(n).astype(dtype)

    def items(self, kind: str, *, whole: bool) -> list[Item]:
        found = []
        for position, size in enumerate(SIZES):
            fits = kind not in (GRADIENT, MODEL) or position in RULED
            if self.rng.random() < 0.3 or not fits:
                continue
            start, n = 0, size
            if not whole and self.rng.random() < 0.5:
                start = int(self.rng.integers(0, size))
                n = int(self.rng.integers(0, size - start + 1))
            found.append(Item(position, start, self.array(position, n, kind)))
        return found

    def push(self) -> Step:
        kind = (GRADIENT, ADD, ASSIGN)[self.rng.integers(3)]
        self.sequence += 1
        return Step(
            kind,
            self.items(kind, whole=False),
            producer=int(self.rng.choice(self.producers)),
            sequence=self.sequence,
        )

    def pushes(self) -> None:
        done = send(self.shard, *(self.push() for _ in range(self.rng.integers(1, 4))))
        assert all(isinstance(t.outcome, Ready) for t in done)

    def closing(self) -> None:
        producers.close_producers(self.shard.segment, self.producers[:1])
        self.producers.append(self.producers[-1] + 1)

    def beginning(self, policy: Any, n: int) -> None:
        self.run += 1
        self.shard.begin_run(self.run, policy, n, reset=self.run % 2 == 0)
        validate(self.shard)

    def tick(self, rank: int, clock: int, kind: str = GRADIENT) -> Step:
        items = self.items(kind, whole=self.shard.run_state.is_bsp)
        place: Any = {"run": self.run, "rank": rank, "clock": clock, "sequence": clock}
        return Step(kind, items, tick=True, weight=1.0 + rank, **place)

    def events(self):
        """Runs of all policies, and what comes between them."""
        yield from [self.pushes, self.closing, self.pushes, self.pushes]
        yield lambda: self.beginning(ASP(), 2)
        for clock in range(3):
            yield lambda c=clock: send(self.shard, self.tick(0, c), self.tick(1, c))
        yield lambda: self.shard.finish_rank(self.run, 1)
        yield lambda: send(self.shard, self.tick(0, 3))
        yield lambda: self.shard.end_run(self.run, "over")
        yield self.pushes
        for kind, back in ((GRADIENT, 0), (GRADIENT, 1), (MODEL, 1)):
            yield lambda: self.beginning(BSP(), 3)
            for clock in range(4):
                for rank in range(3):
                    yield lambda r=rank, c=clock, k=kind: send(
                        self.shard, self.tick(r, c, k)
                    )
                yield self.closing
            yield lambda: self.shard.hold_run(self.run)
            yield lambda b=back: self.shard.end_run(
                self.run,
                "over",
                rounds=4 - b,
                version=self.shard.segment.current.version + 1,
            )
            yield self.pushes
            yield self.pushes


@pytest.mark.parametrize("durable", [False, True], ids=["private", "durable"])
@pytest.mark.parametrize("how", ["together", "apart", "past the caches"])
def test_blocks_and_operations_are_the_shard(durable, how, rng, monkeypatch):
    """Whatever is published, whenever a block is copied."""
    if how == "together":
        monkeypatch.setattr(segment_, "TOGETHER_NBYTES", 2**30)
    if how == "past the caches":
        monkeypatch.setattr(publication, "PAST_NBYTES", 0)
    shard = primary(durable)
    story = Story(shard, rng)
    # History that the follower never saw.
    for _ in range(3):
        story.pushes()
    follower = Follower(shard)
    for event in story.events():
        event()
        position = int(rng.integers(len(SIZES)))
        follower.copy(position, int(rng.integers(SIZES[position] + 1)))
        follower.check()
    for position, size in enumerate(SIZES):
        follower.copy(position, size)
    follower.check()
    story.pushes()
    follower.check()
    assert follower.kinds == {"header", "record", "resets", "withdraws"}


def test_updates_that_are_applied_at_once_are_told_too(rng):
    """Their arrays may be gone by then: the next piece is formed in the same memory."""
    shard = primary(durable=True)
    follower = Follower(shard)
    for position, size in enumerate(SIZES):
        follower.copy(position, size)
    update = Publication(shard.segment)
    for position in RULED:
        data = rng.standard_normal(SIZES[position])
        data = data.astype(compute_dtype(DTYPES[position]))
        update.update(position, Momentum(), data, (0.5, 0.7))
        data[:] = 9.0
    update.finish()
    follower.check()
    assert follower.segment.weights[follower.segment.flip & 1][0][0] != 9.0


class RefusalError(Exception):
    pass


def refuse(change: Change) -> None:
    raise RefusalError


@pytest.mark.parametrize("durable", [False, True], ids=["private", "durable"])
def test_what_a_witness_refuses_does_not_take_effect(durable, rng):
    """Nor is it lost: sent again it counts once, and is told again."""
    shard = primary(durable)
    follower, story = Follower(shard), Story(shard, rng)
    for position, size in enumerate(SIZES):
        follower.copy(position, size)
    for _ in range(5):
        story.pushes()
        step, before = story.push(), contents(shard)
        # Its follower hears of it, its shard does not go on.
        told, heard = shard.segment.witness, list[Change]()

        def hear_and_refuse(change, told=told, heard=heard):
            heard.append(change)
            told(change)
            raise RefusalError

        shard.segment.witness = hear_and_refuse
        assert failed(send(shard, step), RefusalError)
        assert len(heard) == 1
        assert contents(shard) == before
        shard.segment.witness = refuse
        with pytest.raises(RefusalError):
            producers.close_producers(shard.segment, [1])
        assert contents(shard) == before
        shard.segment.witness = told
        (again,) = send(shard, step)
        assert isinstance(again.outcome, Ready)
        assert not again.duplicate
        follower.check()


def test_round_that_a_witness_refuses_ends_the_run_without_it(rng):
    shard = primary(durable=False)
    story = Story(shard, rng)
    story.beginning(BSP(), 1)
    send(shard, story.tick(0, 0))
    before = contents(shard)
    shard.watch(refuse)
    assert failed(send(shard, story.tick(0, 1)), RefusalError)
    assert contents(shard) == before
    assert shard.run_state.find_standing(story.run).is_stuck
    shard.watch(None)
    shard.end_run(story.run, "over", rounds=1)
    validate(shard)
    assert contents(shard)[:2] == before[:2]


def test_deputies_only_read_while_a_shard_is_followed(rng):
    """They would tell nobody."""
    shard = primary(durable=True)
    same = Segment(LAYOUT, 0, SLOTS, shard.segment.buffer, durable=True)
    deputy = Shard.as_deputy(same, dict.fromkeys(SLOTS, Momentum()))
    story = Story(shard, rng)
    shard.watch(lambda change: None)
    assert gate_of(shard.segment) == READING
    ticket = Ticket(story.push())
    deputy.submit([ticket])
    assert isinstance(ticket.outcome, NotHereError)
    shard.watch(None)
    assert gate_of(shard.segment) == OPEN
    deputy.submit([again := Ticket(ticket.step)])
    assert isinstance(again.outcome, Ready)


def test_part_of_an_operation_is_what_lies_in_the_span():
    operation = PieceUpdate(np.arange(5.0), 3)
    for start, stop, first, found in [
        (0, 9, 3, [0, 1, 2, 3, 4]),
        (4, 6, 4, [1, 2]),
        (0, 3, 3, []),
        (0, 0, 3, []),
        (8, 9, 8, []),
        (9, 20, 9, []),
    ]:
        part = operation.within(start, stop)
        assert (part.start, list(part.data[0 : len(part.data)])) == (first, found)


class Formed:
    """An array that is formed two elements at a time, in the same memory."""

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.step, self.tile = data, 2, np.empty(2)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, part: slice) -> np.ndarray:
        found = self.data[part]
        self.tile[: len(found)] = found
        return self.tile[: len(found)]


def test_what_is_formed_part_by_part_is_told_as_one_array():
    array = np.arange(5.0)
    np.testing.assert_array_equal(PieceUpdate(Formed(array)).formed.data, array)
    given = PieceUpdate(array)
    assert given.formed is given
