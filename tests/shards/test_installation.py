"""A state is saved from some shards and installed in others: no bit of it differs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskps.cluster.host.rules import initial_slots
from daskps.errors import LayoutError, ProtocolError
from daskps.init import normal
from daskps.kernels import id_hash
from daskps.layout.arrays import Layout, compute_dtype
from daskps.layout.spans import ROWS, WEIGHTS, Span
from daskps.layout.tables import UnboundedIds
from daskps.optim import SGD, Adagrad, Adam, bind
from daskps.shards.installation import Installation
from daskps.shards.memory import areas
from daskps.shards.memory.format import GENERATION
from daskps.shards.memory.room import Own
from daskps.shards.memory.segment import Segment
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, ASSIGN, GRADIENT, REMOVE, Item, Ready, Step, Ticket
from tests.invariants import validate
from tests.kernels.compiling import kept
from tests.shards.stating import install, same, state_of

POLICIES: dict[str, dict[str, int]] = {
    "none": {},
    "time": {"ttl": 4},
    "all": {"max_rows": 130, "ttl": 3, "admit_after": 2},
}
SHAPES = {
    "w": ((11, 3), "float32"),
    "b": ((5,), "float64"),
    "h": ((3,), "float16"),
    "n": ((4,), "int64"),
    "z": ((0, 2), "float32"),
}
EMB, ANY, TOLD = 5, 6, 7
RULES: dict[int, Any] = {
    0: Adam(0.01),
    1: Adam(0.01),
    2: SGD(0.1),
    EMB: Adagrad(0.1, rowwise=True),
    ANY: Adam(0.02),
}
SLOTS = {index: initial_slots(rule) for index, rule in RULES.items()}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Little memory for logs, all of which is written, and for the index."""
    monkeypatch.setattr(areas, "MOST_PUSHED_ROWS", 256)
    monkeypatch.setattr(areas, "FEWEST_SLOTS", 16)


