"""A copy that gets states has the bits of its shard, whatever happened to that one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from daskps.consistency import ASP, BSP
from daskps.errors import LayoutError, ProtocolError
from daskps.init import constant
from daskps.kernels.row_index import NoRoomError, RowIndex
from daskps.layout.arrays import Layout, compute_dtype
from daskps.layout.slots import PerRow
from daskps.layout.spans import CANDIDATES, COUNTS, IDS
from daskps.layout.tables import UnboundedIds
from daskps.limits import MOST_PUSHED_ROWS
from daskps.shards import producers, states
from daskps.shards.arrays.operations import TILE
from daskps.shards.frozen import LiveShard
from daskps.shards.installation import Counted, Installation
from daskps.shards.memory import areas, growth, publication, undo
from daskps.shards.memory import segment as segment_
from daskps.shards.memory.format import ENDED, GENERATION, ROUNDS
from daskps.shards.memory.format import RUN as RUN_AT
from daskps.shards.memory.publication import is_possible
from daskps.shards.memory.room import Own
from daskps.shards.memory.segment import Segment
from daskps.shards.shard import Shard
from daskps.shards.states import Mark, State
from daskps.shards.steps import (
    ADD,
    ASSIGN,
    GRADIENT,
    MODEL,
    REMOVE,
    Item,
    Ready,
    Step,
)
from tests.invariants import validate
from tests.kernels.compiling import kept
from tests.shards import rowing, unbounded_rowing
from tests.shards.making import RUN, Momentum, send
from tests.shards.rowing import AddingRows
from tests.shards.stating import content, spans_of, used
from tests.shards.storing import Stores, put
from tests.shards.unbounded_storing import Noting, watched_unbounded

ARRAYS = Layout.build(
    {
        "w": ((TILE + 50,), "float32"),
        "h": ((300,), "float16"),
        "c": ((70,), "int64"),
        "z": ((0,), "float64"),
        "b": ((1,), "float64"),
    },
    1,
)
#: Slots of the pieces that have a rule.
ARRAY_SLOTS = {0: (0.5,), 1: (0.0,), 4: (0.25,)}
SIZES = [piece.size for piece in ARRAYS.pieces[0]]
DTYPES = [piece.parameter.dtype for piece in ARRAYS.pieces[0]]
RULED = (0, 1, 3)


def filled(shard: Shard, like: Segment, between: Callable[[], None]) -> Mark:
    """Fill a copy part by part while the shard goes on; return when it began."""
    mark = states.follow(shard.segment)
    live, counts = LiveShard(shard.segment), Counted.of(shard.segment, mark.flip)
    into, parts = Installation(like), dict[Any, Any]()
    for (_, area), span in spans_of(shard.segment, live):
        parts[area, span.position] = span, np.ascontiguousarray(live.get(span))
        between()
    for position, table in enumerate(like.tables, len(like.pieces)):
        if table.unbounded is not None:
            ids, *counted = (
                parts.pop((area, position))[1] for area in (IDS, CANDIDATES, COUNTS)
            )
            into.begin_table(position, ids, np.array(counted))
    for span, values in parts.values():
        into.put(span, values)
    counts.put(like)
    return mark


class Copy:
    """A copy of a shard, and the moment that it has."""

    def __init__(
        self,
        shard: Shard,
        new: Callable[[], Segment],
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self.shard, self.new, self.segment = shard, new, new()
        self.mark = filled(shard, self.segment, between)
        self.n = self.n_lost = 0
        #: Has a state come to its place first, as the bytes of a socket do.
        self.come: Callable[[State], State] = lambda state: state

    def follow(self) -> int:
        """Bring it up to date; return how many publications that were."""
        was, state = self.mark, states.take(self.shard.segment, self.mark)
        if state is None:
            # A feed has lost the past: the copy is filled anew.
            self.n_lost += 1
            self.segment = self.new()
            self.mark = filled(self.shard, self.segment, lambda: None)
            state = states.take(self.shard.segment, self.mark)
            assert state is not None
        states.install(self.segment, self.come(state))
        self.mark, self.n = state.now, self.n + 1
        self.check()
        return self.mark.flip - was.flip

    def check(self) -> None:
        one, two = self.shard.segment, self.segment
        assert content(one, one.flip) == content(two, two.flip)
        # No memory stays for rounds that nobody takes back any more.
        assert two.n_sides == 1 + (two.is_durable or self.shard.run_state.is_bsp)
        assert used(one) == used(two)


class Story:
    """Whatever may happen to a shard of arrays, drawn at random."""

    def __init__(self, shard: Shard, rng: np.random.Generator) -> None:
        self.shard, self.rng = shard, rng
        self.sequence, self.run = 0, RUN
        self.producers = [1, 2, 3]

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
                start = int(self.rng.integers(0, size + 1))
                n = int(self.rng.integers(0, size - start + 1))
            found.append(Item(position, start, self.array(position, n, kind)))
        return found

    def push(self) -> Step:
        kind = (GRADIENT, ADD, ASSIGN)[self.rng.integers(3)]
        self.sequence += 1
        by = int(self.rng.choice(self.producers))
        items = self.items(kind, whole=False)
        return Step(kind, items, producer=by, sequence=self.sequence)

    def pushes(self) -> None:
        done = send(self.shard, *(self.push() for _ in range(self.rng.integers(1, 4))))
        assert all(isinstance(t.outcome, Ready) for t in done)

    def closing(self) -> None:
        producers.close_producers(self.shard.segment, self.producers[:1])
        self.producers = [*self.producers[1:], self.producers[-1] + 1]

    def beginning(self, policy: Any, n: int) -> None:
        self.run += 1
        self.shard.begin_run(self.run, policy, n, reset=self.run % 2 == 0)

    def tick(self, rank: int, clock: int, kind: str = GRADIENT) -> Step:
        items = self.items(kind, whole=self.shard.run_state.is_bsp)
        place: Any = {"run": self.run, "rank": rank, "clock": clock, "sequence": clock}
        return Step(kind, items, tick=True, weight=1.0 + rank, **place)

    def ticks(self, clock: int, *ranks: int, kind: str = GRADIENT) -> None:
        send(self.shard, *(self.tick(rank, clock, kind) for rank in ranks))

    def events(self) -> Iterator[Any]:
        """Runs of all policies, and what comes between them."""
        shard = self.shard
        yield from [self.pushes, self.closing, self.pushes, self.pushes]
        yield lambda: self.beginning(ASP(), 2)
        for clock in range(3):
            yield lambda c=clock: self.ticks(c, 0, 1)
        yield lambda: shard.finish_rank(self.run, 1)
        yield lambda: self.ticks(3, 0)
        yield lambda: shard.end_run(self.run, "over")
        yield self.pushes
        for kind, back in ((GRADIENT, 0), (GRADIENT, 1), (MODEL, 1)):
            yield lambda: self.beginning(BSP(), 3)
            for clock in range(4):
                for rank in range(3):
                    yield lambda r=rank, c=clock, k=kind: self.ticks(c, r, kind=k)
                yield self.closing
            yield lambda: shard.hold_run(self.run)
            more = {"rounds": 4 - back, "version": 1_000}
            yield lambda m=more: shard.end_run(self.run, "over", **m)
            yield from [self.pushes, self.pushes]


def placed(copy: Copy, rng: np.random.Generator, state: State) -> State:
    """Bring a state to its place, often after one that came in part; return it there."""
    segment = copy.segment
    before = content(segment, segment.flip), used(segment)
    run, rounds = segment.current.fixed[[RUN_AT, ROUNDS]]
    could = is_possible(segment)
    last = could and content(segment, segment.flip - 1)
    for is_whole in (False, True):
        there = states.receive(segment, state)
        pairs = zip(there.pieces, state.pieces, strict=True)
        for (*_, weights, slots), (*_, values, theirs) in pairs:
            for into, array in zip((weights, *slots), (values, *theirs), strict=True):
                if into is not array:
                    into[: None if is_whole else rng.integers(len(into) + 1)] = (
                        array if is_whole else 77
                    )
        assert (content(segment, segment.flip), used(segment)) == before
        # Nobody goes back to what was written over.
        assert is_possible(segment) == (could and there is state)
        words = state.words[0][1]
        if could and words[RUN_AT] == run and words[ROUNDS] < rounds:
            assert there is state
            assert content(segment, segment.flip - 1) == last
    return there


@pytest.mark.parametrize("comes", [False, True], ids=["whole", "to its place"])
@pytest.mark.parametrize("durable", [False, True], ids=["private", "durable"])
@pytest.mark.parametrize("how", ["together", "apart", "past the caches"])
@pytest.mark.parametrize("every", [1, 3])
def test_arrays_have_the_bits_of_their_shard(
    durable, how, every, comes, rng, monkeypatch
):
    """After each event, or after some: then several publications are one state."""
    monkeypatch.setattr(segment_, "TOGETHER_NBYTES", 2**30 if how == "together" else 0)
    if how == "past the caches":
        monkeypatch.setattr(publication, "PAST_NBYTES", 0)
    segment = Segment(ARRAYS, 0, ARRAY_SLOTS, durable=durable)
    segment.words[GENERATION] = 1
    shard = Shard(segment, dict.fromkeys(ARRAY_SLOTS, Momentum()), cache_dir=kept())
    story = Story(shard, rng)
    story.pushes()
    new = partial(Segment, ARRAYS, 0, ARRAY_SLOTS, durable=durable or not comes)
    copy = Copy(shard, new, story.pushes)
    if comes:
        copy.come = partial(placed, copy, rng)
    withdrawable, has_before = 0, False
    for event in story.events():
        event()
        if every > 1 and rng.random() < 1 - 1 / every:
            continue
        n, has_last = copy.follow(), is_possible(segment)
        has_before = n == 1 or (n == 0 and has_before)
        if has_before and has_last:
            # The round before is there too, to go back to.
            assert is_possible(copy.segment)
            withdrawable += 1
        if n == 1 and durable and segment.writing == segment.flip:
            before = [s.flip - 1 for s in (segment, copy.segment)]
            assert content(segment, before[0]) == content(copy.segment, before[1])
    copy.follow()
    assert withdrawable >= (9 if every == 1 else 0)


def test_a_state_has_the_elements_that_changed():
    """Not all of a large piece where pushes changed a few, since the last state."""
    n = 100_000
    layout = Layout.build({"w": ((n,), "float32")}, 1)
    segment = Segment(layout, 0, {0: (0.5,)}, durable=True)
    segment.words[GENERATION] = 1
    shard = Shard(segment, {0: Momentum()}, cache_dir=kept())
    copy = Copy(shard, partial(Segment, layout, 0, {0: (0.5,)}, durable=True))

    def parts(*spans: tuple[int, int]) -> list[tuple[int, int]]:
        for start, stop in spans:
            item = Item(0, start, np.ones(stop - start, "f4"))
            number = int(segment.current.version) + 1
            applied(shard, Step(GRADIENT, [item], producer=1, sequence=number))
        state = states.take(segment, copy.mark)
        assert state is not None
        copy.follow()
        return [(of.start, of.start + len(of.weights)) for of in state.pieces]

    assert parts((7, 9)) == [(0, n)]  # nobody has noted any yet
    assert parts((7, 9)) == [(7, 9)]
    assert parts((50, 60), (3, 4), (20, 21)) == [(3, 60)]
    assert parts((n - 1, n)) == [(n - 1, n)]
    assert parts((1, 2), (0, n), (1, 2)) == [(0, n)]
    assert parts() == []


#: An array, a bounded table, an unbounded one with a rule and one of integers without.
TABLE_SLOTS = {0: (0.5,), 1: (0.25,), 2: (0.25, PerRow(0.25))}
IDS_FROM, IDS_TO = -50, 50


def tables_of(**policy: int) -> Layout:
    unbounded = UnboundedIds(constant(3.0), 5, 256, **policy)
    tables: dict[str, Any] = {
        "bounded": (40, 3, "float32"),
        "emb": (0, 2, "float32", unbounded),
        "num": (0, 1, "int64", unbounded),
    }
    return Layout.build({"w": ((6,), "float32")}, 1, tables)


def with_tables(layout: Layout) -> Shard:
    segment = Segment(layout, 0, TABLE_SLOTS, durable=True)
    segment.words[GENERATION], segment.memory = 1, Own()
    rules: Any = dict.fromkeys((0, 1, 2), AddingRows())
    return Shard(segment, rules, cache_dir=kept())


def random_step(rng: np.random.Generator, sequence: int, kind: str = "") -> Step:
    kind = kind or (GRADIENT, GRADIENT, ADD, ASSIGN, REMOVE)[rng.integers(5)]
    items = []
    if kind != REMOVE and rng.random() < 0.4:
        items.append(Item(0, 0, rng.integers(0, 9, 6).astype("f4")))
    if kind != REMOVE and rng.random() < 0.6:
        ids = np.sort(rng.permutation(40)[: rng.integers(0, 6)])
        data = rng.integers(0, 9, 3 * len(ids)).astype("f4")
        items.append(Item(1, 0, data, ids))
    for position, dim, dtype in ((2, 2, "f4"), (3, 1, "i8")):
        if (kind == GRADIENT and position == 3) or rng.random() < 0.4:
            continue
        ids = np.unique(rng.integers(IDS_FROM, IDS_TO, rng.integers(0, 8)))
        data = rng.integers(0, 9, dim * len(ids)).astype(dtype)
        items.append(Item(position, 0, data[: 0 if kind == REMOVE else None], ids))
    return Step(kind, items, producer=1, sequence=sequence)


POLICIES: dict[str, dict[str, int]] = {
    "any": {},
    "in their time": {"ttl": 7},
    "at most so many": {"max_rows": 24},
    "in their time and at most so many": {"max_rows": 24, "ttl": 9},
    "after some pushes": {"admit_after": 3},
    "all of it": {"max_rows": 24, "ttl": 9, "admit_after": 2},
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("history", range(4))
def test_rows_have_the_bits_of_their_shard(policy, history):
    rng = np.random.default_rng(history)
    shard = with_tables(tables_of(**policy))
    for n in range(1, 20):
        applied(shard, random_step(rng, n))
    numbers = itertools.count(20)

    def go_on() -> None:
        applied(shard, random_step(rng, next(numbers)))

    copy = Copy(shard, lambda: with_tables(tables_of(**policy)).segment, go_on)
    # Producers come with the first state.
    copy.follow()
    for _ in range(100):
        go_on()
        if rng.random() < 0.45:
            copy.follow()
            validate(Shard(copy.segment, {}, cache_dir=kept()))
    assert copy.n > 20
    assert copy.n_lost == 0
    # A shard that goes on from the copy gets the same rows.
    rules: Any = dict.fromkeys((0, 1, 2), AddingRows())
    heir = Shard(copy.segment, rules, cache_dir=kept())
    copy.follow()
    for _ in range(40):
        step = random_step(rng, next(numbers))
        applied(shard, step)
        applied(heir, step)
        copy.check()


class Looks:
    """Copies of a shard that follow it, most of the time, and begin at any time."""

    def __init__(self, shard: Shard, layout: Layout, rng: np.random.Generator) -> None:
        self.shard, self.layout, self.rng = shard, layout, rng
        self.copies: list[Copy] = []

    def look(self) -> None:
        """Bring copies up to date; begin one where nobody has asked for long."""
        for copy in self.copies:
            if self.rng.random() < 0.9:
                copy.follow()
        if self.rng.random() < 0.4:
            for table in self.shard.segment.tables:
                table.feed.stop()
            new = partial(with_tables, self.layout)
            self.copies.append(Copy(self.shard, lambda: new().segment))

    def take_back(self, run: int, rounds: int) -> int:
        """Have those that can take a round back themselves; return how many."""
        last = self.shard.segment.flip - 1
        could = [
            copy
            for copy in self.copies
            if copy.mark.flip == last and is_possible(copy.segment)
        ]
        for copy in could:
            heir = Shard(copy.segment, {}, cache_dir=kept())
            heir.end_run(run, "over", rounds=rounds)
            copy.check()
            self.copies.remove(copy)
        return len(could)


@pytest.mark.parametrize("policy", ["any", "all of it"])
@pytest.mark.parametrize("history", range(2))
def test_rows_of_rounds_that_are_taken_back_have_the_bits_of_their_shard(
    policy, history
):
    """Copies begin before the round that goes, as it is there, or once it has gone."""
    rng = np.random.default_rng(history)
    layout, numbers = tables_of(**POLICIES[policy]), itertools.count(1)
    shard = with_tables(layout)
    for _ in range(9):
        applied(shard, random_step(rng, next(numbers)))
    n_back = n_heirs = 0
    for run in range(RUN, RUN + 12):
        copies = Looks(shard, layout, rng)
        shard.begin_run(run, BSP(), 1, reset=False)
        n = int(rng.integers(1, 5))
        for clock in range(n):
            copies.look()
            step = random_step(rng, clock, kind=GRADIENT)
            place: dict[str, Any] = {"run": run, "rank": 0, "clock": clock}
            applied(shard, step._replace(producer=0, tick=True, **place))
        copies.look()
        shard.hold_run(run)
        back = int(is_possible(shard.segment) and rng.random() < 0.7)
        shard.end_run(run, "over", rounds=n - back)
        n_back += back
        n_heirs += copies.take_back(run, n - back) if back else 0
        copies.look()
        applied(shard, random_step(rng, next(numbers)))
        for copy in copies.copies:
            copy.follow()
            validate(Shard(copy.segment, {}, cache_dir=kept()))
    assert n_back > 4
    assert n_heirs > 0


def applied(shard: Shard, step: Step) -> None:
    (ticket,) = send(shard, step)
    assert isinstance(ticket.outcome, Ready), ticket.outcome


def test_a_reset_of_rows_sends_all_of_them(monkeypatch):
    """No entry of a feed has slots; of too many rows the copy is filled anew."""
    layout = tables_of()
    shard = with_tables(layout)
    rng = np.random.default_rng(0)
    for n in range(9):
        applied(shard, random_step(rng, n))
    copy = Copy(shard, lambda: with_tables(layout).segment)
    copy.follow()
    shard.begin_run(RUN, ASP(), 1, reset=True)
    mark = copy.mark
    for _ in range(2):
        # Also where the first of two states did not come: the version is the same.
        copy.mark = mark
        copy.follow()
        assert copy.n_lost == 0
    monkeypatch.setattr(states, "MOST_PUSHED_ROWS", 39)
    assert states.take(shard.segment, mark) is None
    copy.mark = mark
    copy.follow()
    assert copy.n_lost == 1


def test_ids_that_went_unseen_go():
    """A feed that was off says nothing of them: all that there are come, and no others."""
    layout = tables_of(admit_after=2)
    shard = with_tables(layout)
    ids = np.arange(6)
    for n in range(3):
        some = ids[: 6 - n]
        data = np.ones(len(some), np.int64)
        applied(shard, Step(ADD, [Item(3, 0, data, some)], producer=1, sequence=n))
    copy = Copy(shard, lambda: with_tables(layout).segment)
    copy.follow()
    shard.segment.tables[2].feed.stop()
    gone = Item(3, 0, np.empty(0, np.int64), np.array([1, 5]))
    applied(shard, Step(REMOVE, [gone], producer=1, sequence=3))
    copy.follow()
    of = copy.segment.tables[2].unbounded
    assert of is not None
    assert of.ids(0)[0].tolist() == [0, 2, 3, 4]
    assert copy.n_lost == 0


def test_a_fence_comes_along():
    shard = Shard(Segment(ARRAYS, 0, ARRAY_SLOTS, durable=True), {})
    shard.segment.words[GENERATION] = 1
    copy = Copy(shard, lambda: Segment(ARRAYS, 0, ARRAY_SLOTS, durable=True))
    shard.begin_run(RUN, BSP(), 2)
    copy.follow()
    shard.segment.fence(3)
    assert copy.follow() == 0
    assert copy.segment.limit == 3
    shard.end_run(RUN, "over")
    copy.follow()
    assert copy.segment.header[ENDED] == RUN


# -- killed after any store ------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little memory to begin with, and an index that has to grow."""
    monkeypatch.setattr(areas, "FIRST_NBYTES", 64)
    monkeypatch.setattr(growth, "_LEAST_NBYTES", 64)
    monkeypatch.setattr(areas, "MOST_PUSHED_ROWS", 16)
    monkeypatch.setattr(areas, "FEWEST_SLOTS", 16)
    monkeypatch.setattr(growth, "_COPIED", 2)
    monkeypatch.setattr(growth, "_COPIED_AN_ID", 1)


