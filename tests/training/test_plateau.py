"""Learning rates that are scaled: by hand, and where epochs are no better."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import daskps
from daskps import (
    ConsistencyError,
    NoOptimizerError,
    PushRejectedError,
    ReduceOnPlateau,
    UnknownParameterError,
    optim,
)
from daskps.training.result import Epoch
from tests.support import INSIDE, mostly_inside

X = np.zeros((8, 1))
HOW: dict[str, Any] = {"batch_size": 2, "trainers": 2}


def epoch(loss: float | None, **metrics: float) -> Epoch:
    return Epoch(
        epoch=0, loss=loss, metrics=metrics, seconds=0.0, staleness=0, since=0, step=0
    )


ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"patience": 2},
    {"patience": 0, "factor": 0.5},
    {"patience": 1, "cooldown": 2, "factor": 0.5},
    {"mode": "max", "patience": 1},
    {"mode": "max", "patience": 1, "threshold_mode": "abs", "threshold": 0.3},
    {"patience": 1, "threshold_mode": "abs", "threshold": 0.3},
    {"patience": 1, "threshold": 0.2, "min_lr": 0.02, "factor": 0.3},
    {"patience": 0, "eps": 0.01, "factor": 0.5},
    {"patience": 0, "min_lr": 0.5},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=repr)
def test_the_same_rates_as_torch(arguments):
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.zeros(1))
    theirs = torch.optim.SGD([parameter], lr=0.1)
    named = {"threshold": 1e-4, "patience": 10, **arguments}
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(theirs, **named)
    mine, rate = ReduceOnPlateau(**arguments), 0.1
    mine.begin([(optim.SGD(0.1), 1.0)], [])
    rng = np.random.default_rng(5)
    losses = [3.0, 2.0, 2.0, 1.9, 2.5, 2.0, *(1.8 + 0.3 * rng.standard_normal(60))]
    for loss in [*losses, float("nan"), 0.5]:
        scheduler.step(loss)
        rate *= mine.reduction(epoch(loss)) or 1.0
        assert rate == pytest.approx(theirs.param_groups[0]["lr"], rel=1e-12)
    assert (rate < 0.1) == (arguments.get("min_lr") != 0.5)


def test_epochs_of_a_history_are_looked_at_again():
    losses = [3.0, 2.0, 2.5, 2.0, 2.5, 2.5, 2.5]
    one, two = (ReduceOnPlateau(patience=1, cooldown=1) for _ in range(2))
    one.begin([(optim.SGD(1.0), 1.0)], [])
    found = [one.reduction(epoch(loss)) for loss in losses]
    assert found == [None, None, None, 0.1, None, None, pytest.approx(0.1)]
    two.begin([(optim.SGD(1.0), 0.1)], [epoch(loss) for loss in losses[:5]])
    assert [two.reduction(epoch(loss)) for loss in losses[5:]] == found[5:]


def test_arguments_that_cannot_be():
    untyped: Any = ReduceOnPlateau
    for arguments, error, says in (
        ({"mode": "least"}, ValueError, "mode='least'"),
        ({"threshold_mode": "x"}, ValueError, "threshold_mode"),
        ({"factor": 1.0}, ValueError, "below 1"),
        ({"factor": 0}, ValueError, "above 0"),
        ({"patience": -1}, ValueError, "patience"),
        ({"cooldown": 0.5}, TypeError, "cooldown"),
        ({"min_lr": float("nan")}, ValueError, "min_lr"),
        ({"metric": 3}, TypeError, "metric"),
        ({"verbose": True}, TypeError, "verbose"),
    ):
        with pytest.raises(error, match=says):
            untyped(**arguments)
    mine = ReduceOnPlateau(min_lr=0.1)
    for rules in (
        [(optim.SGD(1.0), 1.0), (optim.SGD(0.5), 1.0)],
        [(optim.SGD(1.0), 1.0), (optim.SGD(1.0), 0.5)],
        [(optim.SGD(optim.schedules.step(1.0, 3)), 1.0)],
    ):
        with pytest.raises(ValueError, match=r"min_lr=0\.1 needs one learning rate"):
            mine.begin(rules, [])
    with pytest.raises(ValueError, match="returns none"):
        mine.reduction(epoch(None))
    with pytest.raises(
        ValueError, match=r"looks at 'auc', and validate returns \['f'\]"
    ):
        ReduceOnPlateau(metric="auc").reduction(epoch(1.0, f=2.0))


@mostly_inside("dtype", ["f8", "f2"])
def test_rates_are_scaled_once(way, dtype):
    """1, then 0.5, then 0.125 times 2 of one push; an Adam goes on with its moments."""
    rules = {"w": optim.SGD(1.0), "a": optim.Adam(1.0), "emb": optim.SGD(1.0)}
    params: dict[str, Any] = {"w": np.zeros((3, 5), dtype), "a": np.zeros(2)}
    params |= {"emb": daskps.TableSpec(4, 2)}
    with daskps.create(params, optimizer=rules, shards=2) as store:
        g = {"w": np.ones((3, 5), dtype), "a": np.ones(2)}
        rows = {"emb": daskps.RowGrad([1], np.ones((1, 2), "f4"))}
        store.push(g | rows)
        before = store.version
        version = store.scale_lr(0.5)
        assert version == before + 1
        store.push(g | rows)
        assert store["w"].pull().tolist() == [[-1.5] * 5] * 3
        assert store["emb"].pull([1]).tolist() == [[-1.5, -1.5]]
        np.testing.assert_allclose(store["a"].pull(), -1.5, rtol=1e-6)
        store.scale_lr(0.25)
        store.push({"w": g["w"]}, lr=2.0)
        assert store["w"].pull().tolist() == [[-1.75] * 5] * 3


@mostly_inside("shards", [2])
def test_rates_of_some_are_scaled(way, shards, tmp_path):
    """Each has its own factor: in a checkpoint too, on other shards, until it is reset."""
    params: dict[str, Any] = {name: np.zeros(3) for name in ("w", "b")}
    params["n"] = np.zeros(3, "i8")
    params["emb"] = daskps.TableSpec(4, 2)
    rules = {name: optim.SGD(1.0) for name in ("w", "b", "emb")}
    grads: dict[str, Any] = {"w": np.ones(3), "b": np.ones(3)}
    grads["emb"] = daskps.RowGrad([1], np.ones((1, 2), "f4"))
    with daskps.create(params, optimizer=rules, shards=shards) as store:
        store.scale_lr(0.5, "w")
        store.scale_lr(0.25, ["emb", "w", "emb"])
        assert store.scale_lr(2.0, []) == 0
        for names, error, says in (
            ("n", NoOptimizerError, "'n' of store .* leave it out of names"),
            (["w", "x"], UnknownParameterError, "no parameter 'x'"),
            (3, TypeError, "names is the name of a parameter"),
        ):
            with pytest.raises(error, match=says):
                store.scale_lr(0.5, names)  # type: ignore[arg-type]
        store.push(grads)
        assert store["w"].pull().tolist() == [-0.125] * 3
        assert store["b"].pull().tolist() == [-1.0] * 3
        assert store["emb"].pull([1]).tolist() == [[-0.25] * 2]
        url = store.save(str(tmp_path)).url
    with daskps.restore(url, shards=3) as store:
        store.scale_lr(2.0)
        store.push(grads)
        assert store["w"].pull().tolist() == [-0.375] * 3
        assert store["b"].pull().tolist() == [-3.0] * 3
        assert store["emb"].pull([1]).tolist() == [[-0.75] * 2]


@pytest.mark.parametrize("way", INSIDE, indirect=True)
def test_factors_that_cannot_be(way):
    with daskps.create({"w": np.zeros(3)}, optimizer=optim.SGD(1.0)) as store:
        for factor, error in ((0, ValueError), (-1, ValueError), ("2", TypeError)):
            with pytest.raises(error, match="factor"):
                store.scale_lr(factor)  # type: ignore[arg-type]
        store.scale_lr(1e-200)
        with pytest.raises(PushRejectedError, match="no number is left"):
            store.scale_lr(1e-200)
        store.scale_lr(1e200)
        store.push({"w": np.ones(3)})
        np.testing.assert_allclose(store["w"].pull(), -1, rtol=1e-12)
    store = daskps.create({"w": np.zeros(3)})
    with pytest.raises(NoOptimizerError, match="no optimizer"):
        store.scale_lr(0.5)
    store.close()


def minus(name, weights, gradient, step):
    return weights - gradient


@pytest.mark.parametrize("way", INSIDE, indirect=True)
def test_functions_have_no_rate_to_scale(way):
    rules: Any = {"f": optim.Function(minus), "w": optim.SGD(1.0)}
    params = {"f": np.zeros(1), "w": np.zeros(1)}
    with daskps.create(params, optimizer=rules) as store:
        with pytest.raises(NoOptimizerError, match=r"'f' .*is Function\(minus\)"):
            store.scale_lr(0.5, ["w", "f"])
        store.scale_lr(0.5)
        store.push({"f": np.ones(1), "w": np.ones(1)})
        assert store["f"].pull() == -1
        assert store["w"].pull() == -0.5
    with daskps.create({"f": np.zeros(1)}, optimizer=rules["f"]) as store:
        with pytest.raises(NoOptimizerError, match="have no learning rate"):
            store.scale_lr(0.5)
        assert store.version == 0


def flat(params, X, y):
    return 1.0, {"w": np.ones(3)}


@mostly_inside("sync", ["bsp"], train=True)
def test_a_run_goes_on_with_smaller_rates(train, way, sync):
    """Two epochs of two rounds at 1; the loss stays as it is: two at 0.5, one at 0.25."""
    with daskps.create({"w": np.zeros(3)}, optimizer=optim.SGD(1.0), shards=2) as store:
        plateau = ReduceOnPlateau(factor=0.5, patience=1)
        train(store, flat, X, epochs=6, sync=sync, callbacks=[plateau], **HOW)
        # 3 epochs at 1 (the best, one that may be, one too many), 2 at 0.5, 1 at 0.25.
        assert store["w"].pull().tolist() == [-2 * (3 + 2 * 0.5 + 0.25)] * 3
        with pytest.raises(ValueError, match=r"sync_every does not take .*ReduceOn"):
            daskps.train(store, flat, X, sync_every=2, callbacks=[plateau], **HOW)
        with pytest.raises(ValueError, match=r"scaled by 0\.25"):
            daskps.train(store, flat, X, sync_every=2, callbacks=(), **HOW)
        # It stays over runs, until optimizer state begins anew.
        store.assign({"w": np.zeros(3)})
        daskps.train(store, flat, X, callbacks=(), **HOW)
        assert store["w"].pull().tolist() == [-0.5] * 3
        daskps.train(store, flat, X, callbacks=(), reset_optimizer=True, **HOW)
        assert store["w"].pull().tolist() == [-2.5] * 3


@pytest.mark.parametrize("way", INSIDE, indirect=True)
@pytest.mark.parametrize("sync", ["asp", "ssp"])
def test_without_rounds(way, sync):
    with daskps.create({"w": np.zeros(3)}, optimizer=optim.SGD(1.0), shards=2) as store:
        plateau = ReduceOnPlateau(factor=0.5, patience=0)
        daskps.train(store, flat, X, epochs=3, sync=sync, callbacks=[plateau], **HOW)
        assert store["w"].pull().tolist() == [-4 * (2 + 0.5)] * 3


@pytest.mark.parametrize("way", INSIDE, indirect=True)
def test_rounds_have_the_store_to_themselves(way):
    def loop(trainer, part):
        trainer.push({"w": np.ones(3)})
        if trainer.rank == 0:
            with pytest.raises(ConsistencyError, match="has this store to itself"):
                daskps.open("rated").scale_lr(0.5)
        trainer.push({"w": np.ones(3)})

    params = {"w": np.zeros(3)}
    with daskps.create(params, name="rated", optimizer=optim.SGD(1.0)) as store:
        daskps.run(store, loop, [0, 0])
        assert store["w"].pull().tolist() == [-2.0] * 3
        with pytest.raises(ValueError, match="is for train"):
            daskps.run(store, loop, [0, 0], callbacks=[ReduceOnPlateau()])
        store.delete()
