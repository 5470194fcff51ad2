"""A process is killed after any store of a publication that gives ids rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from daskps.layout.arrays import Layout
from daskps.shards.arrays import unbounded_rows
from daskps.shards.memory import areas, growth, room, undo
from daskps.shards.memory.format import ROWS_SEQUENCE, VERSION
from daskps.shards.memory.publication import Withdrawal
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, GRADIENT, REMOVE
from tests.invariants import validate
from tests.kernels.compiling import kept
from tests.seams import rules_of
from tests.shards.storing import follow, told
from tests.shards.unbounded_rowing import (
    EMB,
    NUM,
    in_force,
    layout_of,
    made,
    read,
    send,
    step,
)
from tests.shards.unbounded_storing import watched_unbounded

LAYOUT = layout_of(room=12)
IDS = [0, -1, 5, 2**62, 8, -(2**63), 77]
#: Pushes by their numbers.
PUSHES: list[tuple[str, Any]] = [
    (ADD, {EMB: [(5, 1), (-1, 2)], NUM: [(5, 3)]}),
    (GRADIENT, {EMB: [(5, 1), (2**62, 2), (0, 1)]}),
    (ADD, {EMB: [(8, 1), (0, 5)], NUM: [(-1, 3), (8, 1)]}),
    (GRADIENT, {EMB: [(-(2**63), 1), (77, 2), (8, 1)]}),
    (REMOVE, {EMB: [(5, 0), (77, 0), (2**62, 0)], NUM: [(5, 0)]}),
    (GRADIENT, {EMB: [(77, 1), (5, 2)]}),
    (ADD, {EMB: [(5, 1), (-1, 2), (0, 1)], NUM: [(5, 3)]}),
    (ADD, {EMB: [(77, 1)]}),
]
MORE = (ADD, {EMB: [(i, 1) for i in (5, 1000, -1001)], NUM: [(1000, 4)]})


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Little memory to begin with, and an index that has to grow."""
    monkeypatch.setattr(areas, "FIRST_NBYTES", 64)
    monkeypatch.setattr(growth, "_LEAST_NBYTES", 64)
    monkeypatch.setattr(areas, "FEWEST_SLOTS", 8)
    monkeypatch.setattr(growth, "_COPIED", 2)
    monkeypatch.setattr(growth, "_COPIED_AN_ID", 1)


def push(shard: Shard, *numbers: int) -> list[Any]:
    return send(shard, *(step(shard, *PUSHES[n], n) for n in numbers))


def begun(layout: Layout = LAYOUT) -> Shard:
    """A new shard that somebody follows."""
    shard = made(layout)
    follow(shard.segment)
    return shard


def all_read(shard: Shard, flip: int | None = None) -> Any:
    found = [read(shard, index, IDS, flip) for index in (EMB, NUM)]
    return None if None in found else found


class Reference:
    """What holds after each publication of batches of pushes, undisturbed."""

    def __init__(
        self, batches: Sequence[Sequence[int]], layout: Layout = LAYOUT
    ) -> None:
        shard, self.layout = begun(layout), layout
        self.first, self.seen = shard.segment.flip, set[bytes]()
        self.in_force, self.rows = [in_force(shard)], [all_read(shard)]
        self.told = [told(shard.segment)]
        for batch in batches:
            push(shard, *batch)
            self.in_force.append(in_force(shard))
            self.rows.append(all_read(shard))
            self.told.append(told(shard.segment))
        send(shard, step(shard, *MORE, 100))
        self.end = in_force(shard)


def check(reference: Reference, buffer: Any, n: int, batch: Sequence[int]) -> None:
    """Look at what a killed process has left in publication `n`; go on with it."""
    if (seen := buffer.tobytes()) in reference.seen:
        return
    reference.seen.add(seen)
    shard = made(reference.layout, 0, buffer)
    segment = shard.segment
    done = segment.flip - reference.first
    assert done in (n, n + 1)
    if not segment.header[ROWS_SEQUENCE] & 1:
        assert all_read(shard) == reference.rows[done]
    undo.roll_back(segment)
    validate(shard)
    assert in_force(shard) == reference.in_force[done]
    assert told(segment) == reference.told[done]
    assert all_read(shard) == reference.rows[done]
    before = all_read(shard, segment.flip - 1)
    if done:
        assert before in (None, reference.rows[done - 1])
        assert before is not None or segment.writing != segment.flip
    tickets = push(shard, *batch)
    assert [t.duplicate for t in tickets] == [done > n] * len(batch)
    assert in_force(shard) == reference.in_force[n + 1]
    assert told(segment) == reference.told[n + 1]
    if done == n:
        assert all_read(shard, segment.flip - 1) == reference.rows[n]
    send(shard, step(shard, *MORE, 100))
    validate(shard)
    assert in_force(shard) == reference.end


def states_of(
    batches: Sequence[Sequence[int]], layout: Layout = LAYOUT
) -> Iterator[Any]:
    """The segment after each store of the last batch."""
    shard = begun(layout)
    for batch in batches[:-1]:
        push(shard, *batch)
    with watched_unbounded(shard.segment) as stores:
        # A state machine that has not kept the header without the watch.
        tickets = push(made_of(shard), *batches[-1])
    for ticket in tickets:
        if isinstance(ticket.outcome, Exception):
            raise ticket.outcome
    yield from stores.states