def array_of(shard: Shard, sequence: int) -> Step:
    """A push to all arrays of a shard."""
    items = [
        Item(at, 0, np.full(size, sequence, np.float32))
        for at, size in enumerate(shard.segment.sizes)
    ]
    return Step(GRADIENT, items, producer=2, sequence=sequence)


UNBOUNDED: dict[str, tuple[dict[str, int], list[Any]]] = {
    "rows that come": ({}, [(ADD, {1: [(5, 1), (-1, 2)], 2: [(5, 3)]})]),
    "rows that go and come": (
        {},
        [
            (REMOVE, {1: [(0, 0), (77, 0)], 2: [(0, 0)]}),
            (GRADIENT, {1: [(8, 1), (5, 2), (2**62, 3)]}),
        ],
    ),
    "at most so many": (
        {"max_rows": 3, "admit_after": 2},
        [(GRADIENT, {1: [(i, 1) for i in range(6)]})] * 2,
    ),
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("policy", "pushes"), UNBOUNDED.values(), ids=UNBOUNDED)
def test_killed_after_any_store_of_an_install(policy, pushes):
    layout = unbounded_rowing.layout_of(room=24, **policy)
    shard = unbounded_rowing.made(layout)
    first = [(ADD, {1: [(0, 4), (77, 1)], 2: [(0, 3)]})] * 2
    for n, (kind, named) in enumerate(first):
        applied(shard, unbounded_rowing.step(shard, kind, named, n))
    copy = Copy(shard, lambda: unbounded_rowing.made(layout).segment)
    copy.follow()
    for n, (kind, named) in enumerate(pushes, 2):
        applied(shard, unbounded_rowing.step(shard, kind, named, n))
    applied(shard, array_of(shard, 1))
    killed(copy, lambda buffer: unbounded_rowing.made(layout, 0, buffer).segment)


