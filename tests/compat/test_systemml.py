"""SystemML's `paramserv` by its own words: scenarios D, with their numbers."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import numpy as np
import pytest

import daskps
from daskps.compat import systemml
from daskps.compat.systemml.arguments import SCHEMES
from daskps.compat.systemml.structure import Structure
from tests.inprocess import cluster


@pytest.fixture
def inside():
    with cluster() as made:
        yield made


def row_is_gradient(model, hyperparams, features, labels):
    return [np.array([features.mean()])]


def weight_is_gradient(model, hyperparams, features, labels):
    return [model[0]]


def descend(model, hyperparams, gradients):
    return [w - 0.1 * g for w, g in zip(model, gradients, strict=True)]


def serve(**how):
    given: dict[str, Any] = {
        "model": [np.zeros(1)],
        "features": np.array([1.0, 2.0, 3.0]),
        "upd": row_is_gradient,
        "agg": descend,
        "utype": "BSP",
        "epochs": 1,
        "k": 3,
    }
    given |= how
    if "labels" not in given:
        given["labels"] = np.zeros(len(given["features"]))
    return systemml.paramserv(**given)


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(("average", "expected"), [(False, -0.6), (True, -0.2)])
@pytest.mark.parametrize("freq", ["BATCH", "EPOCH"])
def test_d7_d8_sum_of_gradients_and_mean_of_models(average, expected, freq):
    """w 0, lr 0.1, gradients 1, 2, 3."""
    [w] = serve(freq=freq, modelAvg=average)
    np.testing.assert_allclose(w, [expected], rtol=1e-12)


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(("average", "expected"), [(False, 0.458), (True, 0.729)])
def test_d11_two_identical_workers(average, expected):
    """Three batches of local steps: 1 - 0.1 * 2 * (1 + 0.9 + 0.81), or 0.9 ** 3."""
    [w] = serve(
        model=[np.ones(1)],
        features=np.ones(6),
        upd=weight_is_gradient,
        batchsize=1,
        k=2,
        modelAvg=average,
    )
    np.testing.assert_allclose(w, [expected], rtol=1e-12)


# -- all of BSP, in NumPy ---------------------------------------------------------


def regress(model, hyperparams, features, labels):
    error = features @ model["W"] + model["b"] - labels
    return [features.T @ error / len(labels), error.mean(axis=0, keepdims=True)]


def momentum(model, hyperparams, gradients):
    v = 0.5 * model["v"] + gradients[0]
    return {
        "W": model["W"] - hyperparams["lr"] * v,
        "v": v,
        "b": model["b"] - hyperparams["lr"] * gradients[1],
    }


def begin():
    return {"W": np.zeros((3, 1)), "b": np.zeros((1, 1)), "v": np.zeros((3, 1))}


def data(n=23):
    rng = np.random.default_rng(1)
    X = rng.normal(size=(n, 3))
    return X, X @ [[1.0], [-2.0], [0.5]] + 0.3


def in_numpy(model, parts, epochs, every, *, average, weighting, batchsize, lr):
    """Say what BSP does: worker by worker, one exchange after the other."""
    cuts = []
    for X, y in parts:
        starts = range(0, len(X), batchsize)
        batches = [(X[i : i + batchsize], y[i : i + batchsize]) for i in starts]
        size = every or len(batches)
        cuts.append([batches[i : i + size] for i in range(0, len(batches), size)])
    mean = np.mean([len(X) for X, _ in parts])
    hyper = {"lr": lr}
    for _ in range(epochs):
        for at in range(max(map(len, cuts))):
            sums, models, shares = None, [], []
            for groups, (X, _) in zip(cuts, parts, strict=True):
                if at >= len(groups):
                    continue
                own, total = model, [0, 0]
                for i, batch in enumerate(groups[at]):
                    grads = regress(own, hyper, *batch)
                    pairs = zip(total, grads, strict=True)
                    total = [a + b for a, b in pairs]
                    if average or i + 1 < len(groups[at]):
                        own = momentum(own, hyper, grads)
                share = len(X) / mean if weighting else 1.0
                pairs = zip(sums or [0, 0], total, strict=True)
                sums = [a + share * b for a, b in pairs]
                models.append(own)
                shares.append(share)
            if average:
                model = {
                    n: sum(s * m[n] for s, m in zip(shares, models, strict=True))
                    / sum(shares)
                    for n in model
                }
            else:
                model = momentum(model, hyper, sums)
    return model


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("freq", "every"), [("BATCH", 1), ("NBATCHES", 2), ("EPOCH", 0)]
)
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize(
    ("scheme", "weighting"),
    [
        ("DISJOINT_CONTIGUOUS", True),
        ("DISJOINT_ROUND_ROBIN", False),
        ("DISJOINT_RANDOM", True),
        ("OVERLAP_RESHUFFLE", False),
    ],
)
def test_bsp_is_what_it_is_in_numpy(freq, every, average, scheme, weighting):
    """Parts of 8, 8 and 7 rows, so that one has a batch less; two calls, same bits."""
    X, y = data()
    how: dict[str, Any] = {
        "model": begin(),
        "features": X,
        "labels": y,
        "upd": regress,
        "agg": momentum,
        "freq": freq,
        "nbatches": max(every, 1) if freq == "NBATCHES" else 1,
        "epochs": 2,
        "batchsize": 7,
        "scheme": scheme,
        "weighting": weighting,
        "hyperparams": {"lr": 0.05},
        "modelAvg": average,
        "seed": 3,
    }
    found = serve(**how)
    parts = daskps.partition(X, y, 3, scheme=SCHEMES[scheme], seed=3)
    expected = in_numpy(
        begin(),
        parts,
        2,
        every,
        average=average,
        weighting=weighting,
        batchsize=7,
        lr=0.05,
    )
    assert list(found) == ["W", "b", "v"]
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-10, atol=1e-12)
    assert np.abs(found["W"]).max() > 0.01
    if scheme == "DISJOINT_RANDOM" and freq == "NBATCHES":
        again = serve(**how)
        assert [a.tobytes() for a in found.values()] == [
            a.tobytes() for a in again.values()
        ]


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("freq", ["BATCH", "NBATCHES", "EPOCH"])
@pytest.mark.parametrize("utype", ["ASP", "BSP"])
def test_d18_full_runs_learn(utype, freq):
    X, y = data(200)
    found = serve(
        model=begin(),
        features=X,
        labels=y,
        upd=regress,
        agg=momentum,
        utype=utype,
        freq=freq,
        nbatches=2 if freq == "NBATCHES" else 1,
        epochs=30,
        batchsize=20,
        hyperparams={"lr": 0.02},
        seed=0,
    )
    loss = np.mean((X @ found["W"] + found["b"] - y) ** 2)
    assert np.mean(y**2) > 4
    assert loss < 0.01


@pytest.mark.usefixtures("inside")
def test_asp_calls_the_aggregate_for_each_push():
    """Two workers of 5 and 4 rows, 2 epochs, batches of 2: 6 + 4 calls that count."""

    def counted(model, hyperparams, gradients):
        return [model[0] + [1, gradients[0][0]]]

    features = np.arange(9.0)
    [found] = serve(
        model=[np.zeros(2)],
        features=features,
        upd=lambda model, hyperparams, X, y: [X.sum(keepdims=True)],
        agg=counted,
        utype="ASP",
        freq="BATCH",
        epochs=2,
        batchsize=2,
        k=2,
    )
    assert found.tolist() == [10, 72]


@pytest.mark.usefixtures("inside")
def test_gradients_may_have_more_numbers_than_the_model():
    def upd(model, hyperparams, X, y):
        return {"parts": np.full((4, 2), X.sum()), "n": len(X)}

    def agg(model, hyperparams, gradients):
        assert gradients["parts"].shape == (4, 2)
        return (model[0] + gradients["parts"].sum(), model[1] + gradients["n"])

    sums, rows = serve(model=(0.0, np.zeros((1, 1))), upd=upd, agg=agg)
    assert (sums, rows) == (48, [[3]])


@pytest.mark.usefixtures("inside")
def test_d16_more_workers_than_threads_and_rows():
    [w] = serve(k=10)
    np.testing.assert_allclose(w, [-0.6], rtol=1e-12)


@pytest.mark.usefixtures("inside")
def test_by_default_a_worker_for_each_thread():
    """Of which the cluster has four, each with a gradient of 1."""
    [w] = serve(features=np.ones(8), k=None)
    np.testing.assert_allclose(w, [-0.4], rtol=1e-12)


@pytest.mark.usefixtures("inside")
def test_validation_is_logged_after_each_epoch(caplog):
    def val(model, hyperparams, features, labels):
        return float(model[0][0]), float(features.mean())

    with caplog.at_level(logging.INFO, "daskps.compat.systemml"):
        serve(epochs=2, val=val, val_features=np.full(4, 0.5), val_labels=np.zeros(4))
    assert [record.getMessage() for record in caplog.records] == [
        "epoch 1: val_loss -0.6, val_accuracy 0.5",
        "epoch 2: val_loss -1.2, val_accuracy 0.5",
    ]


# -- errors ----------------------------------------------------------------------


def fail_late(model, hyperparams, features, labels):
    if model[0][0] < -1 and features[0] == 2:
        raise OSError("a fault")
    return row_is_gradient(model, hyperparams, features, labels)


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("utype", ["ASP", "BSP"])
def test_d19_a_worker_that_raises_in_the_middle_is_named(utype):
    with pytest.raises(OSError, match="a fault") as caught:
        serve(upd=fail_late, epochs=50, utype=utype)
    assert any("trainer 1" in note for note in caught.value.__notes__)
    assert not daskps.list_stores()


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("agg", "error", "match"),
    [
        (lambda m, h, g: {"a": m}["nothing"], KeyError, "nothing"),
        (lambda m, h, g: m[0], TypeError, "what agg returned is a list of matrices"),
        (lambda m, h, g: [m[0], m[0]], ValueError, "list of 2, expected a list of 1"),
        (lambda m, h, g: [np.zeros(2)], ValueError, r"shape \(2,\), expected \(1,\)"),
        (lambda m, h, g: [m[0] * np.nan], ValueError, "NaN or Inf"),
    ],
)
def test_what_the_aggregate_does_wrong_is_told(agg, error, match):
    with pytest.raises(error, match=match):
        serve(agg=agg)
    assert not daskps.list_stores()


@pytest.mark.usefixtures("inside")
def test_gradients_that_change_their_shape_are_refused():
    def upd(model, hyperparams, X, y):
        return [np.zeros(len(X))]

    with pytest.raises(ValueError, match=r"what upd returned\[0\] has shape \(2,\)"):
        serve(features=np.ones(5), upd=upd, agg=lambda m, h, g: m, k=1, batchsize=3)


CASES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "model_is_no_collection": ({"model": 3.0}, TypeError, "model is a list of matr"),
    "model_is_an_array": ({"model": np.zeros(3)}, TypeError, "model is a list of"),
    "model_is_empty": ({"model": []}, ValueError, "model is empty"),
    "model_has_text": ({"model": ["W"]}, TypeError, r"model\[0\] is no matrix"),
    "mode": ({"mode": "CLOUD"}, ValueError, "choose one of LOCAL"),
    "remote": ({"mode": "REMOTE_SPARK"}, ValueError, "there is no Spark here"),
    "federated": ({"mode": "FEDERATED"}, ValueError, "stays where it lies"),
    "utype": ({"utype": "bsp"}, ValueError, "choose one of ASP, BSP"),
    "backups": ({"utype": "SBP"}, ValueError, "utype='SBP' is not here"),
    "stale": ({"utype": "SSP"}, ValueError, "daskps.SSP"),
    "freq": ({"freq": 3}, ValueError, "EPOCH, BATCH, NBATCHES"),
    "scheme": ({"scheme": "random"}, ValueError, "DISJOINT_RANDOM"),
    "federated_scheme": ({"scheme": "SHUFFLE"}, ValueError, "federated data"),
    "balancing": ({"runtime_balancing": "CYCLE_AVG"}, ValueError, "federated data"),
    "checkpoints": ({"checkpointing": "EPOCH10"}, ValueError, "never wrote"),
    "he": ({"he": True}, ValueError, "he=True is not here"),
    "d15_backups": ({"num_backup_workers": -1}, ValueError, "at least 0 and below"),
    "d15_all": ({"num_backup_workers": 3}, ValueError, "at least 0 and below k=3"),
    "vain_backups": ({"num_backup_workers": 2}, ValueError, "has no meaning"),
    "epochs": ({"epochs": 0}, ValueError, "epochs must be at least 1"),
    "batchsize": ({"batchsize": 0}, ValueError, "batchsize must be at least 1"),
    "nbatches": ({"nbatches": 2}, ValueError, "freq='NBATCHES' alone"),
    "k": ({"k": 0}, ValueError, "k must be at least 1"),
    "seed": ({"seed": -1}, ValueError, "seed must be at least 0"),
    "average": ({"modelAvg": True, "utype": "ASP"}, ValueError, "needs utype='BSP'"),
    "average_word": ({"modelAvg": "yes"}, TypeError, "modelAvg is True or False"),
    "weighting": ({"weighting": 1}, TypeError, "weighting is True or False"),
    "val": ({"val": print}, ValueError, "go together"),
    "upd": ({"upd": "grads"}, TypeError, "upd must be a function"),
    "agg": ({"agg": lambda model: model}, TypeError, "agg is called as agg"),
    "rows": ({"labels": np.zeros(2)}, ValueError, "3 .* 2|2 .* 3"),
    "no_rows": ({"features": np.zeros((0, 2))}, ValueError, "have no rows"),
    "number": ({"features": 3, "labels": [1.0]}, TypeError, "features is a matrix"),
}


@pytest.mark.usefixtures("inside")
def test_exits_of_the_functions_are_errors_of_the_call():
    def leave(*_):
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match="upd"):
        serve(upd=leave)
    with pytest.raises(RuntimeError, match="Function"):
        serve(agg=leave)


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("case", CASES)
def test_d14_d15_arguments_that_cannot_be(case):
    how, error, match = CASES[case]
    with pytest.raises(error, match=match):
        serve(**how)
    assert not daskps.list_stores()


def test_d14_missing_and_unknown_arguments():
    call: Any = systemml.paramserv
    with pytest.raises(TypeError, match="missing 6 required keyword-only arguments"):
        call()
    with pytest.raises(TypeError, match="unexpected keyword argument 'upt'"):
        serve(upt=1)


def test_the_call_is_theirs():
    names = (
        "model features labels upd agg val_features val_labels val mode utype freq "
        "epochs batchsize nbatches k scheme runtime_balancing weighting hyperparams "
        "checkpointing seed modelAvg num_backup_workers he"
    )
    parameters = inspect.signature(systemml.paramserv).parameters
    assert list(parameters) == names.split()
    assert parameters["utype"].default == "ASP"
    assert parameters["freq"].default == "EPOCH"


@pytest.mark.parametrize(
    "given", [[np.eye(2), 3.0], {"a": np.zeros((0, 3)), "b": [1, 2]}, (np.ones(1),)]
)
def test_structures_go_to_vectors_and_back(given):
    structure = Structure.of("it", given)
    vector = structure.flat(given)
    found = structure.unflat(np.append(vector, 9.0))
    assert len(vector) == structure.size
    pairs = zip(given, found, strict=True)
    if isinstance(given, dict):
        pairs = zip(given.values(), found.values(), strict=True)
        other: Any = dict(reversed(given.items()))
        assert structure.flat(other).tolist() == vector.tolist()
    for a, b in pairs:
        assert np.shape(a) == b.shape
        assert np.array_equal(a, b)