class Rules(dict[int, Any]):
    """Those of each dtype, made when they are asked for."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def get(self, index: int, default: Any = None) -> Any:
        if index not in RULES:
            return None
        if index not in self:
            dtype = self.layout.dtype_of(index)
            self[index] = bind(RULES[index], dtype, cache_dir=kept())
        return self[index]


def layout_of(n_shards: int, **policy: int) -> Layout:
    first = normal(0.1)
    tables: dict[str, Any] = {
        "emb": (13, 2, "float32"),
        "any": (0, 3, "float32", UnboundedIds(first, 5, 4000, **policy)),
        "told": (0, 1, "int64", UnboundedIds(first, 5, 4000)),
    }
    return Layout.build(SHAPES, n_shards, tables)


def segments_of(layout: Layout, *, durable: bool) -> list[Segment]:
    found = []
    for shard in range(layout.n_shards):
        segment = Segment(layout, shard, SLOTS, durable=durable)
        segment.words[GENERATION], segment.memory = 1, Own()
        segment.cache_dir = kept()
        found.append(segment)
    return found


def shards_of(segments: list[Segment], layout: Layout) -> list[Shard]:
    rules: Any = Rules(layout)
    return [Shard(segment, rules, cache_dir=kept()) for segment in segments]


def push(shards: list[Shard], layout: Layout, number: int) -> None:
    """Push something to all shards that follows from a number alone."""
    rng = np.random.default_rng(number)
    kind = [GRADIENT, GRADIENT, ADD, GRADIENT, ASSIGN, REMOVE][number % 6]
    arrays = {p.index: rng.normal(size=p.size) for p in layout.parameters}
    n_ids = rng.integers(1, 120)
    ids = {
        EMB: np.unique(rng.integers(0, 13, 5)),
        ANY: np.unique(rng.integers(-200, 200, n_ids)),
        TOLD: np.unique(rng.integers(0, 90, 20)),
    }
    rows = {i: rng.normal(size=(len(of), 3)) for i, of in ids.items()}
    for shard in shards:
        items = _items(shard, kind, arrays, ids, rows)
        step = Step(kind, items, producer=1, sequence=number)
        ticket = Ticket(step)
        shard.submit([ticket])
        assert isinstance(ticket.outcome, Ready), ticket.outcome
        validate(shard)


def _items(shard: Shard, kind: str, arrays: Any, ids: Any, rows: Any) -> list[Item]:
    items = []
    for at, piece in enumerate(shard.segment.pieces):
        p = piece.parameter
        wanted = p.dtype != "int64" if kind == GRADIENT else kind != REMOVE
        if wanted:
            dtype = compute_dtype(p.dtype) if kind == GRADIENT else p.dtype
            data = (arrays[p.index] * 3).astype(dtype)[piece.start : piece.stop]
            items.append(Item(at, 0, np.array(data)))
    for at, memory in enumerate(shard.segment.tables, len(shard.segment.pieces)):
        of_rows: Any = memory.piece
        table = of_rows.table
        of, data = ids[table.index], rows[table.index][:, : table.dim]
        if (kind == GRADIENT and table.dtype == "int64") or (
            kind == REMOVE and table.is_bounded
        ):
            continue
        if memory.unbounded is None:
            low = of_rows.first_row
            mine = (low <= of) & (of < low + of_rows.n_rows)
        else:
            found = id_hash.buckets(of, table.hash_seed, table.n_buckets)
            mine = (of_rows.first_bucket <= found) & (found < of_rows.stop_bucket)
        values = (data * 3).astype(table.dtype)[mine].reshape(-1)
        values = values[:0] if kind == REMOVE else values
        items.append(Item(at, 0, np.array(values), of[mine]))
    return items


def moved(state: Any, k: int, policy: dict[str, int], *, durable: bool) -> Any:
    layout = layout_of(k, **policy)
    segments = segments_of(layout, durable=durable)
    install(state, segments, layout)
    return shards_of(segments, layout), layout


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_what_is_installed_in_other_shards_goes_on_with_the_same_bits(n, policy):
    of = POLICIES[policy]
    layout = layout_of(n, **of)
    shards = shards_of(segments_of(layout, durable=n % 2 == 0), layout)
    for number in range(1, 20):
        push(shards, layout, number)
    saved = state_of(shards, layout)
    assert len(saved[0]["any", "ids"]) > 30
    if policy == "all":
        assert len(saved[0]["any", "candidates"]) > 5
        assert min(saved[1].came[1]) > 0
    others = [moved(saved, k, of, durable=k % 2 == 1) for k in (1, 2, 3, 5)]
    for one in others:
        same(state_of(*one), saved)
    for number in range(20, 30):
        for of_one, its_layout in (*others, (shards, layout)):
            push(of_one, its_layout, number)
    after = state_of(shards, layout)
    for one in others:
        same(state_of(*one), after)
    # What nobody has pushed to begins as ever.
    assert after[1].version == saved[1].version + 10


def test_the_arrays_of_a_state_are_the_same_on_any_number_of_shards():
    states = []
    for n in (1, 2, 3, 5):
        layout = layout_of(n, **POLICIES["all"])
        shards = shards_of(segments_of(layout, durable=n > 2), layout)
        for number in range(1, 25):
            push(shards, layout, number)
        states.append(state_of(shards, layout))
    for other in states[1:]:
        same(other, states[0])


def test_rows_that_are_none_of_a_shard_are_refused():
    layout = layout_of(2, max_rows=300)
    segment = segments_of(layout, durable=False)[0]
    at = next(i for i, t in enumerate(segment.tables) if t.piece.table.index == ANY)
    table: Any = segment.tables[at].piece.table
    at += len(segment.pieces)
    ids = np.arange(40)
    order = np.argsort(id_hash.hashes(ids, table.hash_seed))
    mine = [
        i
        for i in ids[order].tolist()
        if segment.tables[1].piece.holds(np.array([i]), cache_dir=kept())
    ]
    nobody = np.empty((2, 0), np.int64)
    into = Installation(segment)
    for wrong, why in [
        (ids[order], "not among"),
        (np.array(mine[::-1]), "order"),
        (np.array([mine[0]] * 2), "order"),
    ]:
        with pytest.raises(ValueError, match=why):
            into.begin_table(at, wrong, nobody)
        with pytest.raises(ValueError, match=why):
            into.begin_table(at, ids[:0], np.array([wrong, wrong]))
    with pytest.raises(ValueError, match="less than once"):
        into.begin_table(at, ids[:0], np.array([[mine[0]], [0]]))
    with pytest.raises(ValueError, match="there twice"):
        into.begin_table(at, np.array(mine), np.array([[mine[0]], [1]]))
    with pytest.raises(ProtocolError, match="another kind"):
        into.begin_table(at - 1, ids[:0], nobody)


def test_ids_are_looked_at_by_loops_that_are_kept(monkeypatch):
    """Compiled anew they take a quarter of a second of each process that restores."""
    where, buckets = [], id_hash.buckets

    def seen(*args: Any, cache_dir: Any = None) -> Any:
        where.append(cache_dir)
        return buckets(*args, cache_dir=cache_dir)

    # Of two shards: one alone has all ids, and looks at none.
    segment = segments_of(layout_of(2, max_rows=129), durable=False)[0]
    monkeypatch.setattr(segment, "cache_dir", kept())
    table: Any = segment.tables[1].piece.table
    ids = np.arange(40)
    ids = ids[np.argsort(id_hash.hashes(ids, table.hash_seed))][:9]
    monkeypatch.setattr(id_hash, "buckets", seen)
    candidates = np.array([ids[:3], [1, 1, 1]])
    into, at = Installation(segment), len(segment.pieces) + 1
    into.begin_table(at, ids[3:], candidates)
    # Rows, candidates, and the buckets of the rows.
    assert where == [kept()] * 3


def test_more_than_there_is_room_for_is_refused():
    layout = layout_of(1, max_rows=129)
    segment = segments_of(layout, durable=False)[0]
    table: Any = segment.tables[1].piece.table
    at = len(segment.pieces) + 1
    ids = np.arange(3000)
    ids = ids[np.argsort(id_hash.hashes(ids, table.hash_seed))]
    nobody = np.empty((2, 0), np.int64)
    with pytest.raises(LayoutError, match="3,000 rows"):
        Installation(segment).begin_table(at, ids, nobody)
    # As many as there may be, but too many of them in one bucket.
    first = id_hash.buckets(ids, table.hash_seed, table.n_buckets) == 0
    with pytest.raises(ValueError, match="more ids than rows"):
        Installation(segment).begin_table(at, ids[first][:100], nobody)
    other = segments_of(layout_of(1), durable=False)[0]
    other.memory = None
    with pytest.raises(LayoutError, match="the owner"):
        Installation(other).begin_table(at, ids, nobody)


def test_elements_that_do_not_fit_are_refused():
    layout = layout_of(1)
    segment = segments_of(layout, durable=False)[0]
    into, at = Installation(segment), len(segment.pieces) + 1
    into.begin_table(at, np.array([7]), np.empty((2, 0), np.int64))
    for span, n in [
        (Span(WEIGHTS, 0, 0, 5), 4),
        (Span(WEIGHTS, 0, 30, 35), 5),
        (Span(ROWS, at, 0, 3), 2),
        (Span(ROWS, at, 3, 6), 3),
        (Span(ROWS, at, -3, 0), 3),
    ]:
        with pytest.raises(ValueError, match="values for elements"):
            into.put(span, np.zeros(n, np.float32))
