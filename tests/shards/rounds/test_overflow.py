"""Rounds of finite arrays whose sum is not: no shard applies them."""

from __future__ import annotations

from typing import Any

import dask
import numpy as np
import pytest

from daskps import optim
from daskps.consistency import BSP
from daskps.errors import PushRejectedError
from daskps.layout.arrays import Layout
from daskps.shards.memory import publication
from daskps.shards.memory.segment import Segment
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, GRADIENT, MODEL, Item, Step
from tests.invariants import validate
from tests.shards.making import RUN, contents, send, weights

N, M = 200, 70
LAYOUT = Layout.build({"v": ((N,), "float32"), "w": ((M,), "float32")}, 1)
BIG = 3e38


def shard(rule: optim.Rule, n_ranks: int, *, durable: bool, reduce: str) -> Shard:
    bindings = dict.fromkeys((0, 1), optim.bind(rule, "f4"))
    slots = {i: (0.0,) * len(rule.slots) for i in bindings}
    made = Shard(Segment(LAYOUT, 0, slots, durable=durable), bindings)
    made.begin_run(RUN, BSP(), n_ranks, reduce=reduce)
    return made


def step(rank: int, clock: int, value: float, kind: str, weight: float = 1.0) -> Step:
    """One array of ones, and one that has a larger number at its end."""
    w = np.ones(M, "f4")
    w[-1] = value
    given = [Item(0, 0, np.ones(N, "f4")), Item(1, 0, w)]
    how: Any = {"run": RUN, "rank": rank, "tick": True, "weight": weight}
    return Step(kind, given, clock=clock, sequence=clock, **how)


@pytest.fixture(params=[None, 0], ids=["small", "past the caches"], autouse=True)
def size(request, monkeypatch):
    if request.param is not None:
        monkeypatch.setattr(publication, "PAST_NBYTES", request.param)


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("rule", [optim.SGD(1e-38), optim.Adam(0.1)])
@pytest.mark.parametrize(
    ("kind", "reduce", "n_ranks", "weight"),
    [
        (GRADIENT, "mean", 1, 64.0),
        (GRADIENT, "mean", 2, 1.0),
        (GRADIENT, "mean", 5, 2.0),
        (GRADIENT, "sum", 3, 1.0),
        (MODEL, "mean", 3, 1.0),
        (ADD, "mean", 3, 1.0),
    ],
)
def test_a_sum_that_overflows_changes_nothing(
    kind, reduce, n_ranks, weight, rule, durable
):
    made = shard(rule, n_ranks, durable=durable, reduce=reduce)
    send(made, *[step(r, 0, 0.5, kind, weight) for r in range(n_ranks)])
    assert made.segment.current.version == 1
    validate(made)
    before = contents(made)
    tickets = send(made, *[step(r, 1, BIG, kind, weight) for r in range(n_ranks)])
    assert contents(made) == before
    error = tickets[-1].outcome
    assert type(error) is PushRejectedError
    assert "the sum of what was pushed for 'w' is not finite" in str(error)


def test_where_it_is_allowed_it_is_applied():
    with dask.config.set({"daskps.finite": "allow"}):
        made = shard(optim.SGD(1e-38), 3, durable=True, reduce="mean")
        send(made, *[step(r, 0, BIG, GRADIENT) for r in range(3)])
    assert weights(made)[1][-1] == -np.inf
