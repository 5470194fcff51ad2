from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.backend.host import private
from daskps.errors import IllegalStateError, ProtocolError
from daskps.layout.arrays import DTYPES, FLOATS, Layout
from daskps.layout.spans import WEIGHTS, Span, slot_area
from daskps.shards.memory import format as format_
from daskps.shards.memory.areas import RECORD
from daskps.shards.memory.segment import Segment
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, GRADIENT, Step
from tests.invariants import validate
from tests.shards.making import (
    LAYOUT,
    RULED,
    A,
    Adding,
    counts,
    items,
    make,
    send,
    slots_of,
    weights,
)


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.integers(0, 40), st.integers(0, 2)),
        max_size=6,
    ),
    st.integers(1, 5),
    st.booleans(),
)
def test_views_are_aligned_disjoint_and_fill_the_segment(given, k, durable):
    shapes = {f"p{i}": ((n,), dtype) for i, (dtype, n, _) in enumerate(given)}
    layout = Layout.build(shapes, k)
    slots = {i: (0.5,) * n for i, (dtype, _, n) in enumerate(given) if dtype in FLOATS}
    for shard in range(k):
        segment = Segment(layout, shard, slots, durable=durable)
        assert segment.nbytes == len(segment.buffer)
        needed = Segment.needed_nbytes(layout, shard, slots, durable=durable)
        assert segment.nbytes == needed
        views = [v for side in segment.vectors for v in side.values()]
        state = [s for of in slots_of(segment) for s in of]
        segment.current.slot_sides[:] = durable
        if durable:
            state += [s for of in slots_of(segment) for s in of]
        segment.current.slot_sides[:] = 0
        views += state
        for record in segment.records:
            views += [record.fixed, record.expired, record.kept.reshape(-1)]
            views += [record.ranks.reshape(-1), record.producers.reshape(-1)]
        spans = []
        for view in views:
            assert view.flags.carray
            start = view.ctypes.data - segment.buffer.ctypes.data
            if view.nbytes:
                spans.append((start, start + view.nbytes))
        for side in segment.vectors:
            assert all(v.ctypes.data % 64 == 0 for v in side.values())
        assert all(s.ctypes.data % 64 == 0 for s in state)
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert all(a.stop <= b.offset for a, b in pairwise(segment.areas))
        arrays = [v for area in segment.areas for v in area.views(segment.buffer)]
        assert sum(v.nbytes for v in arrays) == sum(v.nbytes for v in views) + 256
        assert not spans or spans[-1][1] <= segment.nbytes
        validate(Shard(segment, {}))


def test_slots_begin_with_their_initial_values():
    segment = Segment(LAYOUT, 0, {0: (0.25, 2.0)})
    assert [s.tolist() for s in slots_of(segment)[A]] == [[0.25] * 5, [2.0] * 5]


def test_slots_of_half_precision_weights_are_single():
    layout = Layout.build({"h": ((3,), "float16")}, 1)
    segment = Segment(layout, 0, {0: (0.0,)})
    assert segment.weights[0][0].dtype == np.float16
    assert slots_of(segment)[0][0].dtype == np.float32


@pytest.mark.parametrize("durable", [False, True])
def test_nothing_a_shard_knows_lives_elsewhere(durable):
    """Another shard over a copy of the memory is the same shard."""
    one = make(durable=durable)
    send(one, Step(GRADIENT, items({A: np.ones(5)}), producer=1))
    slots = dict.fromkeys(RULED, (0.0,))
    buffer = private(one.segment.nbytes)
    buffer[:] = one.segment.buffer
    taken = Segment(LAYOUT, 0, slots, buffer, durable=durable)
    other = Shard(taken, dict.fromkeys(RULED, Adding()))
    assert weights(other) == weights(one)
    assert slots_of(taken)[A][0].tolist() == [1] * 5
    assert counts(other) == (1, 0)
    for shard in (one, other):
        again = Step(GRADIENT, items({A: np.ones(5)}), producer=1)
        new = Step(GRADIENT, items({A: np.ones(5)}), producer=1, sequence=1)
        tickets = send(shard, again, new)
        assert [t.duplicate for t in tickets] == [True, False]
        assert counts(shard) == (2, 1)
    assert other.segment.buffer.tobytes() == one.segment.buffer.tobytes()


def held(**kwargs):
    """Memory with a shard in it."""
    return make(**kwargs).segment.buffer.copy()


def words_of(buffer, **words):
    found = buffer.view(np.int64)
    for at, value in words.items():
        found[getattr(format_, at)] = value
    return buffer