def made_of(shard: Shard) -> Shard:
    return Shard(shard.segment, rules_of(shard), cache_dir=kept())


def recoveries(buffer: Any, layout: Layout = LAYOUT) -> Iterator[Any]:
    """The segment after each store of recovery."""
    segment = made(layout, 0, buffer.copy()).segment
    with watched_unbounded(segment) as stores:
        undo.roll_back(segment)
    return (left for _, left in stores.states)


BATCHES = {
    "first rows": [[0]],
    "more rows": [[0], [1]],
    "several": [[0], [1, 2]],
    "a larger index": [[0], [1], [2], [3]],
    "rows that go": [[0], [1], [4]],
    "rows that go and come": [[0], [1], [4, 5]],
    "rows that another had": [[0], [1], [4], [5]],
}


@pytest.mark.parametrize("batches", BATCHES.values(), ids=BATCHES)
def test_killed_after_any_store(batches):
    reference = Reference(batches)
    n, labels = len(batches) - 1, set()
    for i, (label, buffer) in enumerate(states_of(batches)):
        labels.add(label.split(" ")[0])
        if i % 25 == 0:
            for left in recoveries(buffer):
                check(reference, left, n, batches[-1])
        check(reference, buffer, n, batches[-1])
    some = {"header", "record", "own", "word", "log", "undo", "feed", "told"}
    assert labels >= some | ({"new", "row"} if batches[-1][0] != 4 else set())


POLICIES = {
    "candidates, and rows that had to go": (
        {"max_rows": 2, "admit_after": 2},
        [[0], [6], [1]],
        {"candidates": 1, "admissions": 3, "evictions": 1},
    ),
    "rows in their time": ({"ttl": 1, "room": 12}, [[0], [1], [5, 3]], {"rows": 3}),
    "all of it": (
        {"max_rows": 3, "ttl": 1, "admit_after": 2},
        [[0], [6], [7], [1]],
        {"rows": 1, "candidates": 3, "admissions": 3},
    ),
}


@pytest.mark.parametrize(
    ("policy", "batches", "counts"), POLICIES.values(), ids=POLICIES
)
def test_killed_where_rows_come_and_go_by_a_policy(
    policy, batches, counts, monkeypatch
):
    monkeypatch.setattr(areas, "MOST_PUSHED_ROWS", 8)
    monkeypatch.setattr(areas, "FEWEST_SLOTS", 16)
    monkeypatch.setattr(unbounded_rows, "SWEPT", 2)
    for module in (unbounded_rows, areas, room):
        monkeypatch.setattr(module, "SWEPT_WORDS", 80)
    layout = layout_of(**{"room": 12} | policy)
    reference, n, last = Reference(batches, layout), len(batches) - 1, None
    for i, (_, last) in enumerate(states_of(batches, layout)):
        if i % 40 == 0:
            for left in recoveries(last, layout):
                check(reference, left, n, batches[-1])
        check(reference, last.copy(), n, batches[-1])
    shard = made(layout, 0, last)
    of = shard.segment.tables[0].unbounded
    assert of is not None
    told = of.counts(of.since(shard.segment.current.clocks[0]))
    assert counts.items() <= told.items()


def test_killed_while_a_publication_that_gave_rows_is_withdrawn():
    shard = begun()
    push(shard, 0)
    before = all_read(shard)
    push(shard, 1)
    now, flip = all_read(shard), shard.segment.flip
    with watched_unbounded(shard.segment) as stores:
        _withdraw(shard)
    for _, buffer in stores.states:
        for left in [*recoveries(buffer), buffer]:
            shard = made(LAYOUT, 0, left.copy())
            undo.roll_back(shard.segment)
            if shard.segment.flip == flip:
                assert all_read(shard, flip) == now
                _withdraw(shard)
            assert all_read(shard) == before
            assert all_read(shard, flip) is None
            # The ids of what is no row any more are among them.
            assert since(shard, 2) == [0, 5, 2**62]
            push(shard, 2)
            validate(shard)


def since(shard: Shard, version: int) -> Any:
    segment = shard.segment
    found = segment.tables[0].feed.read(segment.current, version, 1)
    return None if found is None else found.tolist()


def _withdraw(shard: Shard) -> None:
    withdrawal = Withdrawal(shard.segment)
    withdrawal.record.plain[VERSION] = 9
    withdrawal.commit()


# -- orders of stores that are wrong, which the model must find ------------------------


def test_the_model_finds_words_that_are_not_rolled_back(monkeypatch):
    monkeypatch.setattr(
        "daskps.shards.arrays.unbounded_rows.UnboundedRows.roll_back", _nothing
    )
    finds(BATCHES["more rows"])


def _nothing(*_: Any) -> None:
    """Do nothing."""


def finds(batches: Any) -> None:
    reference = Reference(batches)
    states = [buffer for _, buffer in states_of(batches)]
    with pytest.raises((AssertionError, ValueError)):
        check_all(reference, states, len(batches) - 1, batches[-1])


def check_all(reference: Reference, states: Any, n: int, batch: Sequence[int]) -> None:
    for buffer in states:
        check(reference, buffer, n, batch)
