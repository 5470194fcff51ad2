"""Runs on stores that have tables beside arrays."""

from __future__ import annotations

import numpy as np
import pytest

import daskps
from daskps import RowGrad, TableSpec, optim

X = np.random.default_rng(0).normal(size=(32, 2))
Y = X @ [1.0, -2.0]
ROWS = RowGrad([1, 5, 1], np.ones((3, 2)))


@pytest.fixture
def store(client):
    params = {"w": np.zeros(2), "emb": TableSpec(6, 2, "float64", init=1.0)}
    with daskps.create(params, optimizer=optim.SGD(0.1), client=client) as s:
        yield s


def gradient(params, X, y):
    assert [*params] == ["w"]
    return {"w": X.T @ (X @ params["w"] - y) / len(y)}


@pytest.mark.parametrize(
    "how",
    [{"sync": "bsp"}, {"sync": "asp"}, {"sync": "bsp", "execution": "graph"}],
    ids=str,
)
def test_a_run_trains_the_arrays(store, how):
    seen: list[list[str]] = []

    def validate(params):
        seen.append([*params])
        return {"n": 1.0}

    result = daskps.train(
        store,
        gradient,
        X,
        Y,
        epochs=2,
        trainers=2,
        batch_size=8,
        validate=validate,
        callbacks=(),
        **how,
    )
    assert [*result.weights] == ["w"]
    assert result.weights["w"][0] > 0.1
    assert result.weights["w"][1] < -0.1
    assert seen == [["w"]] * 2
    assert (store["emb"].pull(range(6)) == 1).all()
    store["emb"].add([3], [[1.0, 1.0]])
    assert store["emb"].pull([3]).tolist() == [[2.0, 2.0]]


def test_gradients_of_a_run_may_have_rows(store):
    def both(params, X, y):
        return {"w": np.zeros(2), "emb": ROWS}

    daskps.train(store, both, X, Y, sync="asp", trainers=2, batch_size=8, callbacks=())
    expected = np.ones((6, 2))
    expected[[1, 5]] -= 4 * np.array([[0.2], [0.1]])
    np.testing.assert_allclose(store["emb"].pull(range(6)), expected)


def loop(trainer, store):
    """Have a trainer push rows, as itself and through a handle."""
    trainer.push({"emb": ROWS})
    store["emb"].push(ROWS.ids, ROWS.values)
    trainer.push({"w": np.ones(2)})
    return [*trainer.pull()]


def test_trainers_push_rows_through_a_handle(store):
    assert daskps.run(store, loop, [store, store], sync="asp") == [["w"], ["w"]]
    expected = np.ones((6, 2))
    expected[[1, 5]] -= [[0.8], [0.4]]
    np.testing.assert_allclose(store["emb"].pull(range(6)), expected)


def test_under_bsp_a_run_has_tables_to_itself_too(store):
    def alone(trainer, store):
        with pytest.raises(daskps.ConsistencyError, match="has this store to itself"):
            store["emb"].push(ROWS.ids, ROWS.values)
        assert (trainer.pull(rows={"emb": [1]})["emb"] == 1).all()
        trainer.push({"w": np.ones(2)})

    daskps.run(store, alone, [store], sync="bsp")
    assert (store["emb"].pull(range(6)) == 1).all()