@pytest.mark.parametrize(
    ("buffer", "durable", "message"),
    [
        (words_of(held(), FORMAT_AT=9), False, "a shard in format 9.*format 17"),
        (words_of(held(), N_PIECES_AT=9), False, "9 pieces"),
        (words_of(held(), MAGIC_AT=0x7F), False, "no shard.*0x7f"),
        (held(), True, "1 slot buffers, expected were 3 and 2"),
        (held(durable=True), False, "2 slot buffers, expected were 3 and 1"),
        (held()[:-64], False, "cut short"),
        (held()[:64], False, "cut short"),
    ],
)
def test_memory_that_holds_something_else_is_refused_and_left_alone(
    buffer, durable, message
):
    before = buffer.tobytes()
    with pytest.raises(ProtocolError, match=message):
        Segment(LAYOUT, 0, dict.fromkeys(RULED, (0.0,)), buffer, durable=durable)
    assert buffer.tobytes() == before


def test_a_segment_whose_maker_was_killed_is_made_anew():
    """Its magic number is written last."""
    buffer = words_of(held(initial=3.0), MAGIC_AT=0, FORMAT_AT=0)
    segment = Segment(LAYOUT, 0, dict.fromkeys(RULED, (0.5,)), buffer)
    assert slots_of(segment)[A][0].tolist() == [0.5] * 5
    validate(Shard(segment, {}))


def test_empty_shards_take_every_call():
    layout = Layout.build({"w": ((1,), "float64")}, 3)
    shard = make(layout, 2, ruled=[0])
    (ticket,) = send(shard, Step(ADD, producer=1))
    assert ticket.outcome is not None
    assert weights(shard) == []


def words(segment, at, value):
    segment.current.fixed[at] = value


def weigh(segment, position, side):
    segment.current.weight_sides[position] = side


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda s: setattr(s, "writing", s.flip + 2), "writing"),
        (lambda s: words(s, 0, 0), "more steps than"),
        (lambda s: words(s, 6, 2000), "2000 producers"),
        (lambda s: words(s, 2, 5), "half a run"),
        (lambda s: s.current.changed.fill(99), "a flip that never was"),
        (lambda s: weigh(s, 0, 2), r"weights in buffers \[2, 0, 0\]"),
        (lambda s: weigh(s, 2, 1), "in buffer -1, where the record says 0"),
        (lambda s: words(s, format_.SIDE, 1), "in buffer 0, where the record says 1"),
        (lambda s: s.current.slot_sides.fill(1), "piece 0 has slots in buffer 1"),
        (lambda s: s.words.put(format_.N_SIDES_AT, 2), "2 slot buffers"),
    ],
)
def test_a_broken_segment_does_not_validate(break_it, message):
    shard = make()
    send(shard, Step(GRADIENT, items({A: np.ones(5)}), producer=1))
    send(shard, Step(GRADIENT, items({A: np.ones(5)}), producer=1, sequence=1))
    break_it(shard.segment)
    with pytest.raises(IllegalStateError, match=message):
        validate(shard)


def spans(shard, slots=True):
    """All that a shard has: both areas of each piece, and the record."""
    segment = shard.segment
    found = [Span(RECORD, 0, 0, len(segment.current.words))]
    for position, piece in enumerate(segment.pieces):
        names = [
            WEIGHTS,
            *(slot_area(i) for i in range(len(segment.slot_init[position]))),
        ]
        found += [Span(name, position, 0, piece.size) for name in names[: 1 + slots]]
    return found


def copied(shard, flip, spans):
    record = shard.segment.record(flip)
    outs = [shard.segment.view(record, span).copy() for span in spans]
    return outs, shard.segment.copy(flip, list(zip(spans, outs, strict=True)))


@pytest.mark.parametrize("durable", [False, True])
def test_spans_of_all_areas_are_a_whole_copy(durable):
    """Another segment with what was copied is the same shard."""
    shard = make(durable=durable)
    for sequence in range(3):
        send(
            shard, Step(GRADIENT, items({A: np.ones(5)}), producer=1, sequence=sequence)
        )
    wanted, flip = spans(shard), shard.segment.flip
    outs, whole = copied(shard, flip, wanted)
    assert whole
    other = make(durable=durable).segment
    other.flip = other.writing = flip
    other.current.words[:] = outs[0]
    for span, out in zip(wanted[1:], outs[1:], strict=True):
        other.view(other.current, span)[:] = out
    assert [a.tolist() for a in outs[1:]] == [
        shard.segment.view(shard.segment.current, span).tolist() for span in wanted[1:]
    ]
    assert weights(Shard(other, {})) == weights(shard)
    part = Span(WEIGHTS, A, 2, 4)
    assert other.view(other.current, part).tolist() == [3, 3]
    assert other.view(other.current, Span(slot_area(0), A, 5, 5)).tolist() == []


def test_copy_that_an_update_ran_into_is_told():
    """Slots of one buffer are written by the very next update, all else by the one after."""
    for durable in (False, True):
        shard = make(durable=durable)
        send(shard, Step(GRADIENT, items({A: np.ones(5)}), producer=1))
        flip = shard.segment.flip
        for behind in range(3):
            assert copied(shard, flip, spans(shard))[1] == (behind <= durable)
            assert copied(shard, flip, spans(shard, slots=False))[1] == (behind < 2)
            add = Step(ADD, items({A: np.ones(5)}), producer=1, sequence=1 + behind)
            send(shard, add)
