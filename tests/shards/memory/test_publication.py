"""Publications: what they write, against plain NumPy, in both buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskps import optim
from daskps.consistency import ASP
from daskps.layout.arrays import Layout, compute_dtype
from daskps.shards import producers
from daskps.shards.arrays.operations import TILE, Formed, PieceUpdate
from daskps.shards.arrays.payload import NUMPY
from daskps.shards.memory.format import MIXED, SIDE
from daskps.shards.memory.publication import Publication
from daskps.shards.memory.segment import Segment
from daskps.shards.reader import ShardReader
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, ASSIGN, GRADIENT, Item, Ready, Step
from tests.invariants import validate
from tests.kernels.compiling import kept
from tests.shards.making import (
    RUN,
    A,
    Adding,
    B,
    Momentum,
    copy_parts,
    held,
    items,
    make,
    send,
    slots_of,
    weights,
)

N = 2 * TILE + 100
LARGE = Layout.build({"w": ((N,), "float64"), "v": ((3,), "float64")}, 1)
BORDERS = [0, 1, TILE - 1, TILE, TILE + 1, 2 * TILE, N - 1, N]


@st.composite
def pushes(draw):
    """Gradients, adds and assigns of the whole piece and of runs of it."""
    kind = draw(st.sampled_from([GRADIENT, ADD, ASSIGN]))
    start, stop = 0, N
    if draw(st.booleans()):
        start, stop = sorted(draw(st.tuples(*[st.sampled_from(BORDERS)] * 2)))
    rng = np.random.default_rng(draw(st.integers(0, 100)))
    return kind, start, rng.normal(size=stop - start)


@settings(max_examples=60, deadline=None)
@given(st.lists(pushes(), min_size=1, max_size=5))
def test_pushes_that_queued_up_are_bit_for_bit_those_one_by_one(given):
    steps = [
        Step(kind, [Item(0, start, data)], producer=1, sequence=i)
        for i, (kind, start, data) in enumerate(given)
    ]
    queued, single, *durable = (
        make(LARGE, rule=Momentum(), ruled=[0], durable=i > 1) for i in range(4)
    )
    for shard in (queued, durable[0]):
        send(shard, *steps)
    for shard in (single, durable[1]):
        for step in steps:
            send(shard, step)
    w, slot = np.zeros(N), np.zeros(N)
    n = 0
    for kind, start, data in given:
        part = slice(start, start + len(data))
        if kind == GRADIENT:
            n += 1
            slot[part] = 0.7 * slot[part] + data
            w[part] = w[part] - 0.3 / n * slot[part]
        else:
            w[part] = data + (w[part] if kind == ADD else 0)
    for shard in (queued, single, *durable):
        segment = shard.segment
        assert held(segment)[0].tobytes() == w.tobytes()
        assert slots_of(segment)[0][0].tobytes() == slot.tobytes()
        assert segment.current.version == len(given)
    assert queued.segment.flip == 1


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_compiled_rules_give_the_same_bits_queued_and_one_by_one(dtype, rng):
    layout = Layout.build({"w": ((TILE + 7,), dtype)}, 1)
    rule = optim.SGD(0.1, momentum=0.9)
    bound = optim.bind(rule, dtype, cache_dir=kept())
    shards = [
        Shard(Segment(layout, 0, {0: (0.0,)}, durable=i > 1), {0: bound})
        for i in range(4)
    ]
    steps = []
    for i in range(4):
        data = rng.normal(size=TILE + 7).astype(compute_dtype(dtype))
        steps.append(Step(GRADIENT, [Item(0, 0, data)], producer=1, sequence=i))
    for i, shard in enumerate(shards):
        for batch in [[step] for step in steps] if i % 2 else [steps]:
            send(shard, *batch)
    one, *others = (held(s.segment)[0] for s in shards)
    assert one.dtype == dtype
    assert np.abs(one).max() > 0.1
    assert all(one.tobytes() == other.tobytes() for other in others)
    state = {slots_of(shard.segment)[0][0].tobytes() for shard in shards}
    assert len(state) == 1


def test_slots_and_weights_change_buffers_at_different_times():
    """A piece that a publication leaves alone keeps the buffer of its slots."""
    alone, durable = (make(rule=Momentum(), durable=i > 0) for i in range(2))
    rng = np.random.default_rng(0)
    for sequence, touched in enumerate([(A, B), (A,), (B,), (A,), (A, B), (B,), (A,)]):
        sizes = {A: 5, B: 1}
        given = items({p: rng.normal(size=sizes[p]) for p in touched})
        for shard in (alone, durable):
            send(shard, Step(GRADIENT, given, producer=1, sequence=sequence))
        assert weights(durable) == weights(alone)
        one, two = (slots_of(shard.segment) for shard in (alone, durable))
        assert [[s.tolist() for s in of] for of in one] == [
            [s.tolist() for s in of] for of in two
        ]
    assert len({durable.segment.current.slot_sides[p] for p in (A, B)}) == 2


DTYPES = ["float16", "float32", "float64", "int8", "uint64", "bool"]
MANY = Layout.build({d: ((3, 2), d) for d in DTYPES} | {"e": ((0,), "int8")}, 2)


@given(
    st.lists(
        st.dictionaries(st.integers(0, 5), st.integers(0, 1), max_size=3), max_size=8
    ),
    st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_pieces_that_a_publication_leaves_alone_are_not_stale(publications, together):
    """Over many publications that each touch other parameters, now and one before.

    Whoever publishes may or may not keep all weights in one buffer.
    """
    shard = make(MANY, 1, ruled=[])
    wanted = [np.zeros_like(w) for w in shard.segment.weights[0]]
    last = [w.copy() for w in wanted]
    for sequence, touched in enumerate(publications):
        # Every other publication touches nothing: a producer's note, a run's end.
        data = {
            p: np.full(wanted[p].shape, v, wanted[p].dtype) for p, v in touched.items()
        }
        last = [w.copy() for w in wanted]
        shard.segment.is_together = together[sequence]
        for p, v in data.items():
            wanted[p] = wanted[p] + v
        found = [Item(p, 0, d) for p, d in data.items()]
        send(shard, Step(ADD, found, producer=1, sequence=sequence))
        flip = shard.segment.flip
        for side, model in ((flip, wanted), (flip - 1, last)):
            for a, b in zip(held(shard.segment, side), model, strict=True):
                np.testing.assert_array_equal(a, b)
                assert a.dtype == b.dtype


def add(shard: Shard, sequence: int, *positions: int) -> None:
    sizes = [piece.size for piece in shard.segment.pieces]
    found = items({p: np.ones(sizes[p]) for p in positions})
    send(shard, Step(ADD, found, producer=1, sequence=sequence))


def test_what_a_publication_leaves_alone_stays_in_its_buffer():
    shard = make()
    segment = shard.segment
    segment.is_together = False
    seen = []
    for sequence, touched in enumerate([(A,), (), (A, B), (B,), (A,)]):
        add(shard, sequence, *touched)
        seen.append(
            (segment.current.weight_sides.tolist(), segment.current.plain[SIDE])
        )
    assert seen == [
        ([1, 0, 0], MIXED),
        ([1, 0, 0], MIXED),
        ([0, 1, 0], MIXED),
        ([0, 0, 0], 0),
        ([1, 0, 0], MIXED),
    ]
    # Nothing else was written: the other buffers have what the pieces were before.
    assert [w.tolist() for w in segment.weights[0]] == [[2] * 5, [2], [0] * 4]
    assert [w.tolist() for w in segment.weights[1]] == [[3] * 5, [1], [0] * 4]


def test_a_small_shard_has_all_weights_in_one_buffer():
    shard = make()
    for sequence, touched in enumerate([(A,), (), (A, B), (B,), ()]):
        add(shard, sequence, *touched)
        current = shard.segment.current
        assert current.weight_sides.tolist() == [current.plain[SIDE]] * 3
    assert weights(shard) == [[2] * 5, [2], [0] * 4]
    assert shard.segment.current.side == 1


def test_a_run_begins_with_all_weights_in_one_buffer():
    """In that which has most of them: the less is copied, and nothing changes."""
    shard = make()
    segment = shard.segment
    segment.is_together = False
    add(shard, 0, A)
    before = weights(shard)
    assert segment.current.weight_sides.tolist() == [1, 0, 0]
    shard.begin_run(1, ASP(), 1)
    validate(shard)
    assert segment.current.plain[SIDE] == 0
    assert segment.current.changed.tolist() == [1, 0, 0]
    assert weights(shard) == weights(shard, 1) == before


class Copies:
    """The copies that a read makes."""

    def __init__(self) -> None:
        self.made: list[tuple[slice, Any]] = []

    def __setitem__(self, where: slice, source: Any) -> None:
        self.made.append((where, source))


def test_a_part_of_a_vector_is_read_in_few_copies():
    """However its pieces lie, and whatever part is asked for."""
    layout = Layout.build({str(i): ((i % 3 + 1,), "float64") for i in range(7)}, 1)
    shard = make(layout, ruled=[])
    segment, rng = shard.segment, np.random.default_rng(0)
    segment.is_together = False
    size = len(segment.vectors[0]["float64"])
    for sequence in range(30):
        touched = [p for p in range(7) if rng.random() < 0.5]
        add(shard, sequence, *touched)
        record, wanted = segment.current, np.concatenate(held(segment))
        for _ in range(10):
            start, stop = sorted(rng.integers(0, size + 1, 2).tolist())
            out = np.empty(stop - start)
            copies: Any = Copies()
            part = ("float64", start, stop), 0, slice(0, stop - start)
            assert ShardReader(segment, [part]).read_at(segment.flip, [copies])
            for where, source in copies.made:
                out[where] = source
            np.testing.assert_array_equal(out, wanted[start:stop])
            found = [
                record.weight_sides[i] for i, w in enumerate(held(segment)) for _ in w
            ]
            changes = np.count_nonzero(np.diff(found[start:stop]))
            assert len(copies.made) == changes + (stop > start or record.side != MIXED)


def test_everything_becomes_visible_in_one_store():
    shard = make()
    segment = shard.segment
    publication = Publication(segment)
    assert segment.writing == segment.flip + 1
    publication.record.fixed[0] = 9
    before = weights(shard), segment.current.version
    publication.commit()
    assert before == ([[0.0] * 5, [0.0], [0] * 4], 0)
    assert segment.current.version == 9
    assert segment.writing == segment.flip == 1


@pytest.mark.parametrize("refused", [{"lr": 0.25}, {"sequence": 1}, {"producer": 9}])
def test_a_push_that_is_refused_or_repeated_leaves_no_trace(refused, monkeypatch):
    """Nor in the record of the version before, which somebody may be reading."""
    monkeypatch.setattr(producers, "MAX_PRODUCERS", 1)
    shard = make()
    segment, one = shard.segment, items({A: np.ones(5)})
    for sequence in (0, 1):
        send(shard, Step(GRADIENT, one, producer=1, sequence=sequence))
    before = [record.words.copy() for record in segment.records]
    step = {"producer": 1, "sequence": 2, **refused}
    send(shard, Step(GRADIENT, one, **step))
    np.testing.assert_array_equal([record.words for record in segment.records], before)
    assert segment.writing == segment.flip == 2
    # What a reader says that has looked at the flip before that push came.
    ready, out = Ready(1, segment.record(1).version), np.empty(5)
    assert copy_parts(shard.segment, ready, [("float64", 0, 5, out)]) is ready
    assert ready.version == out[0] == 1


def test_durable_slots_in_force_are_not_written():
    """The record of a publication says where its slots are, piece by piece."""
    shard = make(durable=True, initial=1.0)
    segment = shard.segment
    publication = Publication(segment)
    before = [[s.copy() for s in of] for of in slots_of(segment)]
    publication.reset()
    segment.slots_of(publication.record, A)[0][:] = 9
    np.testing.assert_equal(slots_of(segment), before)
    # It stopped half-way.
    send(shard, Step(GRADIENT, items({A: np.ones(5)}), producer=1))
    assert segment.record(1).slot_sides.tolist() == [1, 0, 0]
    assert segment.record(0).slot_sides.tolist() == [0, 0, 0]
    assert segment.slots_of(segment.record(0), A)[0].tolist() == [1] * 5
    assert slots_of(segment)[A][0].tolist() == [2] * 5
    # What is no gradient leaves the slots where they are.
    send(shard, Step(ADD, items({A: np.ones(5), B: 1.0}), producer=1, sequence=1))
    assert segment.current.slot_sides.tolist() == [1, 0, 0]
    shard.begin_run(RUN, ASP(), 1, reset=True)
    assert segment.current.slot_sides.tolist() == [0, 1, 0]
    assert [s[0].tolist() for s in slots_of(segment)[:2]] == [[1] * 5, [1]]
    assert segment.slots_of(segment.record(2), A)[0].tolist() == [2] * 5


def test_a_publication_that_resets_may_update_too():
    shard = make(durable=True, initial=1.0)
    send(shard, Step(GRADIENT, items({A: np.ones(5)}), producer=1))
    publication = Publication(shard.segment)
    publication.reset()
    op = PieceUpdate(np.ones(5), 0, Adding(), (4.0,))
    publication.add([(A, op)])
    publication.commit()
    assert slots_of(shard.segment)[A][0].tolist() == [5] * 5
    assert weights(shard)[A] == [2] * 5
    assert shard.segment.current.slot_sides.tolist() == [0, 1, 0]


class InTwos(Formed):
    """An array that is formed two elements at a time, in the same memory."""

    checks, step, dtype = False, 2, np.dtype(float)

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.tile = data, np.empty(2)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, part: slice) -> np.ndarray:
        found = self.data[part]
        self.tile[: len(found)] = found
        return self.tile[: len(found)]


def test_what_is_formed_part_by_part_is_one_array_for_a_function():
    array = np.arange(5.0)
    formed = PieceUpdate(InTwos(array)).formed(NUMPY)
    np.testing.assert_array_equal(formed, array)
    assert PieceUpdate(array).formed(NUMPY) is array
