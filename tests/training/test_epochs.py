"""A store counts its epochs: several calls of `train` are one call of as many."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import daskps
from daskps import TableSpec, optim
from daskps.cluster.runs.launch import epochs_of as open_epochs
from daskps.training.data.rows import batches
from tests.support import INSIDE

RNG = np.random.default_rng(5)
X = RNG.integers(0, 30, (47, 3)).astype(float)
Y = RNG.normal(size=47)
#: Parts of 26, 16 and 5 rows, of 7, 4 and 2 batches.
HOW: dict[str, Any] = {
    "trainers": 3,
    "weights": [5, 3, 1],
    "batch_size": 4,
    "seed": 3,
    "callbacks": (),
}
PARAMS = {"w": np.zeros(3), "b": 0.5, "emb": TableSpec(30, 2, "float64", init=0.25)}


def drawn(X, rng):
    """Return the ids of a batch, and others that depend on its epoch and clock."""
    return np.append(X[:, 0].astype(int), rng.integers(0, 30, 3))


def gradient(params, X, y):
    error = X @ params["w"] / 30 + params["b"] - y
    grads = {"w": X.T @ error / len(y) / 30, "b": error.mean()}
    if "emb" in params:
        grads["emb"] = np.sin(params["emb"] + error.sum())
    return float((error**2).mean()), grads


def new_store(**kwargs):
    return daskps.create(PARAMS, optimizer=optim.Adam(0.05), **kwargs)


def train(store, epochs=1, **how):
    return daskps.train(store, gradient, X, Y, epochs=epochs, **HOW | how)


def bits(store):
    """Return weights and rows as they are, to the last bit."""
    found = store.pull(rows={"emb": range(30)})
    return {name: value.tobytes() for name, value in found.items()}


def epochs_of(store):
    """Return the epoch that each shard has come to."""
    return [row["epoch"] for row in store.stats()["shards"]]


def told(history):
    return [(entry.epoch, entry.loss) for entry in history]


@pytest.mark.parametrize(
    ("way", "execution", "options"),
    [
        ("inside", "resident", {"rows": {"emb": drawn}}),
        ("queue", "graph", {"rows": {"emb": drawn}}),
        ("process", "graph", {"rows": {"emb": drawn}}),
        ("queue", "resident", {"sync_every": 3}),
        ("inside", "graph", {"sync_every": 3}),
        ("inside", "resident", {"sync_every": 2, "average": "models"}),
        ("inside", "graph", {"sync_every": "epoch", "average": "models"}),
    ],
    indirect=["way"],
)
def test_calls_one_after_the_other_are_one_call(way, execution, options):
    how = {**options, "execution": execution}
    with new_store(shards=3) as store, new_store(shards=2) as whole:
        parts = [train(store, epochs, **how) for epochs in (1, 2, 1)]
        together = train(whole, 4, **how)
        assert bits(store) == bits(whole)
        assert [e for part in parts for e in told(part.history)] == told(
            together.history
        )
        assert [e.epoch for e in together.history] == [0, 1, 2, 3]
        assert parts[-1].version == together.version == store.version
        assert epochs_of(store) == [4] * 3


@pytest.mark.parametrize("way", INSIDE, indirect=True)
@pytest.mark.parametrize("sync", ["ssp", "asp"])
def test_without_rounds_they_are_counted_too(way, sync):
    """The gradients say which rows they have seen: as often as in one call."""

    with daskps.create(
        {"n": TableSpec(47, 1, "float64")}, optimizer=optim.SGD(1.0)
    ) as store:
        for epochs in (1, 2):
            result = daskps.train(
                store,
                lambda params, X, y: {"n": np.ones((len(X), 1))},
                np.arange(47),
                rows={"n": lambda X: X},
                sync=sync,
                epochs=epochs,
                **HOW,
            )
        assert [entry.epoch for entry in result.history] == [1, 2]
        assert (store["n"].pull(range(47)) == -3).all()
        assert set(epochs_of(store)) == {3}


class FailedError(Exception):
    """What a gradient raises."""


#: The labels of all batches of `note`, which is called in this process.
SEEN: list[Any] = []


def note(params, X, y):
    SEEN.append(y.tolist())
    if len(SEEN) == 14:
        raise FailedError
    return {"w": np.zeros(3)}


@pytest.mark.parametrize("way", INSIDE, indirect=True)
@pytest.mark.parametrize("execution", ["resident", "graph"])
def test_after_an_error_comes_the_next_epoch(way, execution):
    """Seven rounds an epoch: what there was of one is not trained on again."""

    def fails(params, X, y):
        if params["n"] >= 9:
            raise FailedError
        return {"n": np.full((), -1.0)}

    params = {"n": 0.0}
    with daskps.create(params, optimizer=optim.SGD(1.0), shards=1) as store:
        how = {**HOW, "execution": execution}
        with pytest.raises(FailedError):
            daskps.train(store, fails, X, Y, epochs=4, **how)
        assert store["n"].pull() == 9
        assert epochs_of(store) == [1]
        store.assign({"n": 0.0})
        result = daskps.train(store, fails, X, Y, **how)
        assert [entry.epoch for entry in result.history] == [2]
        assert epochs_of(store) == [3]
        # Nothing but an update of the second of its epochs fails: it has begun.
        store.assign({"n": 9.0})
        with pytest.raises(FailedError):
            daskps.train(store, fails, X, Y, **how)
        assert epochs_of(store) == [3]
        store.assign({"n": 0.0})
        assert daskps.train(store, fails, X, Y, **how).history[0].epoch == 3


@pytest.mark.parametrize("way", INSIDE, indirect=True)
def test_batches_after_a_fence_are_those_of_the_next_epoch(way):
    """The order of the rows says which epoch it is."""
    SEEN.clear()
    how = {**HOW, "trainers": 1, "weights": None}
    with daskps.create({"w": np.zeros(3)}, optimizer=optim.SGD(1.0)) as store:
        with pytest.raises(FailedError):
            daskps.train(store, note, X, Y, epochs=3, **how)
        daskps.train(store, note, X, Y, **how)
    for epoch, found in ((0, SEEN[:12]), (1, SEEN[12:14]), (2, SEEN[14:])):
        order = batches(47, 4, seed=3, epoch=epoch, rank=0)
        expected = [Y[rows].tolist() for rows in order]
        assert found == expected[: len(found)]
    assert len(SEEN) == 26


@pytest.mark.parametrize("way", INSIDE, indirect=True)
@pytest.mark.parametrize("execution", ["resident", "graph"])
def test_reset_begins_with_epoch_0(way, execution):
    how = {"execution": execution, "rows": {"emb": drawn}}
    with new_store() as store, new_store() as fresh:
        train(store, 2, **how)
        first = fresh.pull(rows={"emb": range(30)})
        emb = store["emb"]
        emb.assign(range(30), first.pop("emb"))
        store.assign(first)
        again = train(store, reset_optimizer=True, **how)
        assert [entry.epoch for entry in again.history] == [0]
        train(fresh, **how)
        assert bits(store) == bits(fresh)
        assert set(epochs_of(store)) == {1}


class Watches:
    """Notes what callbacks see."""

    def __init__(self):
        self.starts, self.epochs = [], []

    def on_start(self, run):
        self.starts.append((run.first, run.epochs, run.rounds))

    def on_epoch(self, run):
        self.epochs.append(run.history[-1].epoch)


@pytest.mark.parametrize("way", INSIDE, indirect=True)
@pytest.mark.parametrize("sync", ["bsp", "ssp"])
def test_stop_validate_and_callbacks_see_the_epochs_of_the_store(way, sync):
    asked: list[int] = []

    def stop(history):
        asked.append(history[-1].epoch)
        return history[-1].epoch == 3

    watch = Watches()
    with new_store() as store:
        train(store, 2, sync=sync)
        result = train(
            store,
            5,
            sync=sync,
            stop=stop,
            validate=lambda params: {"w": params["w"].sum()},
            callbacks=[watch],
        )
        assert asked == watch.epochs == [entry.epoch for entry in result.history]
        assert asked == [2, 3]
        assert watch.starts == [(2, 7, 35)]
        assert result.to_frame().index.tolist() == [2, 3]
        assert train(store).history[0].epoch == 4


@pytest.mark.parametrize("way", INSIDE, indirect=True)
def test_a_loop_of_ones_own_has_no_epochs(way):
    def loop(trainer, part):
        for _ in range(part):
            trainer.push({"w": np.ones(3)})

    with new_store(shards=2) as store:
        train(store, 2)
        daskps.run(store, loop, [3, 9])
        assert epochs_of(store) == [2, 2]
        assert train(store).history[0].epoch == 2


@pytest.mark.parametrize("way", INSIDE, indirect=True)
def test_a_store_that_another_run_has_trained_meanwhile(way, monkeypatch):
    """It has looked before: nothing of its epochs is trained on twice."""

    async def look_too_early(*args):
        at, described = await open_epochs(*args)
        return at._replace(first=1, clock=0), described

    with new_store(shards=2) as store:
        train(store, 3)
        before = bits(store)
        monkeypatch.setattr("daskps.training.job.epochs_of", look_too_early)
        with pytest.raises(
            daskps.ConsistencyError, match=r"begin with epoch 1.*epoch 3"
        ):
            train(store)
        assert bits(store) == before
        monkeypatch.undo()
        assert train(store).history[0].epoch == 3
