"""`Monitor`: statistics of weights and reduced gradients, step by step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import codecs, optim
from daskps.training.monitoring import rms
from tests.support import mostly_inside

X = np.arange(14.0).reshape(14, 1)
#: Parts of 8 and 6 rows: 4 and 3 batches, so that one sits out a round of each epoch.
HOW: dict[str, Any] = {
    "trainers": 2,
    "weights": [4, 3],
    "batch_size": 2,
    "shuffle": False,
    "epochs": 2,
}
PARAMS = {"layer/w": np.ones(3), "layer/b": 0.5, "other": np.zeros(2, "f4")}


def gradient(params, X, y=None):
    """Different for each batch; one parameter is none of it."""
    x = X.mean()
    return {"layer/w": params["layer/w"] * x, "layer/b": params["layer/b"] + x}


def made():
    return daskps.create(PARAMS, optimizer=optim.SGD(0.01), shards=2)


def expected(reduce):
    """Return records of plain NumPy: the parts' batches, and what they come to."""
    w, b = np.ones(3), np.array(0.5)
    records = []
    for step in range(8):
        at = step % 4
        batches = [X[2 * at : 2 * at + 2], X[8 + 2 * at : 8 + 2 * at + 2]]
        rows = np.array([len(batch) for batch in batches], float)
        shares = rows / rows.sum() if reduce == "mean" else (rows > 0).astype(float)
        xs = [batch.mean() if len(batch) else 0.0 for batch in batches]
        grad_w = sum(s * w * x for s, x in zip(shares, xs, strict=True))
        grad_b = sum(s * (b + x) for s, x in zip(shares, xs, strict=True))
        records += [
            (step, "layer/w", rms(w)),
            (step, "layer/b", rms(b)),
            (step, "other", 0.0),
            (step, "layer/w:gradient", rms(grad_w)),
            (step, "layer/b:gradient", rms(grad_b)),
        ]
        w, b = w - 0.01 * grad_w, b - 0.01 * grad_b
    return records


def assert_alike(found, wanted):
    assert [row[:2] for row in found] == [row[:2] for row in wanted]
    np.testing.assert_allclose(
        [row[2] for row in found], [row[2] for row in wanted], rtol=1e-12
    )


@mostly_inside("reduce", ["mean", "sum"], real=["mean"])
def test_every_tensor_once_per_step(way, reduce):
    """Also where a trainer sits out, and a parameter has no gradient."""
    monitor = daskps.Monitor()
    with made() as store:
        daskps.train(store, gradient, X, reduce=reduce, callbacks=[monitor], **HOW)
    assert_alike(monitor.records, expected(reduce))


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_interval_pattern_and_statistic_of_several(way):
    """Steps count on in the next call, and each monitor has its own."""
    weights = daskps.Monitor(3, pattern="layer/?")
    shapes = daskps.Monitor(interval=5, stat=lambda array: array.ndim, pattern="other")
    with made() as store:
        for _ in range(2):
            daskps.train(store, gradient, X, callbacks=[weights, shapes], **HOW)
    wanted = [
        row for row in expected("mean") if row[0] % 3 == 0 and row[1][:5] == "layer"
    ]
    assert_alike(weights.records[: len(wanted)], wanted)
    steps = [step for step, name, _ in weights.records if name == "layer/w"]
    assert steps == [0, 3, 6, 9, 12, 15]
    assert shapes.records == [(step, "other", 1.0) for step in (0, 5, 10, 15)]
    assert repr(shapes) == "daskps.Monitor(interval=5, pattern='other'): 4 records"


@pytest.mark.parametrize("sync", ["ssp", "asp"])
@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_without_rounds_it_is_the_first_trainer(way, sync):
    """One trainer alone: what it has read, and its own gradients."""
    monitor = daskps.Monitor(pattern="layer/b")
    with made() as store:
        how = HOW | {"trainers": 1, "weights": None, "epochs": 1, "sync": sync}
        daskps.train(store, gradient, X, callbacks=[monitor], **how)
    b, wanted = 0.5, []
    for step in range(7):
        grad = b + X[2 * step : 2 * step + 2].mean()
        wanted += [(step, "layer/b", b), (step, "layer/b:gradient", grad)]
        b -= 0.01 * grad
    assert_alike(monitor.records, wanted)


@pytest.mark.parametrize(
    "options",
    [{"codec": codecs.TopK(ratio=0.5)}, {"sync_every": 2}, {"average": "models"}],
    ids=str,
)
@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_a_watched_run_has_the_same_bits(way, options):
    monitor = daskps.Monitor()
    with made() as store, made() as plain:
        daskps.train(store, gradient, X, callbacks=[monitor], **HOW | options)
        daskps.train(plain, gradient, X, **HOW | options)
        for name, value in store.pull().items():
            np.testing.assert_array_equal(value, plain[name].pull())
    kinds = {name.partition(":")[2] for _, name, _ in monitor.records}
    assert kinds == ({""} if "average" in options else {"", "gradient"})


def stacked(arrays, weights):
    return arrays.sum(axis=0)


def loop(trainer, part):
    return None


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_what_it_does_not_go_with_is_refused_at_once(way):
    monitor = daskps.Monitor()
    with made() as store:
        for options, says in (
            ({"execution": "graph"}, "a Monitor takes no execution='graph'"),
            ({"reduce": stacked}, "a Monitor takes no reduce function"),
        ):
            with pytest.raises(ValueError, match=says):
                daskps.train(store, gradient, X, callbacks=[monitor], **HOW | options)
        with pytest.raises(ValueError, match="a Monitor watches train"):
            daskps.run(store, loop, [0], callbacks=[monitor])
        assert store.version == 0
        many = HOW | {"trainers": 12, "weights": None, "epochs": 1}
        many |= {"batch_size": 1, "execution": "auto"}
        result = daskps.train(store, gradient, X, callbacks=[monitor], **many)
        assert result.execution == "resident"


def no_number(array):
    return "large"


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_a_statistic_that_is_none_ends_the_run(way):
    with made() as store, pytest.raises(TypeError, match="stat of Monitor returned 'l"):
        daskps.train(
            store, gradient, X, callbacks=[daskps.Monitor(stat=no_number)], **HOW
        )


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"interval": 0}, ValueError, "interval must be at least 1"),
        ({"interval": 1.5}, TypeError, "interval is an int"),
        ({"stat": 3}, TypeError, "stat must be a function"),
        ({"pattern": 3}, TypeError, "pattern is a text"),
    ],
)
def test_what_is_no_monitor_is_refused(given, error, says):
    with pytest.raises(error, match=says):
        daskps.Monitor(**given)


def test_norm_over_the_root_of_the_number():
    assert rms(np.full((2, 8), 3.0)) == 3.0
    assert rms(np.array(-2.0)) == 2.0
    assert rms(np.empty(0)) == 0.0
    assert rms(np.array([3.0, 4.0], "f2")) == 5.0 / math.sqrt(2)
