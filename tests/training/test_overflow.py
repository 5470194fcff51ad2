"""Finite numbers whose sum is not are refused, wherever they are added up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import daskps
from daskps import RowGrad, TableSpec, optim
from tests.support import mostly_inside

BIG = 3e38
IDS = np.array([1, 5])


def gradient(params: Any, X: Any, y: Any) -> Any:
    return {name: np.full_like(value, BIG) for name, value in params.items()}


@mostly_inside("rows", [8, None], train=True)
def test_rows_of_a_round(train, way, rows):
    with daskps.create({"e": TableSpec(rows, 2)}, optimizer=optim.Adam(0.1)) as store:
        with pytest.raises(
            daskps.PushRejectedError, match=r"the sum of what .* for 'e'"
        ):
            train(
                *(store, gradient, np.zeros((3, 1))),
                trainers=3,
                batch_size=1,
                rows={"e": lambda X: IDS},
            )
        assert not store["e"].pull(IDS).any()


@mostly_inside("rows", [2], train=True)
def test_a_gradient_times_the_rows_of_its_batch(train, way, rows):
    with daskps.create({"w": np.zeros(3, "f4")}, optimizer=optim.SGD(0.1)) as store:
        with pytest.raises(
            daskps.PushRejectedError, match=r"the sum of what .* for 'w'"
        ):
            train(store, gradient, np.zeros((2 * rows, 1)), trainers=2)
        assert store.version == 0


@mostly_inside("rows", [8, None])
@pytest.mark.parametrize("verb", ["push", "add"])
def test_ids_that_repeat(way, rows, verb):
    params = {"e": TableSpec(rows, 2)}
    with daskps.create(params, shards=1, optimizer=optim.SGD(1.0)) as store:
        act = getattr(store["e"], verb)
        with pytest.raises(
            daskps.PushRejectedError, match=r"the sum of what .* for 'e'"
        ):
            act([3, 3], np.full((2, 2), BIG))
        assert not store["e"].pull([3]).any()
        assert store["e"].assign([3, 3], np.full((2, 2), BIG)) == 1


def gathers(trainer: Any, part: Any) -> Any:
    for op in ("sum", "mean"):
        said = f"the {op} of what trainers bring to an allreduce overflows float32"
        with pytest.raises(daskps.PushRejectedError, match=said):
            trainer.allreduce(np.full(3, BIG, "f4"), op=op)
    infinite = trainer.allreduce(np.full(3, -np.inf if trainer.rank else np.nan))
    return np.isnan(infinite).all(), trainer.allreduce(np.float32(BIG), op="max")


@mostly_inside("sync", ["bsp", "asp"])
def test_all_reduces(way, sync):
    with daskps.create({"w": np.zeros(3, "f4")}) as store:
        found = daskps.run(store, gathers, [None] * 3, sync=sync)
    assert found == [(True, np.float32(BIG))] * 3


def pushes_much(trainer: Any, part: Any) -> None:
    with pytest.raises(daskps.PushRejectedError, match=r"the sum of what .* for 'w'"):
        trainer.push({"w": np.full(3, BIG)}, weight=10.0)
    with pytest.raises(daskps.PushRejectedError, match=r"the sum of what .* for 'e'"):
        trainer.push({"e": RowGrad(IDS, np.full((2, 2), BIG))}, weight=10.0)


@mostly_inside("sync", ["ssp", "asp"])
def test_a_gradient_times_its_weight(way, sync):
    params = {"w": np.zeros(3, "f4"), "e": TableSpec(8, 2)}
    with daskps.create(params, optimizer=optim.SGD(1.0)) as store:
        daskps.run(store, pushes_much, [None], sync=sync)
        assert store.version == 0


@mostly_inside("reduce", ["sum", "mean"])
def test_aggregates(way, reduce):
    with daskps.create({"w": np.zeros(3, "f4")}) as store:
        given = [{"w": np.full(3, BIG)}] * 3
        for into in (None, store):
            with pytest.raises(
                daskps.PushRejectedError, match=r"'w' .*(overflows|finite)"
            ):
                store.aggregate(given, reduce=reduce, into=into)
        assert store.version == 0
