"""Two shards of a store with tables, whose owners die at any store, beside a plain model.

Pushes come in batches, again, and with what must be refused; a table's steps are equal on
both shards whatever ids a push has.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from daskps.consistency import ASP
from daskps.layout.arrays import Layout
from daskps.layout.slots import PerRow
from daskps.shards.memory.segment import Segment
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, ASSIGN, GRADIENT, Item, Step, Ticket
from tests.invariants import validate
from tests.shards.rowing import KINDS, AddingRows, read, rows
from tests.shards.storing import watched

N_SHARDS, W, EMB, NUM = 2, 0, 1, 2
LAYOUT = Layout.build(
    {"w": ((4,), "float32")},
    N_SHARDS,
    {"emb": (7, 2, "float32"), "num": (3, 1, "int64")},
)
SLOTS = {W: (0.5,), EMB: (0.25, PerRow(0.25))}
LENGTHS, DIMS = {EMB: 7, NUM: 3}, {EMB: 2, NUM: 1}

NAMED = st.lists(st.tuples(st.integers(0, 6), st.integers(-4, 4)), max_size=5)
PUSHES = st.tuples(st.sampled_from(KINDS), NAMED, NAMED, st.booleans())
#: Which store the process does not live to see the end of.
MOMENTS = st.integers(0, 400)


def at(shard: int, buffer: Any = None) -> Shard:
    segment = Segment(LAYOUT, shard, SLOTS, buffer, durable=True)
    rules: Any = {W: AddingRows(), EMB: AddingRows()}
    return Shard(segment, rules)


class Model:
    """What a push comes to: plain arrays, one element at a time."""

    def __init__(self) -> None:
        self.rows = {i: np.zeros((n, DIMS[i])) for i, n in LENGTHS.items()}
        self.slots, self.w = np.full((7, 2), 0.25), np.zeros(4)
        self.w_slot, self.steps = np.full(4, 0.5), {W: 0, EMB: 0, NUM: 0}
        self.version = 0

    def push(self, kind: str, named: dict[int, list[tuple[int, int]]], w: bool) -> None:
        for index, pairs in named.items():
            self._rows(kind, index, pairs)
        if w:
            self.steps[W] += kind == GRADIENT
            if kind == GRADIENT:
                self.w += self.steps[W]
                self.w_slot += self.steps[W]
            else:
                self.w = self.w + 1 if kind == ADD else np.ones(4)
        self.version += bool(named or w)

    def _rows(self, kind: str, index: int, pairs: list[tuple[int, int]]) -> None:
        self.steps[index] += kind == GRADIENT
        sums: dict[int, int] = {}
        for row, value in pairs:
            sums[row] = value if kind == ASSIGN else sums.get(row, 0) + value
        for row, value in sums.items():
            if kind == ASSIGN:
                self.rows[index][row] = value
            elif kind == ADD:
                self.rows[index][row] += value
            else:
                self.rows[index][row] += value * self.steps[index]
                self.slots[row] += self.steps[index]


class Tables(RuleBasedStateMachine):
    """Pushes, repeats, refusals and deaths."""

    def __init__(self) -> None:
        super().__init__()
        self.shards = [at(i) for i in range(N_SHARDS)]
        self.model, self.sequence, self.run = Model(), 0, 0
        self.last: list[Step] = []

    def steps_of(self, push: Any, **said: Any) -> list[Step]:
        """One push: what each shard gets of it, and what it comes to."""
        kind, emb, num, w = push
        # A rule of integers there is none.
        named = {EMB: emb} if kind == GRADIENT else {EMB: emb, NUM: num}
        named = {
            i: [(row % LENGTHS[i], value) for row, value in pairs]
            for i, pairs in named.items()
        }
        self.model.push(kind, named, w)
        self.sequence += 1
        return [
            Step(kind, self.items(shard, named, w), producer=1, sequence=self.sequence)
            for shard in self.shards
        ]

    def items(self, shard: Shard, named: Any, w: bool) -> list[Item]:
        found = [Item(0, 0, np.ones(2, "f4"))] if w else []
        for table in shard.segment.tables:
            index, piece = table.piece.table.index, table.piece
            if index in named:
                mine = range(piece.first_row, piece.first_row + piece.n_rows)
                pairs = [pair for pair in named[index] if pair[0] in mine]
                data = np.array([v for _, v in pairs]).reshape(-1)
                found.append(rows(shard, index, [row for row, _ in pairs], data))
        return found

    @rule(pushes=st.lists(PUSHES, min_size=1, max_size=3))
    def push(self, pushes: Any) -> None:
        batches = [self.steps_of(push) for push in pushes]
        for i, shard in enumerate(self.shards):
            tickets = [Ticket(steps[i]) for steps in batches]
            shard.submit(tickets)
            assert not any(isinstance(t.outcome, Exception) for t in tickets)
            assert not any(t.duplicate for t in tickets)
        self.last = batches[-1]

    @rule()
    def push_again(self) -> None:
        for shard, step in zip(self.shards, self.last, strict=False):
            ticket = Ticket(step)
            shard.submit([ticket])
            assert ticket.duplicate

    @rule(push=PUSHES, moment=MOMENTS, which=st.integers(0, N_SHARDS - 1))
    def die_in_a_push(self, push: Any, moment: int, which: int) -> None:
        """The owner of one shard dies; the push is sent again to who comes next."""
        steps = self.steps_of(push)
        for i, shard in enumerate(self.shards):
            if i != which:
                shard.submit([Ticket(steps[i])])
                continue
            with watched(shard.segment) as stores:
                rules: Any = {W: AddingRows(), EMB: AddingRows()}
                Shard(shard.segment, rules).submit([Ticket(steps[i])])
            _, buffer = stores.states[moment % len(stores.states)]
            before = Segment(LAYOUT, i, SLOTS, buffer.copy(), durable=True).flip
            self.shards[i] = at(i, buffer)
            ticket = Ticket(steps[i])
            self.shards[i].submit([ticket])
            assert not isinstance(ticket.outcome, Exception)
            assert ticket.duplicate == (before == self.shards[i].segment.flip)
        self.last = steps

    @rule(bad=st.sampled_from(["nan", "outside", "twice"]), named=NAMED)
    def refuse(self, bad: str, named: Any) -> None:
        for shard in self.shards:
            piece = shard.segment.tables[0].piece
            ids = [piece.first_row + row % piece.n_rows for row, _ in named]
            ids += [piece.first_row - 1] if bad == "outside" else [piece.first_row]
            values = [float(v) for _, v in named] + [np.nan if bad == "nan" else 1]
            item = rows(shard, EMB, ids, values)
            items = [item, item] if bad == "twice" else [item]
            step = Step(ADD, items, producer=2, sequence=1, check=True)
            ticket = Ticket(step)
            shard.submit([ticket])
            assert isinstance(ticket.outcome, Exception)

    @rule(reset=st.booleans())
    def begin_and_end_a_run(self, reset: bool) -> None:
        self.run += 1
        for shard in self.shards:
            shard.begin_run(self.run, ASP(), 1, reset=reset)
            shard.end_run(self.run, "over")
        # It ends with a version that says so.
        self.model.version = self.shards[0].segment.current.version
        if reset:
            self.model.steps = dict.fromkeys(self.model.steps, 0)
            self.model.slots[:], self.model.w_slot[:] = 0.25, 0.5

    @invariant()
    def holds(self) -> None:
        for shard in self.shards:
            validate(shard)
            segment = shard.segment
            record, (w,) = segment.current, segment.pieces
            assert record.version == self.model.version
            assert record.steps.tolist() == [*self.model.steps.values()]
            mine = slice(w.start, w.stop)
            assert (segment.weights_of(record, 0) == self.model.w[mine]).all()
            assert (segment.slots_of(record, 0)[0] == self.model.w_slot[mine]).all()
            for table in segment.tables:
                piece, index = table.piece, table.piece.table.index
                ids = range(piece.first_row, piece.first_row + piece.n_rows)
                assert (read(shard, index, ids) == self.model.rows[index][ids]).all()
                for slot in table.slots:
                    assert (slot == self.model.slots[ids]).all()


Tables.TestCase.settings = settings(
    max_examples=10, stateful_step_count=15, deadline=None
)
TestTables = Tables.TestCase