def test_killed_after_any_store_of_rows_and_arrays():
    shard = rowing.make(durable=True)
    applied(shard, array_of(shard, 1))
    copy = Copy(shard, lambda: rowing.make(durable=True).segment)
    copy.follow()
    for sequence in (2, 3):
        items = [
            Item(1, 0, np.full(9, 2.0, np.float32), np.array([0, 7, 30 + sequence])),
            Item(2, 0, np.full(4, 3, np.int64), np.array([1, sequence])),
        ]
        applied(shard, Step(ADD, items, producer=1, sequence=sequence))
        applied(shard, array_of(shard, sequence))
    killed(copy, lambda b: Segment(rowing.LAYOUT, 0, rowing.SLOTS, b, durable=True))


def killed(copy: Copy, at: Callable[[Any], Segment]) -> None:
    """Look at what every store of an install leaves, and go on from there."""
    state = states.take(copy.shard.segment, copy.mark)
    assert state is not None
    segment = copy.segment
    before = content(segment, segment.flip), used(segment)
    after = (
        content(copy.shard.segment, copy.shard.segment.flip),
        used(copy.shard.segment),
    )
    with watched_install(segment) as stores:
        states.install(segment, state)
    seen, found = set[bytes](), [0, 0]
    for _, buffer in stores.states:
        if (raw := buffer.tobytes()) in seen:
            continue
        seen.add(raw)
        left = at(buffer)
        undo.roll_back(left)
        has = content(left, left.flip), used(left)
        assert has in (before, after)
        found[has == after] += 1
        states.install(left, state)
        assert (content(left, left.flip), used(left)) == after
    assert min(found) > 0
    assert sum(found) > 50


