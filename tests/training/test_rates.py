"""Learning rates that go by the epochs of `train`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import daskps
from daskps import PushRejectedError, TableSpec, optim
from daskps.optim.schedules import by_epoch, piecewise
from tests.support import INSIDE, mostly_inside

X = np.zeros((8, 1))
#: Two rounds in each epoch: three epochs make -2 - 20 - 200.
RULE = optim.SGD(by_epoch(piecewise([1.0, 10.0, 100.0], [1, 2])))
HOW: dict[str, Any] = {"batch_size": 2, "trainers": 2, "callbacks": ()}


def ones(params, X, y):
    return {name: np.ones_like(value) for name, value in params.items()}


@mostly_inside("how", [{}, {"sync_every": 2, "average": "models"}], train=True)
def test_a_schedule_goes_by_epochs_of_the_store(train, way, how):
    """Also over two calls, and in the steps that trainers take by themselves."""
    with daskps.create({"w": np.zeros(3)}, optimizer=RULE, shards=2) as store:
        for epochs, reached in ((1, -2.0), (2, -222.0)):
            train(store, ones, X, epochs=epochs, **HOW, **how)
            np.testing.assert_allclose(store["w"].pull(), np.full(3, reached))


@pytest.mark.parametrize("way", INSIDE, indirect=True)
@pytest.mark.parametrize("sync", ["bsp", "asp", "ssp"])
@pytest.mark.parametrize(
    "rule", [RULE, optim.chain(optim.clip_by_value(-1, 1), optim.scaled(RULE, 1.0))]
)
def test_rows_and_policies_go_by_epochs_too(way, sync, rule):
    params = {"w": np.zeros(2), "emb": TableSpec(4, 2)}
    with daskps.create(params, optimizer=rule) as store:
        how = {**HOW, "trainers": 1, "rows": {"emb": lambda X: np.array([1])}}
        daskps.train(store, ones, X[:4], epochs=3, sync=sync, **how)
        np.testing.assert_allclose(store["w"].pull(), [-222.0, -222.0])
        np.testing.assert_allclose(store["emb"].pull([1, 2]), [[-222] * 2, [0, 0]])


@pytest.mark.parametrize("way", INSIDE, indirect=True)
def test_pushes_without_epochs_are_refused(way):
    """Outside of runs, beside one of their own, and in loops of the user's."""
    match = r"SGD\(lr=by_epoch\(.*goes by epochs, which only daskps.train counts"
    params = {"w": np.zeros(2), "emb": TableSpec(4, 2)}
    with daskps.create(params, optimizer=RULE) as store:
        for push in (
            lambda: store.push({"w": np.ones(2)}),
            lambda: store["emb"].push([1], np.ones((1, 2))),
            lambda: daskps.run(store, lambda t, p: t.push({"w": np.ones(2)}), [0]),
        ):
            with pytest.raises(PushRejectedError, match=match):
                push()
            assert store.version == 0

        def beside(params, X, y):
            with pytest.raises(PushRejectedError, match=match):
                store.push({"w": np.ones(2)})
            return {}

        daskps.train(store, beside, X[:2], sync="asp", **{**HOW, "trainers": 1})
        store.push({"w": np.ones(2)}, lr=0.5)
        np.testing.assert_allclose(store["w"].pull(), [-0.5, -0.5])
