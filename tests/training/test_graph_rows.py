"""Rows of tables in the task graph: the bits of resident trainers, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import RowGrad, TableSpec, optim
from daskps.shards.rounds import arena
from tests.support import INSIDE

RNG = np.random.default_rng(3)
X = RNG.integers(0, 40, (47, 3))
Y = RNG.normal(size=47)
ROWS, DIM = 40, 2


def drawn(X, rng):
    """Return the ids of a batch and others that are not in it, with repeats."""
    return np.append(X[:, 0], rng.integers(0, ROWS, 4))


def gradient(params, X, y):
    """Name tables now and then, one of them with no rows too, and rows twice."""
    w, emb, seen = params["w"], params["emb"], params["any"]
    ids = X if X[0, 0] % 3 else X[:0]
    grads: dict[str, Any] = {
        "w": np.cos(y.sum() + w) + seen.sum(),
        "emb": np.sin(emb + w.sum()),
        "other": RowGrad(ids, np.sin(ids[..., None] * 1.7 + np.arange(DIM) + w.sum())),
    }
    if X[0, 1] % 2:
        grads["any"] = np.cos(seen + y.sum())
    return float(w.sum()), grads


BATCHES: dict[str, Callable[..., Any]] = {
    "emb": drawn,
    "any": lambda X: X[:, 1:] * 10**15 - 7,
}


def trained(execution: str, shards: int, trainers: int, **how: Any) -> Any:
    """Return what a run leads to, to the last bit."""
    params = {
        "w": np.zeros(5, "f4"),
        "emb": TableSpec(ROWS, DIM, "float32", init=daskps.init.normal()),
        "other": TableSpec(ROWS, DIM, "float64"),
        "any": TableSpec(None, DIM, init=daskps.init.normal()),
    }
    given: Any = {"batch_size": 5, "epochs": 2, "callbacks": (), "seed": 4, **how}
    with daskps.create(params, optimizer=optim.Adam(0.1), shards=shards, seed=2) as s:
        result = daskps.train(
            s,
            gradient,
            X,
            Y,
            rows=BATCHES,
            trainers=trainers,
            execution=execution,
            **given,
        )
        ids = {"emb": range(ROWS), "other": range(ROWS)}
        found = s.pull(rows=ids | {"any": np.unique(X[:, 1:]) * 10**15 - 7})
        steps = {name: of["steps"] for name, of in s.stats()["tables"].items()}
    losses = [epoch.loss for epoch in result.history]
    return {n: a.tobytes() for n, a in found.items()}, losses, steps, result.version


@pytest.mark.parametrize(
    ("way", "trainers", "reduce"),
    [("inside", 1, "mean"), ("inside", 3, "sum"), ("process", 3, "mean")],
    indirect=["way"],
)
def test_executions_have_the_same_bits_with_rows(way, trainers, reduce):
    expected = trained("resident", 1, trainers, reduce=reduce)
    for shards in (1, 3):
        assert trained("graph", shards, trainers, reduce=reduce) == expected


@pytest.mark.parametrize("way", INSIDE, indirect=True)
def test_a_store_of_tables_alone(way):
    """Ones for each row of a batch: exact counts, and of a round that names no row."""

    def ones(params, X, y):
        return {"n": np.ones((len(X) if X.sum() else 0, 1))}

    def ids(X):
        return X if X.sum() else X[:0]

    rows = np.array([0, 0, 3, 3, 3, 1])
    for execution in ("resident", "graph"):
        params = {"n": TableSpec(5, 1, "float64")}
        with daskps.create(params, optimizer=optim.SGD(1.0), shards=2) as store:
            daskps.train(
                store,
                ones,
                rows,
                rows={"n": ids},
                reduce="sum",
                batch_size=1,
                trainers=2,
                execution=execution,
                callbacks=(),
            )
            assert store["n"].pull(range(5))[:, 0].tolist() == [0, -1, 0, -3, 0]
            assert store.stats()["tables"]["n"]["steps"] == 3


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_rows_without_room_end_the_run_and_change_nothing(way, monkeypatch):
    """Of the second round, on one shard of two: the other one takes it back."""
    monkeypatch.setattr(arena, "MOST_PUSHED_ROWS", 4)

    def gradient(params, X, y):
        return {"emb": RowGrad(X, np.ones((len(X), 1)))}

    rows = np.array([[0, 30, 1, 2, 31], [1, 31, 3, 4, 5]]).reshape(-1)
    params = {"emb": TableSpec(40, 1, "float64")}
    how: Any = {"batch_size": 1, "shuffle": False, "reduce": "sum", "trainers": 2}
    with daskps.create(params, optimizer=optim.SGD(1.0), shards=2) as store:
        daskps.train(store, gradient, rows, execution="graph", callbacks=(), **how)
        before, steps = store["emb"].pull(range(40)), store.stats()["tables"]
        assert before.sum() == -10
        how["batch_size"] = 5
        with pytest.raises(
            daskps.PushRejectedError, match=r"6 rows of table 'emb' came.*takes 4"
        ) as caught:
            daskps.train(store, gradient, rows, execution="graph", callbacks=(), **how)
        assert "use more shards" in str(caught.value)
        np.testing.assert_array_equal(store["emb"].pull(range(40)), before)
        assert store.stats()["tables"] == steps
        assert len(set(store.versions)) == 1
