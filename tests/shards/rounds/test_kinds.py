"""What a round adds up: gradients, deltas or models, and one of these at a time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from daskps.errors import ConsistencyError
from daskps.shards.steps import ADD, GRADIENT, MODEL, NOTHING, Step
from tests.shards.making import (
    RUN,
    A,
    C,
    bsp,
    contents,
    done,
    failed,
    items,
    send,
    slots_of,
    weights,
)


def of(kind, rank, value, clock=0, **how):
    """A trainer's step that ticks, with values for all of "a"."""
    brings = items({A: np.full(5, value)}) if kind != NOTHING else ()
    said = {"tick": True, "sequence": clock, **how}
    return Step(kind, brings, run=RUN, rank=rank, clock=clock, **said)


def greatest(stacked, _):
    return stacked.max(0)


@pytest.mark.parametrize("reduce", ["sum", "mean", greatest])
@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_deltas_are_summed_whatever_the_run_does_with_gradients(reduce, order):
    shard = bsp(3, reduce)
    for rank in order:
        send(shard, of(ADD, rank, 10.0**rank, weight=1.0))
    assert weights(shard)[A] == [111.0] * 5
    assert slots_of(shard.segment)[A][0].tolist() == [0.0] * 5
    assert shard.segment.current.version == 1
    # The next one begins anew.
    for rank in order:
        send(shard, of(GRADIENT, rank, 1.0, clock=1))
    assert weights(shard)[A] == [111.0 + (3.0 if reduce == "sum" else 1.0)] * 5


@pytest.mark.parametrize("reduce", ["sum", "mean", greatest])
@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_models_are_averaged_whatever_the_run_does_with_gradients(reduce, order):
    shard = bsp(3, reduce)
    for rank in order:
        send(shard, of(MODEL, rank, 8.0 * rank, weight=[1.0, 0.0, 3.0][rank]))
    assert weights(shard)[A] == [12.0] * 5
    assert slots_of(shard.segment)[A][0].tolist() == [0.0] * 5


def test_integers_are_added_as_integers():
    shard = bsp(2, "mean")
    for rank in (0, 1):
        brings = items({C: [2**60, 1, 2, 3]}, np.int64)
        send(shard, Step(ADD, brings, run=RUN, rank=rank, tick=True))
    assert weights(shard)[C] == [2**61, 2, 4, 6]


@pytest.mark.parametrize("kinds", [*itertools.permutations([GRADIENT, ADD, MODEL], 2)])
def test_trainers_that_mix_kinds_complete_no_round_on_any_shard(kinds):
    """Each shard has another one first: all of them refuse, and none applies anything."""
    shards = bsp(3), bsp(3)
    before = [contents(shard) for shard in shards]
    refused = []
    for shard, first in zip(shards, (0, 1), strict=True):
        second = 1 - first
        (came,) = send(shard, of(kinds[first], first, 1.0))
        assert done(came).version == 0
        refused += send(shard, of(kinds[second], second, 1.0))
        # Whoever goes on after the error does not complete it either.
        refused += send(
            shard,
            of(NOTHING, second, 0.0, sequence=1),
            of(kinds[first], 2, 1.0),
        )
        assert shard.run_state.find_position(RUN).is_stuck
    assert failed(refused, ConsistencyError)
    assert "a round has one kind" in str(refused[0].outcome)
    assert [contents(shard) for shard in shards] == before


def test_a_trainer_that_mixes_kinds_itself_is_refused_alone():
    shard = bsp(2)
    send(shard, of(GRADIENT, 0, 1.0, tick=False))
    (mixed,) = send(shard, of(ADD, 0, 1.0, sequence=1))
    assert failed([mixed], ConsistencyError)
    assert not shard.run_state.find_position(RUN).is_stuck
    send(shard, of(NOTHING, 0, 0.0, sequence=2), of(GRADIENT, 1, 1.0))
    assert weights(shard)[A] == [2.0] * 5
