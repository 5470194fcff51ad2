"""Functions of whole arrays in a shard: each push of a batch follows the one before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskps.errors import PushRejectedError
from daskps.layout.arrays import Layout
from daskps.optim import SGD, Function, bind
from daskps.shards.memory.segment import Segment
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, GRADIENT, Item, Step, Ticket
from tests.kernels.compiling import kept


def triple(name: str, w: Any, g: Any, step: int) -> Any:
    """Depends on the order, and on the number of the update."""
    if g[0] == 7:
        raise ArithmeticError("not seven")
    return 3 * w + g * step


def make(*, durable: bool = False) -> Shard:
    shapes = {"w": ((3,), "float64"), "v": ((2,), "float64")}
    layout = Layout.build(shapes, 1)
    segment = Segment(layout, 0, {}, durable=durable)
    rules = {0: Function(triple), 1: SGD(1.0)}
    bound = {i: bind(rule, "f8", cache_dir=kept()) for i, rule in rules.items()}
    return Shard(segment, bound, 0, cache_dir=kept())


def push(
    producer: int, value: float, kind: str = GRADIENT, *, both: bool = False
) -> Any:
    items = [Item(0, 0, np.full(3, value))]
    items += [Item(1, 0, np.full(2, value))] * both
    return Ticket(Step(kind, items, producer=producer, sequence=0, generation=0))


def values(shard: Shard) -> list[list[float]]:
    segment = shard.segment
    record = segment.current
    return [segment.weights_of(record, p).tolist() for p in (0, 1)]


@pytest.mark.parametrize("durable", [False, True])
def test_pushes_of_one_batch_see_each_other(durable: bool) -> None:
    """1; 3 + 4; + 1; and, after one that is refused, 3 * 8 + 3 * 3."""
    shard = make(durable=durable)
    batch = [push(1, 1.0), push(2, 2.0), push(3, 1.0, ADD), push(4, 7.0, both=True)]
    batch.append(push(5, 3.0, both=True))
    done = shard.submit(batch)
    assert len(done) == 5
    assert isinstance(batch[3].outcome, ArithmeticError)
    assert values(shard) == [[33.0] * 3, [-3.0] * 2]
    assert shard.segment.current.version == 4
    assert shard.segment.current.steps.tolist() == [3, 1]
    # Sent again: applied once.
    again = push(1, 1.0)
    shard.submit([again])
    assert again.duplicate
    assert values(shard)[0] == [33.0] * 3


def test_a_part_is_refused() -> None:
    shard = make()
    part = Ticket(Step(GRADIENT, [Item(0, 1, np.ones(2))], producer=1, generation=0))
    shard.submit([part])
    assert isinstance(part.outcome, PushRejectedError)
    assert "takes all of 'w'" in str(part.outcome)
    assert shard.segment.current.version == 0