@contextmanager
def watched_install(segment: Segment) -> Iterator[Stores]:
    """Note every store of an install."""
    with watched_unbounded(segment) as stores, pytest.MonkeyPatch.context() as patch:

        def scatter(
            w: Any, rows: Any, values: Any, *, first: int = 0, **_: Any
        ) -> None:
            for row, value in zip(rows, values, strict=True):
                put(w[row - first], value, stores, "slots of a row")

        def write(out: Any, values: Any) -> None:
            put(out, values, stores, "weight")

        patch.setattr(states, "scatter", scatter)
        segment.payload = segment.payload._replace(write=write)
        for record in segment.records:
            record.words = Noting(record.words, stores, "record")  # type: ignore[assignment]  # as the words
        yield stores


# -- bad input -------------------------------------------------------------------------


def state_of_tables(n: int = 3) -> tuple[State, Segment]:
    """A state of a shard with tables, and a copy that it fits."""
    layout = tables_of()
    shard = with_tables(layout)
    copy = Copy(shard, lambda: with_tables(layout).segment)
    rng = np.random.default_rng(0)
    for sequence in range(n):
        applied(shard, random_step(rng, sequence))
        applied(shard, array_of(shard, sequence))
    state = states.take(shard.segment, copy.mark)
    assert state is not None
    return state, copy.segment


