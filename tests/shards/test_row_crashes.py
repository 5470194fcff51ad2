"""A process is killed after any store of a publication of rows: nothing is half done.

The model has every store as a kill point, recovery's own too; real processes are killed
at moments of chance.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daskps.consistency import ASP
from daskps.layout.arrays import Layout
from daskps.layout.slots import PerRow
from daskps.shards.arrays.row_operations import undo_word
from daskps.shards.memory import undo
from daskps.shards.memory.format import FORWARD, ROWS_SEQUENCE, RUN, VERSION
from daskps.shards.memory.publication import Withdrawal
from daskps.shards.memory.segment import Segment
from daskps.shards.reader import RowsRead
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, ASSIGN, GRADIENT, Item, Step, Ticket
from tests.invariants import validate
from tests.shards import storing
from tests.shards.making import copy_rows, copy_rows_locked
from tests.shards.rowing import EMB, NUM, AddingRows, contents, rows
from tests.shards.storing import watched

LAYOUT = Layout.build(
    {"w": ((2,), "float32")},
    1,
    {"emb": (6, 2, "float32"), "num": (5, 1, "int64")},
)
SLOTS = {0: (0.5,), EMB: (0.25, PerRow(0.25))}


def at(buffer: Any) -> Segment:
    segment = Segment(LAYOUT, 0, SLOTS, buffer, durable=True)
    if buffer is None:
        storing.follow(segment)
    return segment


def shard_of(segment: Segment) -> Shard:
    rules: Any = {0: AddingRows(), EMB: AddingRows()}
    return Shard(segment, rules)


def steps(shard: Shard) -> list[Step]:
    """Pushes by their numbers: of rows, of arrays too, of a row twice, of nothing."""
    w = Item(0, 0, np.ones(2, "f4"))
    nothing = rows(shard, EMB, [], np.empty((0, 2)))
    told: list[tuple[str, list[Item]]] = [
        (GRADIENT, [rows(shard, EMB, [4, 5], [3, 5])]),
        (GRADIENT, [w, rows(shard, EMB, [4, 1, 0], [1, 2, 4])]),
        (ADD, [rows(shard, EMB, [4, 2], 1), rows(shard, NUM, [2, 0, 2], [1, 2, 4])]),
        (ASSIGN, [rows(shard, NUM, [1, 2], [9, 8])]),
        (GRADIENT, [w, nothing]),
        (GRADIENT, [rows(shard, EMB, [0, 3], [1, 2])]),
    ]
    return [
        Step(kind, items, producer=1, sequence=i)
        for i, (kind, items) in enumerate(told)
    ]


def push(shard: Shard, *numbers: int) -> list[Ticket]:
    tickets = [Ticket(steps(shard)[n]) for n in numbers]
    shard.submit(tickets)
    return tickets


def tables_as_read(shard: Shard, flip: int) -> bytes | None:
    """All rows as they are read under the lock, None where they are gone."""
    segment, found = shard.segment, b""
    for ordinal, table in enumerate(segment.tables, 1):
        out = np.empty(table.piece.size, table.rows.dtype)
        ids = np.arange(table.piece.n_rows)
        if not copy_rows_locked(segment, flip, [RowsRead(ordinal, ids, out)]):
            return None
        found += out.tobytes()
    return found


class Reference:
    """What holds after each publication: of pushes one after the other, undisturbed."""

    def __init__(self, batches: Sequence[Sequence[int]]) -> None:
        shard = shard_of(at(None))
        self.first = shard.segment.flip
        #: What was looked at already: most recoveries lead through the same states.
        self.seen = set[bytes]()
        self.contents, self.rows = (
            [contents(shard)],
            [tables_as_read(shard, self.first)],
        )
        self.told = [storing.told(shard.segment)]
        for batch in batches:
            push(shard, *batch)
            self.contents.append(contents(shard))
            self.rows.append(tables_as_read(shard, shard.segment.flip))
            self.told.append(storing.told(shard.segment))


def check(reference: Reference, buffer: Any, n: int, batch: Sequence[int]) -> None:
    """Look at what a killed process has left in publication `n`; go on with it."""
    if (seen := buffer.tobytes()) in reference.seen:
        return
    reference.seen.add(seen)
    segment = at(buffer)
    done = segment.flip - reference.first
    assert done in (n, n + 1)
    unlocked(reference, segment, done)
    shard = shard_of(segment)
    assert tables_as_read(shard, segment.flip) == reference.rows[done]
    assert segment.header[ROWS_SEQUENCE] % 2 == 0
    assert contents(shard) == reference.contents[done]
    assert storing.told(segment) == reference.told[done]
    validate(shard)
    # Of the publication before: gone, or exactly that.
    before = tables_as_read(shard, segment.flip - 1)
    assert before in (None, reference.rows[done - 1])
    assert before is not None or segment.writing != segment.flip
    tickets = push(shard, *batch)
    assert [t.duplicate for t in tickets] == [done > n] * len(batch)
    validate(shard)
    assert contents(shard) == reference.contents[n + 1]
    assert storing.told(segment) == reference.told[n + 1]
    if done == n:
        assert tables_as_read(shard, segment.flip - 1) == reference.rows[n]


def unlocked(reference: Reference, segment: Segment, done: int) -> None:
    """A reader without the lock finds what is in force, or is told to ask."""
    for ordinal, table in enumerate(segment.tables, 1):
        out = np.empty(table.piece.size, table.rows.dtype)
        ids = np.arange(table.piece.n_rows)
        if copy_rows(segment, segment.flip, [RowsRead(ordinal, ids, out)]):
            assert out.tobytes() in (reference.rows[done] or b"")


def states_of(batches: Sequence[Sequence[int]], **how: Any) -> Iterator[Any]:
    """The segment after each store of the last batch."""
    shard = shard_of(at(None))
    for batch in batches[:-1]:
        push(shard, *batch)
    with watched(shard.segment, **how) as stores:
        # A state machine that has not kept the header without the watch.
        push(shard_of(shard.segment), *batches[-1])
    yield from stores.states


BATCHES = {
    "rows": [[0], [1]],
    "two tables": [[0], [1], [2]],
    "several": [[0], [1, 2]],
    "one row twice": [[0], [1], [2, 3]],
    "after another table": [[0], [1, 2], [3]],
    "no rows": [[0, 1], [2], [3], [4]],
}


@pytest.mark.parametrize("batches", BATCHES.values(), ids=BATCHES)
def test_killed_after_any_store(batches):
    reference = Reference(batches)
    n, seen = len(batches) - 1, set()
    for label, buffer in states_of(batches):
        seen.add(label.split(" ")[0])
        recovered_after_any_store(reference, buffer, n, batches[-1])
        check(reference, buffer.copy(), n, batches[-1])
    assert seen >= {"header", "record"}
    changes = batches != BATCHES["no rows"]
    assert (seen >= {"row", "feed", "told"}) == ("row" in seen) == changes


def recovered_after_any_store(reference, buffer, n, batch):
    """Recovery is killed itself, after each of its stores."""
    segment = at(buffer.copy())
    with watched(segment) as stores:
        undo.roll_back(segment)
    for _, left in stores.states:
        check(reference, left, n, batch)


def test_killed_in_a_push_that_is_refused():
    """The rows before a NaN are changed already, and are rolled back."""
    shard = shard_of(at(None))
    push(shard, 0)
    reference = Reference([[0], [1]])
    data = np.array([[1, 2], [3, 4], [5, np.nan]], "f4")
    item = rows(shard, EMB, [0, 4, 2], data)
    with watched(shard.segment) as stores:
        again = shard_of(shard.segment)
        ticket = Ticket(Step(ADD, [item], producer=1, sequence=1, check=True))
        again.submit([ticket])
    assert isinstance(ticket.outcome, Exception)
    assert {"row", "row back"} <= {label for label, _ in stores.states}
    for _, buffer in stores.states:
        recovered_after_any_store(reference, buffer, 1, [1])
        check(reference, buffer.copy(), 1, [1])


# -- publications that go forward ------------------------------------------------------


def filling(stores):
    """A fill of slots that is noted half-way too."""

    def fill(slot, value):
        flat = slot.reshape(-1)
        storing.put(flat, [value] * len(flat), stores, "fill")

    return fill


def test_killed_while_slots_get_their_first_values():
    """Who comes next has the run with all of them, or neither."""
    expected = shard_of(at(None))
    push(expected, 0, 1, 2)
    before = contents(expected)
    expected.begin_run(5, ASP(), 1, reset=True)
    after = contents(expected)
    shard = shard_of(at(None))
    push(shard, 0, 1, 2)
    with watched(shard.segment) as stores:
        shard.segment.payload = shard.segment.payload._replace(fill=filling(stores))
        shard_of(shard.segment).begin_run(5, ASP(), 1, reset=True)
    found = set()
    for label, buffer in stores.states:
        found.add(went_forward(label, buffer, before, after))
        for _, left in settled_by(buffer):
            went_forward(label, left, before, after)
    # Arrays have another buffer for that, before anything is decided.
    assert found == {
        ("record", False),
        # From there on it goes forward.
        ("feed", True),
        *((label, done) for label in ("header", "fill") for done in (False, True)),
    }


def settled_by(buffer):
    """The segment after each store of recovery."""
    segment = at(buffer.copy())
    with watched(segment) as stores:
        segment.payload = segment.payload._replace(fill=filling(stores))
        undo.roll_back(segment)
    return stores.states


def went_forward(label, buffer, before, after):
    """Which of two states somebody finds who comes next; then a push works."""
    shard = shard_of(at(buffer.copy()))
    undo.roll_back(shard.segment)
    validate(shard)
    state = contents(shard)
    assert state in (before, after)
    (ticket,) = push(shard, 5)
    assert not isinstance(ticket.outcome, Exception)
    validate(shard)
    return label.split(" ")[0], state == after


def test_the_end_of_a_run_does_not_come_before_its_beginning():
    """Who comes next may hear first that the run is over which a dead owner began."""
    shard = shard_of(at(None))
    push(shard, 0)
    with watched(shard.segment) as stores:
        shard_of(shard.segment).begin_run(5, ASP(), 1, reset=True)
    for _, buffer in stores.states:
        shard = shard_of(at(buffer))
        shard.end_run(5, "over")
        push(shard, 1)
        validate(shard)
        assert shard.segment.current.plain[RUN] == 0


def test_killed_before_a_reset_began_and_then_in_a_push():
    """What was only announced is nobody's to go on with."""
    shard = shard_of(at(None))
    push(shard, 0)
    flip = shard.segment.flip
    with watched(shard.segment) as stores:
        shard_of(shard.segment).begin_run(5, ASP(), 1, reset=True)
    announced = [
        buffer
        for _, buffer in stores.states
        if (header := at(buffer).header)[FORWARD] and not header[ROWS_SEQUENCE] & 1
    ]
    reference = Reference([[0], [1]])
    (buffer, *_) = announced
    assert at(buffer).flip == flip
    shard = shard_of(at(buffer.copy()))
    with watched(shard.segment) as stores:
        push(shard_of(shard.segment), 1)
    for _, left in stores.states:
        check(reference, left, 1, [1])


