"""Unbounded tables in a shard: pushes give rows to ids, reads never do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskps.consistency import ASP
from daskps.errors import ProtocolError, PushRejectedError
from daskps.init import constant
from daskps.layout.arrays import Layout
from daskps.layout.tables import UnboundedIds
from daskps.shards.deputy import NotHereError
from daskps.shards.frozen_rows import all_ids
from daskps.shards.memory import areas, growth
from daskps.shards.memory.format import GENERATION, VERSION
from daskps.shards.memory.publication import Withdrawal
from daskps.shards.memory.room import Own
from daskps.shards.memory.segment import Segment
from daskps.shards.reader import RowsRead
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, ASSIGN, GRADIENT, REMOVE, Item, Step
from tests.invariants import validate
from tests.kernels.compiling import kept
from tests.shards.making import copy_rows
from tests.shards.rowing import AddingRows
from tests.shards.unbounded_rowing import (
    EMB,
    KINDS,
    NUM,
    Model,
    all_rows,
    in_force,
    item,
    layout_of,
    made,
    read,
    send,
    slots_of,
    step,
)

#: Far apart, of both signs.
IDS = [
    0,
    -1,
    1,
    5,
    6,
    -9,
    2**63 - 1,
    -(2**63),
    *(7919 * i * (-1) ** i for i in range(1, 40)),
]


def pushes(seed: int, n: int) -> Any:
    """Pushes of chance: what kind, and by table pairs of ids and values."""
    rng = np.random.default_rng(seed)
    for i in range(n):
        kind = KINDS[i % len(KINDS)]
        tables = [EMB] if kind == GRADIENT else [EMB, NUM]
        yield (
            kind,
            {
                t: [
                    (IDS[j], int(v))
                    for j, v in rng.integers(
                        (0, -4), (len(IDS), 5), (rng.integers(0, 16), 2)
                    )
                ]
                for t in tables
            },
        )


def agrees(shards: list[Shard], model: Model) -> None:
    for index in (EMB, NUM):
        found: dict[int, Any] = {}
        for shard in shards:
            validate(shard)
            found |= read(shard, index, IDS) or {}
            ids, rows = all_rows(shard.segment, len(shard.segment.pieces) + index - EMB)
            mine = model.of(index)
            assert ids.tolist() == sorted(ids.tolist())
            assert rows.tolist() == [mine[i] for i in ids.tolist()]
        assert found == model.of(index)
    slots: dict[int, Any] = {}
    for shard in shards:
        slots |= slots_of(shard)
    assert slots == {i: [v] * 2 for i, v in model.slots.items()}


@pytest.mark.parametrize("n_shards", [1, 3])
def test_unbounded_rows_are_those_of_a_plain_dict(n_shards, monkeypatch):
    monkeypatch.setattr(areas, "FIRST_NBYTES", 40)
    monkeypatch.setattr(growth, "_LEAST_NBYTES", 40)
    monkeypatch.setattr(areas, "FIRST_LOG", 3)
    monkeypatch.setattr(areas, "FEWEST_SLOTS", 8)
    layout = layout_of(n_shards)
    shards, model = [made(layout, i) for i in range(n_shards)], Model()
    for n, (kind, named) in enumerate(pushes(3, 40)):
        for shard in shards:
            flip, there = shard.segment.flip, read(shard, EMB, IDS)
            (ticket,) = send(shard, step(shard, kind, named, n))
            assert not isinstance(ticket.outcome, Exception), ticket.outcome
            (ticket,) = send(shard, step(shard, kind, named, n))
            assert ticket.duplicate
            assert shard.segment.flip == flip + 1
            then = read(shard, EMB, IDS, flip)
            assert then == there
        model.push(kind, named)
        agrees(shards, model)
    assert all(len(slots_of(shard)) for shard in shards)


def test_pushes_that_queued_up_see_each_others_rows():
    shard, model = made(layout_of()), Model()
    told = [
        (GRADIENT, {EMB: [(5, 1), (6, 2)]}),
        (GRADIENT, {EMB: [(6, 4), (-9, 1), (6, 1)]}),
        (ADD, {EMB: [(-9, 3)], NUM: [(6, 1)]}),
    ]
    flip = shard.segment.flip
    tickets = send(shard, *(step(shard, *one, n) for n, one in enumerate(told)))
    assert [t.version for t in tickets] == [1, 2, 3]
    assert shard.segment.flip == flip + 1
    for one in told:
        model.push(*one)
    agrees([shard], model)
    assert read(shard, EMB, [5, 6, -9], flip) == {}


def test_a_push_that_queued_up_behind_a_removal_begins_its_rows_anew():
    """Both found the row before either changed it."""
    shard, model = made(layout_of()), Model()
    told = [
        (ADD, {EMB: [(5, 1), (6, 2)]}),
        (REMOVE, {EMB: [(5, 0)]}),
        (ADD, {EMB: [(5, 3), (6, 1)]}),
    ]
    first, *others = [step(shard, *one, n) for n, one in enumerate(told)]
    send(shard, first)
    flip = shard.segment.flip
    assert [t.version for t in send(shard, *others)] == [2, 3]
    assert shard.segment.flip == flip + 1
    for one in told:
        model.push(*one)
    agrees([shard], model)


def test_arrays_beside_a_table_are_no_rows_of_it():
    arrays = dict.fromkeys("abc", ((2,), "float32"))
    table = (0, 2, "float32", UnboundedIds(constant(3.0), 5, 64))
    layout = Layout.build(arrays, 1, {"emb": table})
    segment = Segment(layout, 0, {}, durable=True)
    segment.words[GENERATION], segment.memory = 1, Own()
    shard = Shard(segment, {}, cache_dir=kept())
    items = [Item(i, 0, np.full(2, i + 1, "f4")) for i in range(3)]
    rows = Item(3, 0, np.ones(2, "f4"), np.array([-7]))
    for sequence, given in enumerate([items, [*items, rows]]):
        (ticket,) = send(shard, Step(ADD, given, producer=1, sequence=sequence))
        assert not isinstance(ticket.outcome, Exception), ticket.outcome
    record = segment.current
    found = [segment.weights_of(record, i).tolist() for i in range(3)]
    assert found == [[2, 2], [4, 4], [6, 6]]
    out, there = np.zeros(4, "f4"), np.zeros(2, np.uint8)
    wanted = [RowsRead(3, np.array([-7, 7]), out, None, there)]
    assert copy_rows(segment, segment.flip, wanted)
    assert (out.tolist(), there.tolist()) == ([4, 4, 0, 0], [1, 0])


def test_a_refused_push_gives_nobody_a_row():
    shard = made(layout_of())
    send(shard, step(shard, ADD, {EMB: [(1, 1)]}, 0))
    before, other = in_force(shard), made(layout_of(3), 1)
    (ids, data) = np.array([1, 8, 9]), np.array([1, 2, 3, 4, np.nan, 6], "f4")
    torn = step(shard, ADD, {}, 1, check=True)._replace(items=[Item(1, 0, data, ids)])
    (ticket,) = send(shard, torn)
    assert isinstance(ticket.outcome, PushRejectedError)
    assert in_force(shard) == before
    assert read(shard, EMB, [1, 8, 9]) == {1: [4.0, 4.0]}
    validate(shard)
    elsewhere = [
        i
        for i in IDS
        if not other.segment.tables[0].piece.holds(_one(i), cache_dir=kept())
    ]
    bad = Item(1, 0, np.zeros(2 * len(elsewhere), "f4"), np.array(elsewhere))
    (ticket,) = send(other, step(other, ADD, {}, 1)._replace(items=[bad]))
    assert isinstance(ticket.outcome, PushRejectedError)
    assert "which has the buckets 1,4" in str(ticket.outcome)


def _one(i: int) -> Any:
    return np.array([i], np.int64)


def test_where_there_is_no_more_room_nothing_changes():
    """More than addresses were reserved for: refused by name, before the first store."""
    shard = made(layout_of(room=20))
    send(shard, step(shard, ADD, {EMB: [(i, 1) for i in range(15)]}, 0))
    before = in_force(shard)
    (ticket,) = send(shard, step(shard, ADD, {EMB: [(i, 1) for i in range(30)]}, 1))
    assert isinstance(ticket.outcome, PushRejectedError)
    assert "addresses for 20 rows of table 'emb'" in str(ticket.outcome)
    assert in_force(shard) == before
    (ticket,) = send(shard, step(shard, ADD, {EMB: [(i, 1) for i in range(20)]}, 1))
    assert not isinstance(ticket.outcome, Exception)
    assert len(read(shard, EMB, range(30)) or {}) == 20


def test_a_deputy_hands_over_what_needs_memory(monkeypatch):
    monkeypatch.setattr(areas, "FIRST_NBYTES", 80)
    monkeypatch.setattr(growth, "_LEAST_NBYTES", 80)
    owner = made(layout := layout_of())
    send(owner, step(owner, ADD, {EMB: [(1, 1)]}, 0))
    other = made(layout, 0, owner.segment.buffer).segment
    rules: Any = {0: AddingRows(), EMB: AddingRows()}
    deputy = Shard.as_deputy(other, rules, cache_dir=kept())
    (ticket,) = send(deputy, step(deputy, ADD, {EMB: [(2, 1), (3, 1)]}, 1))
    assert not isinstance(ticket.outcome, Exception)
    before = in_force(owner)
    many = step(deputy, ADD, {EMB: [(i, 1) for i in range(12)]}, 2)
    (ticket,) = send(deputy, many)
    assert isinstance(ticket.outcome, NotHereError)
    assert in_force(owner) == before
    (ticket,) = send(owner, many)
    assert not isinstance(ticket.outcome, Exception)
    (ticket,) = send(deputy, many)
    assert ticket.duplicate
    assert len(read(deputy, EMB, range(30)) or {}) == 12


def test_slots_begin_anew_with_a_run():
    shard = made(layout_of())
    send(shard, step(shard, GRADIENT, {EMB: [(4, 1), (9, 1)]}, 0))
    shard.begin_run(5, ASP(), 1, reset=True)
    shard.end_run(5, "over")
    assert slots_of(shard) == {4: [0.25] * 2, 9: [0.25] * 2}
    send(shard, step(shard, GRADIENT, {EMB: [(4, 1)]}, 1))
    assert slots_of(shard) == {4: [1.25] * 2, 9: [0.25] * 2}


def test_a_publication_that_gave_rows_is_withdrawn():
    shard = made(layout_of())
    send(shard, step(shard, GRADIENT, {EMB: [(4, 1)]}, 0))
    rows, slots = read(shard, EMB, [*IDS, 4]), slots_of(shard)
    send(shard, step(shard, GRADIENT, {EMB: [(4, 2), (-5, 1)]}, 1))
    withdrawal = Withdrawal(shard.segment)
    withdrawal.record.plain[VERSION] = 9
    withdrawal.commit()
    assert (read(shard, EMB, [*IDS, 4, -5]), slots_of(shard)) == (rows, slots)
    validate(shard)


def test_a_read_as_of_another_kind_of_table_is_refused():
    shard = made(layout_of())
    wanted = [RowsRead(1, np.array([4]), np.empty(2, "f4"))]
    with pytest.raises(ProtocolError, match="of another kind of table"):
        copy_rows(shard.segment, shard.segment.flip, wanted)
    bounded = made(Layout.build({}, 1, {"emb": (4, 2, "float32")}))
    with pytest.raises(ProtocolError, match="of another kind of table"):
        all_rows(bounded.segment, 0)


def test_ids_are_those_that_a_read_finds():
    """A row that is over keeps its place for a while."""
    shard = made(layout_of(room=512, ttl=1))
    send(shard, step(shard, ADD, {EMB: [(i, 1) for i in range(300)]}, 0))
    send(shard, step(shard, ADD, {EMB: [(7, 1), (-9, 1)]}, 1))
    assert shard.segment.tables[0].n_rows > 100
    there = read(shard, EMB, [-9, *range(300)]) or {}
    assert all_ids(shard.segment, 1).tolist() == [*there] == [-9, 7]
    with pytest.raises(ProtocolError):
        all_ids(shard.segment, 0)


def test_an_item_without_ids_is_a_step_of_the_table():
    shard = made(layout_of())
    send(shard, step(shard, GRADIENT, {EMB: []}, 0))
    send(shard, step(shard, GRADIENT, {EMB: [(1, 1)]}, 1))
    assert read(shard, EMB, [1]) == {1: [5.0, 5.0]}
    assert item(shard, EMB, []).ids is not None
    assert ASSIGN in KINDS