def piece_with(state: State, **other: Any) -> State:
    return replace(state, pieces=[state.pieces[0]._replace(**other)])


def rows_with(state: State, **other: Any) -> State:
    return replace(state, tables=[state.tables[0]._replace(**other)])


MALFORMED: dict[str, Callable[[State], State]] = {
    "a piece that is not there": lambda s: piece_with(s, position=1),
    "a piece before the first": lambda s: piece_with(s, position=-1),
    "other weights": lambda s: piece_with(s, weights=np.zeros(5, np.float32)),
    "a part behind its end": lambda s: piece_with(s, start=1),
    "a part before its beginning": lambda s: piece_with(s, start=-1),
    "another dtype": lambda s: piece_with(s, weights=np.zeros(6)),
    "no slots": lambda s: piece_with(s, slots=()),
    "a table that is not there": lambda s: rows_with(s, ordinal=3),
    "a table before the first": lambda s: rows_with(s, ordinal=-1),
    "ids outside": lambda s: rows_with(s, ids=s.tables[0].ids + 40),
    "fewer rows": lambda s: rows_with(s, rows=s.tables[0].rows[:-1]),
    "fewer slots": lambda s: rows_with(s, slots=()),
    "another kind of table": lambda s: rows_with(s, known=s.tables[1].known),
    "a short record": lambda s: replace(s, words=[(0, s.words[0][1][:-1])]),
    "words behind the record": lambda s: replace(
        s, words=[s.words[0], (10**6, np.zeros(3, np.int64))]
    ),
    "another header": lambda s: replace(s, header=s.header[:-1]),
}


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED)
def test_a_state_that_does_not_fit_changes_nothing(change):
    state, segment = state_of_tables()
    assert state.tables[0].ordinal == 0
    before = segment.buffer.tobytes()
    with pytest.raises(ProtocolError, match="none of this shard"):
        states.install(segment, change(state))
    assert segment.buffer.tobytes() == before
    states.install(segment, state)