@pytest.mark.parametrize("batch", [[1], [1, 2], [3], [4]])
def test_killed_while_a_publication_of_rows_is_withdrawn(batch):
    shard = shard_of(at(None))
    push(shard, 0)
    before = tables_as_read(shard, shard.segment.flip)
    slots = slots_of(shard)
    push(shard, *batch)
    now, flip = tables_as_read(shard, shard.segment.flip), shard.segment.flip
    told = [told_since(shard, ordinal, 1, 0) for ordinal in (0, 1)]
    assert (now == before) == (batch == [4]) == (not any(told))
    with watched(shard.segment) as stores:
        withdrawal = Withdrawal(shard.segment)
        withdrawal.record.plain[VERSION] = 9
        withdrawal.commit()
    for _, buffer in stores.states:
        for _, left in [("", buffer), *settled_by(buffer)]:
            withdrawn(left, flip, now, before, (slots, told))
    assert shard.segment.flip == flip + 1
    withdrawn(shard.segment.buffer, flip, now, before, (slots, told))


def told_since(shard, ordinal, version, by):
    segment = shard.segment
    return segment.tables[ordinal].feed.read(segment.current, version, by).tolist()


def slots_of(shard):
    return [s.tobytes() for t in shard.segment.tables for s in t.slots]


def withdrawn(buffer, flip, now, before, rest):
    """It is withdrawn, or can be; then rows and slots are those before it.

    Its rows are told once more, also to who has pushed them.
    """
    slots, told = rest
    shard = shard_of(at(buffer.copy()))
    segment = shard.segment
    undo.roll_back(segment)
    assert segment.flip in (flip, flip + 1)
    if segment.flip == flip:
        assert tables_as_read(shard, flip) == now
        # As `is_possible` finds out for a round.
        if segment.withdraws == flip + 1:
            assert segment.writing in (flip, flip + 1)
        withdrawal = Withdrawal(segment)
        withdrawal.record.plain[VERSION] = 9
        withdrawal.commit()
    assert (segment.flip, segment.current.version) == (flip + 1, 9)
    assert tables_as_read(shard, flip + 1) == before
    assert slots_of(shard) == slots
    had = segment.record(flip).version
    assert [told_since(shard, ordinal, had, 1) for ordinal in (0, 1)] == told
    # What was withdrawn is nobody's to read.
    assert tables_as_read(shard, flip) is None
    validate(shard)


