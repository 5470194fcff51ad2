from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.errors import IllegalStateError
from daskps.layout import DTYPES, FLOATS, Layout
from daskps.shards.base import ADD, GRADIENT, Step
from daskps.shards.dense import Shard
from daskps.shards.segment import Segment, private
from tests.shards.making import LAYOUT, RULED, A, Adding, items, make, send, weights


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.integers(0, 40), st.integers(0, 2)),
        max_size=6,
    ),
    st.integers(1, 5),
)
def test_views_are_aligned_disjoint_and_fill_the_segment(given, k):
    shapes = {f"p{i}": ((n,), dtype) for i, (dtype, n, _) in enumerate(given)}
    layout = Layout.build(shapes, k)
    slots = {i: (0.5,) * n for i, (dtype, _, n) in enumerate(given) if dtype in FLOATS}
    for shard in range(k):
        segment = Segment(layout, shard, slots)
        assert segment.nbytes == len(segment.buffer)
        assert segment.nbytes == Segment.needed_nbytes(layout, shard, slots)
        views = [v for side in segment.vectors for v in side.values()]
        views += [s for of in segment.slots for s in of]
        for record in segment.records:
            views += [record.fixed, record.expired]
            views += [record.ranks.reshape(-1), record.producers.reshape(-1)]
        spans = []
        for view in views:
            assert view.flags.carray
            start = view.ctypes.data - segment.buffer.ctypes.data
            if view.nbytes:
                spans.append((start, start + view.nbytes))
        for side in segment.vectors:
            assert all(v.ctypes.data % 64 == 0 for v in side.values())
        assert all(s.ctypes.data % 64 == 0 for of in segment.slots for s in of)
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert not spans or spans[-1][1] <= segment.nbytes
        Shard(segment, {}).validate()


def test_slots_begin_with_their_initial_values():
    segment = Segment(LAYOUT, 0, {0: (0.25, 2.0)})
    assert [s.tolist() for s in segment.slots[A]] == [[0.25] * 5, [2.0] * 5]


def test_slots_of_half_precision_weights_are_single():
    layout = Layout.build({"h": ((3,), "float16")}, 1)
    segment = Segment(layout, 0, {0: (0.0,)})
    assert segment.weights[0][0].dtype == np.float16
    assert segment.slots[0][0].dtype == np.float32


def test_nothing_a_shard_knows_lives_elsewhere():
    """Another shard over a copy of the memory is the same shard."""
    one = make()
    send(one, Step(GRADIENT, items({A: np.ones(5)}), producer=1))
    slots = dict.fromkeys(RULED, (0.0,))
    buffer = private(one.segment.nbytes)
    buffer[:] = one.segment.buffer
    other = Shard(Segment(LAYOUT, 0, slots, buffer), dict.fromkeys(RULED, Adding()))
    assert weights(other) == weights(one)
    for shard in (one, other):
        again = Step(GRADIENT, items({A: np.ones(5)}), producer=1)
        new = Step(GRADIENT, items({A: np.ones(5)}), producer=1, sequence=1)
        tickets = send(shard, again, new)
        assert [t.duplicate for t in tickets] == [True, False]
    assert other.segment.buffer.tobytes() == one.segment.buffer.tobytes()


def test_empty_shards_take_every_call():
    layout = Layout.build({"w": ((1,), "float64")}, 3)
    shard = make(layout, 2, ruled=[0])
    (ticket,) = send(shard, Step(ADD, producer=1))
    assert ticket.outcome is not None
    assert weights(shard) == []


def words(segment, at, value):
    segment.current.fixed[at] = value


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda s: setattr(s, "writing", s.flip + 2), "writing"),
        (lambda s: words(s, 0, 0), "more steps than"),
        (lambda s: words(s, 6, 2000), "2000 producers"),
        (lambda s: words(s, 2, 5), "half a run"),
        (lambda s: s.current.changed.fill(99), "a flip that never was"),
        (lambda s: s.weights[0][2].fill(7), "piece 2 is stale"),
    ],
)
def test_a_broken_segment_does_not_validate(break_it, message):
    shard = make()
    send(shard, Step(GRADIENT, items({A: np.ones(5)}), producer=1))
    send(shard, Step(GRADIENT, items({A: np.ones(5)}), producer=1, sequence=1))
    break_it(shard.segment)
    with pytest.raises(IllegalStateError, match=message):
        shard.validate()