def test_more_rows_than_one_publication_takes_change_nothing(monkeypatch):
    monkeypatch.setattr(areas, "MOST_PUSHED_ROWS", 4)
    layout = tables_of()
    shard = with_tables(layout)
    copy = Copy(shard, lambda: with_tables(layout).segment)
    for sequence, first in enumerate((0, 10)):
        ids = np.arange(first, first + 3)
        item = Item(1, 0, np.ones(9, np.float32), ids)
        applied(shard, Step(ADD, [item], producer=1, sequence=sequence))
    state = states.take(shard.segment, copy.mark)
    assert state is not None
    assert len(state.tables[0].ids) == 6
    segment = copy.segment
    before = content(segment, segment.flip)
    with pytest.raises(LayoutError, match="6 rows of table 'bounded' in one state"):
        states.install(segment, state)
    assert content(segment, segment.flip) == before


def test_more_words_of_an_index_than_its_log_takes_change_nothing(monkeypatch):
    """The copy is as it was, and may have the state in another way."""
    layout = tables_of(admit_after=2)
    shard = with_tables(layout)
    copy = Copy(shard, lambda: with_tables(layout).segment)
    for sequence in range(3):
        item = Item(3, 0, np.ones(4, np.int64), np.arange(sequence, sequence + 4))
        applied(shard, Step(ADD, [item], producer=1, sequence=sequence))
    state, segment = states.take(shard.segment, copy.mark), copy.segment
    assert state is not None
    before = content(segment, segment.flip)

    def is_full(*args: Any) -> int:
        raise NoRoomError("log")

    with monkeypatch.context() as patch:
        patch.setattr(RowIndex, "set_counts", is_full)
        with pytest.raises(LayoutError, match=r"rows of table 'num'.* fill the copy"):
            states.install(segment, state)
    assert content(segment, segment.flip) == before
    validate(Shard(segment, {}, cache_dir=kept()))
    copy.follow()


