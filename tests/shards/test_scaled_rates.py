"""The factor of learning rates in one shard: in its place among pushes, and once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskps.consistency import BSP
from daskps.errors import ConsistencyError
from daskps.layout.arrays import Layout
from daskps.optim import SGD, bind
from daskps.optim.factors import of_word, to_word
from daskps.shards.memory.segment import Segment
from daskps.shards.shard import Shard
from daskps.shards.steps import GRADIENT, SCALE, Item, Step, Ticket
from tests.kernels.compiling import kept


def make(buffer: Any = None) -> Shard:
    layout = Layout.build({"w": ((3,), "float64")}, 1)
    segment = Segment(layout, 0, {}, buffer, durable=True)
    return Shard(segment, {0: bind(SGD(1.0), "f8", cache_dir=kept())}, 0)


def ticket(producer: int, by: float | None = None, *, clock: int = 0) -> Ticket:
    said: dict[str, Any] = {"producer": producer, "generation": 0, "clock": clock}
    if by is not None:
        return Ticket(Step(SCALE, [Item(0, 0, np.empty(0))], lr=by, **said))
    return Ticket(Step(GRADIENT, [Item(0, 0, np.ones(3))], **said))


def weight(shard: Shard) -> float:
    segment = shard.segment
    return float(segment.weights_of(segment.current, 0)[0])


@pytest.mark.parametrize("together", [False, True])
def test_a_push_has_the_rate_of_its_place(together):
    """1; then 0.5 and 0.5; then 0.25: whether or not they come in one batch."""
    shard = make()
    batch = [ticket(1), ticket(2, 0.5), ticket(3), ticket(4), ticket(5, 0.5), ticket(6)]
    for part in [batch] if together else [[one] for one in batch]:
        shard.submit(part)
    assert weight(shard) == -2.25
    assert shard.segment.current.version == 6
    # A repeat is none, and who maps the memory goes on with it.
    again = ticket(5, 0.5)
    shard.submit([again])
    assert again.duplicate
    adopted = make(shard.segment.buffer)
    adopted.submit([ticket(7)])
    assert weight(adopted) == -2.5


def test_within_rounds_only_for_the_run_that_waits():
    shard = make()
    shard.begin_run(7, BSP(), 1)
    for clock in (0, 6):
        refused = ticket(1, 0.5, clock=clock)
        shard.submit([refused])
        assert isinstance(refused.outcome, ConsistencyError)
    assert shard.segment.current.factors[0] == 0
    shard.submit([ticket(2, 0.5, clock=7)])
    step = Step(GRADIENT, [Item(0, 0, np.ones(3))], run=7, rank=0, tick=True)
    shard.submit([Ticket(step._replace(generation=0))])
    assert weight(shard) == -0.5
    shard.end_run(7, "it is over")
    shard.begin_run(8, BSP(), 1, reset=True)
    shard.submit([Ticket(step._replace(generation=0, run=8))])
    assert weight(shard) == -1.5


def test_words_have_all_bits_of_a_factor():
    assert to_word(1.0) == 0
    for factor in (0.1, 1 / 3, 5e-324, 1.7e308, 0.7):
        assert of_word(to_word(factor)) == factor
