"""Weights that are kept once more in a wider dtype, in one shard."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskps.cluster.host.rules import initial_slots
from daskps.layout.arrays import Layout
from daskps.layout.slots import Master, has_master, marked, slot_dtype, with_marks
from daskps.optim import SGD, Adam, WithMaster, bind
from daskps.shards.memory.publication import Publication
from daskps.shards.memory.segment import Segment
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, ASSIGN, GRADIENT, Item, Step, Ticket
from tests.kernels.compiling import kept

#: The dtype of weights, and of their master.
DTYPES = [("f2", "f4"), ("f4", "f8")]
N = 40_000  # more than a tile


def make(dtype: str, rule: Any, *, durable: bool = False, n: int = N) -> Shard:
    """A shard of one parameter of ones, and of another one that has no master."""
    name = np.dtype(dtype).name
    layout = Layout.build({"w": ((n,), name), "v": ((2,), name)}, 1)
    rules = {0: WithMaster(rule), 1: rule}
    slots = {i: initial_slots(r) for i, r in rules.items()}
    segment = Segment(layout, 0, slots, durable=durable)
    for weights in segment.weights[0]:
        weights[:] = 1
    segment.begin_copies()
    bound = {i: bind(r, dtype, cache_dir=kept()) for i, r in rules.items()}
    return Shard(segment, bound, 0, cache_dir=kept())


def step(shard: Shard, producer: int, *items: Any, kind: str = GRADIENT) -> Ticket:
    made = [Item(position, start, data) for position, start, data in items]
    return Ticket(Step(kind, made, producer=producer, sequence=0, generation=0))


def master(shard: Shard) -> Any:
    """Return the master; the weights must be what it is rounded to."""
    segment = shard.segment
    found = segment.slots_of(segment.current, 0)[0]
    weights = segment.weights_of(segment.current, 0)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(weights, found.astype(weights.dtype))
    return found


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize(("dtype", "wide"), DTYPES)
def test_small_steps_are_not_lost(dtype, wide, durable):
    """20 steps of 1e-4 from 1: as NumPy has them in the master's dtype, to the bit."""
    shard = make(dtype, SGD(1e-4), durable=durable)
    ones = np.ones(N, "f4")
    expected = np.ones(1, wide)
    for i in range(20):
        shard.submit([step(shard, i + 1, (0, 0, ones), (1, 0, ones[:2]))])
        expected -= np.array(1e-4, wide)
    np.testing.assert_array_equal(master(shard), np.repeat(expected, N))
    assert abs(expected[0] - 0.998) < (4e-7 if wide == "f4" else 1e-15)
    found = shard.segment.weights_of(shard.segment.current, 0)[0]
    if dtype == "f2":
        assert found == np.float16(0.99805)
        # Without one nothing has come of them: half the spacing below 1 is 2.4e-4.
        assert shard.segment.weights_of(shard.segment.current, 1).tolist() == [1, 1]


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_what_goes_past_the_rule_goes_to_the_master(durable, together):
    """A gradient, a sum for a part, values for all, a gradient; alone and in one pass."""
    shard = make("f2", Adam(0.5), durable=durable)
    same = make("f4", Adam(0.5), durable=durable)
    ones = np.ones(N, "f4")
    small, values = np.full(N // 2, 1e-4), np.full(N, 3.0)
    for mine, dtype in ((shard, "f2"), (same, "f4")):
        # What they bring is of the weights' dtype; here both have the same numbers.
        added, put = small.astype("f2").astype(dtype), values.astype(dtype)
        batch = [
            step(mine, 1, (0, 0, ones)),
            step(mine, 2, (0, 10, added), kind=ADD),
            step(mine, 3, (0, 0, added[:7]), kind=ADD),
            step(mine, 4, (0, 0, ones)),
            step(mine, 5, (0, 0, put), kind=ASSIGN),
            step(mine, 6, (0, 0, added), kind=ADD),
        ]
        for part in [batch] if together else [[ticket] for ticket in batch]:
            mine.submit(part)
        assert [ticket.outcome for ticket in batch if ticket.outcome is None] == []
    theirs = same.segment.slots_of(same.segment.current, 0)
    # A float64 master of float32 has more digits than the float32 master of float16.
    np.testing.assert_allclose(master(shard), theirs[0], rtol=1e-6)
    assert master(shard)[0] == np.float32(3) + np.float32(np.float16(1e-4))
    assert master(shard)[-1] == 3
    for slot, other in zip(
        shard.segment.slots_of(shard.segment.current, 0)[1:], theirs[1:], strict=True
    ):
        np.testing.assert_allclose(slot, other, rtol=1e-6)


@pytest.mark.parametrize("durable", [False, True])
def test_an_addition_alone_keeps_the_other_slots(durable):
    shard = make("f2", SGD(1.0, momentum=0.5), durable=durable, n=3)
    g = np.full(3, 0.25, "f4")
    shard.submit([step(shard, 1, (0, 0, g))])
    for producer, kind in ((2, ADD), (3, ASSIGN)):
        shard.submit([step(shard, producer, (0, 0, g.astype("f2")), kind=kind)])
        slots = shard.segment.slots_of(shard.segment.current, 0)
        assert slots[1].tolist() == [0.25] * 3
    assert master(shard).tolist() == [0.25] * 3
    # Too large for the weights, not for the master: it is infinity there alone.
    shard.submit([step(shard, 4, (0, 0, np.full(3, 60000, "f2")), kind=ASSIGN)])
    shard.submit([step(shard, 5, (0, 0, np.full(3, 60000, "f2")), kind=ADD)])
    assert master(shard).tolist() == [120000] * 3


@pytest.mark.parametrize("durable", [False, True])
def test_optimizer_state_begins_anew_without_the_master(durable):
    shard = make("f2", SGD(1e-4, momentum=0.5), durable=durable, n=3)
    ones = np.ones(3, "f4")
    shard.submit([step(shard, 1, (0, 0, ones))])
    before = master(shard).copy()
    publication = Publication(shard.segment)
    publication.reset()
    publication.commit()
    assert master(shard).tolist() == before.tolist() != [1] * 3
    slots = shard.segment.slots_of(shard.segment.current, 0)
    assert slots[1].tolist() == [0] * 3


def test_first_values_say_which_slot_is_a_master():
    values = initial_slots(WithMaster(Adam(0.1)))
    assert has_master(values)
    assert not has_master(initial_slots(Adam(0.1)))
    assert marked(values) == [-1]
    assert has_master(with_marks([0.0, 0.0, 0.0], [-1]))
    assert with_marks((), [-1]) == ()
    assert slot_dtype("float32", values) == "float64"
    assert slot_dtype("float16", values) == slot_dtype("float32", ()) == "float32"
    # Of a dtype that has none, as nobody makes it.
    assert slot_dtype("int64", (Master(),)) == "int64"