@pytest.mark.parametrize("policy", [{"max_rows": 2**16}, {"ttl": 9}])
def test_a_copy_has_room_for_the_rows_of_a_push(policy):
    """It was filled with them: their last pushes alone are more words than its log has."""
    ids = UnboundedIds(constant(3.0), 5, 2**16, **policy)
    tables: dict[str, Any] = {"num": (0, 1, "int64", ids)}
    layout = Layout.build({}, 1, tables)
    shard, named = with_tables(layout), np.arange(25_000)

    def push(sequence: int) -> None:
        item = Item(0, 0, np.ones(len(named), np.int64), named)
        applied(shard, Step(ADD, [item], producer=1, sequence=sequence))

    push(0)
    copy = Copy(shard, lambda: with_tables(layout).segment)
    push(1)
    copy.follow()


def test_what_has_changed_is_known_of_a_table_that_has_grown(monkeypatch):
    """Else its copy would be filled anew, with the first push of more rows."""
    monkeypatch.setattr(states, "MOST_PUSHED_ROWS", 8_000)
    ids = UnboundedIds(constant(3.0), 5, 2**16)
    tables: dict[str, Any] = {"num": (0, 1, "int64", ids)}
    layout = Layout.build({}, 1, tables)
    shard = with_tables(layout)
    copy = Copy(shard, lambda: with_tables(layout).segment)
    pushes = [(start, 1_000) for start in range(0, 10_000, 1_000)]
    for sequence, (start, n) in enumerate([*pushes, (0, 2_000)]):
        item = Item(0, 0, np.ones(n, np.int64), np.arange(start, start + n))
        applied(shard, Step(ADD, [item], producer=1, sequence=sequence))
        copy.follow()
    assert copy.n_lost == 0