# -- orders of stores that are wrong, which the model must find ------------------------


def row_before_its_log(update, target, flip, stores):
    for array, _ in storing.pairs(target):
        array[update.ids] += 1
    stores.note("row")
    for array, _ in storing.pairs(target):
        array[update.ids] -= 1
    return storing.apply(update, target, flip, stores)


def word_before_its_log(update, target, flip, stores):
    first = target.undo[0] & 0xFFFFFF
    target.undo[0] = undo_word(flip, first + len(update.ids))
    target.undo[0] = undo_word(flip, first)
    return storing.apply(update, target, flip, stores)


def log_begun_anew(update, target, flip, stores):
    target.undo[0] = undo_word(flip, 0)
    return storing.apply(update, target, flip, stores)


@pytest.mark.parametrize(
    ("one", "batches"),
    [
        (row_before_its_log, BATCHES["rows"]),
        (word_before_its_log, BATCHES["rows"]),
        (log_begun_anew, BATCHES["several"]),
    ],
)
def test_the_model_finds_a_wrong_order_of_a_loop(one, batches):
    finds(batches, one=one)


def test_the_model_finds_words_in_a_wrong_order(monkeypatch):
    def odd_first(segment, flip, ordinals):
        segment.header[ROWS_SEQUENCE] += 1
        for ordinal in ordinals:
            buffers = segment.tables[ordinal].buffers
            # Two words where one is needed: whose log, and how much of it holds.
            buffers.undo[0] = undo_word(flip, buffers.undo[0] & 0xFFFFFF)
            buffers.undo[0] = undo_word(flip, 0)

    monkeypatch.setattr(undo, "begin", odd_first)
    finds(BATCHES["rows"])


def finds(batches, **how):
    reference = Reference(batches)
    n = len(batches) - 1
    states = [buffer for _, buffer in states_of(batches, **how)]
    with pytest.raises(AssertionError):
        check_all(reference, states, n, batches[-1])


def check_all(reference, states, n, batch):
    for buffer in states:
        check(reference, buffer.copy(), n, batch)


# -- real processes --------------------------------------------------------------------


def test_killed_at_200_random_moments(tmp_path):
    command = [sys.executable, "-m", "tests.shards.killing_rows", str(tmp_path)]
    done = subprocess.run(
        [*command, "200", "1"],
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
        timeout=300,
    )
    found: dict[str, int] = json.loads(done.stdout)
    assert (found["kills"], found["wrong"]) == (200, 0)
    # Else nothing was looked at.
    assert found["told"] > 0, found
    assert found["half-way"] > 0, found
    assert found["torn before"] > 0, found