def test_a_copy_follows_the_largest_push_to_a_large_table():
    """It is more than a quarter of the rows, and the table more than one state has."""
    n, layout = MOST_PUSHED_ROWS, Layout.build({}, 1, {"t": (150_000, 1, "float32")})
    shard = with_tables(layout)
    copy = Copy(shard, lambda: with_tables(layout).segment)
    for sequence, start in enumerate((0, 0, 150_000 - n)):
        item = Item(0, 0, np.ones(n, np.float32), np.arange(start, start + n))
        applied(shard, Step(ASSIGN, [item], producer=1, sequence=sequence))
        copy.follow()
    assert copy.n_lost == 0


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_state_of_more_rows_than_a_log_has_comes_in_parts(policy, monkeypatch):
    """To a copy that is none yet; else it could not be filled under large pushes."""
    rng = np.random.default_rng(0)
    layout = tables_of(**policy)
    shard = with_tables(layout)
    copy = Copy(shard, lambda: with_tables(layout).segment)
    for sequence in range(60):
        applied(shard, random_step(rng, sequence))
        if sequence % 20 == 9:
            copy.follow()
    state = states.take(shard.segment, copy.mark)
    assert state is not None
    monkeypatch.setattr(states, "MOST_PUSHED_ROWS", 3)
    n = 0
    for part in states.in_parts(copy.segment, state):
        states.install(copy.segment, part)
        assert all(len(of.ids) <= 3 for of in part.tables)
        n += 1
    assert n > 3
    copy.check()
    validate(Shard(copy.segment, {}, cache_dir=kept()))


def test_its_bytes_are_those_of_what_has_changed():
    shard = Shard(Segment(ARRAYS, 0, ARRAY_SLOTS, durable=True), {})
    shard.segment.words[GENERATION] = 1
    mark = states.follow(shard.segment)
    applied(shard, Step(ADD, [Item(1, 0, np.ones(300, np.float16))], producer=1))
    state = states.take(shard.segment, mark)
    assert state is not None
    words = state.nbytes - 300 * (2 + 4)
    assert 0 < words <= 4096
