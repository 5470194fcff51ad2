"""`train(retries=, retry_window=)`: a run that goes on after errors of the user's code."""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import optim
from daskps.errors import PushRejectedError, RunCancelledError
from daskps.training.early_end import Retries, is_users
from tests.training.test_epochs import HOW, X, Y, gradient

#: At which of its calls what raises, in this process.
CALLS: dict[str, Any] = {}


class AccidentError(Exception):
    """What code of the user's raises now and then."""


def may_fail(what):
    if next(CALLS[what][0]) in CALLS[what][1]:
        raise AccidentError(what)


def fail_at(**calls):
    CALLS.clear()
    CALLS.update({w: (itertools.count(), at) for w, at in calls.items()})


def failing(params, X, y):
    may_fail("gradient")
    return gradient(params, X, y)


class Failing(optim.SGD):
    """As SGD; one call of `prepare` raises, that of some step."""

    def prepare(self, step, lr, **hyper):
        if CALLS.get("step") == step:
            del CALLS["step"]
            raise AccidentError("rule")
        return super().prepare(step, lr, **hyper)


def mean(stacked, weights):
    may_fail("reduce")
    total: Any = weights.sum()
    return (stacked * weights[:, None]).sum(axis=0) / total


def made(rule=None, **how):
    params = {"w": np.zeros(3), "b": 0.5}
    return daskps.create(params, optimizer=rule or optim.Adam(0.05), shards=2, **how)


def bits(store):
    return {name: value.tobytes() for name, value in store.pull().items()}


def trained(store, function=failing, **how):
    return daskps.train(store, function, X, Y, **HOW | {"epochs": 3} | how)


class Recorder:
    """What callbacks hear of it."""

    def __init__(self):
        self.heard = []

    def on_start(self, run):
        self.heard.append("start")

    def on_failover(self, run):
        self.heard.append(("failover", run.clock, run.loss))

    def on_epoch(self, run):
        self.heard.append(run.history[-1].epoch)


@pytest.mark.parametrize("execution", ["resident", "graph"])
@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_it_goes_on_to_the_bits_of_a_run_without_errors(way, execution, caplog):
    """Two accidents, in different epochs; history, rounds and callbacks go on too."""
    with made() as store, made() as whole:
        wanted = trained(whole, gradient, execution=execution)
        fail_at(gradient={5, 14})
        recorder = Recorder()
        with caplog.at_level(logging.WARNING, "daskps"):
            found = trained(store, execution=execution, retries=2, callbacks=[recorder])
        assert bits(store) == bits(whole)
    assert found.stats.retried_runs == 2
    assert found.stats.clock == wanted.stats.clock
    assert found.version == wanted.version
    assert "retried_runs 2" in repr(found)
    assert [entry.epoch for entry in found.history] == [0, 1, 2]
    assert [entry.step for entry in found.history] == [e.step for e in wanted.history]
    assert recorder.heard[0] == "start"
    assert recorder.heard.count(("failover", 0, None)) == 2
    said = [r.getMessage() for r in caplog.records if "goes on at epoch" in r.message]
    assert len(said) == 2
    assert "after AccidentError('gradient')" in said[0]


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_with_a_fresh_optimizer_it_is_reset_once(way):
    """The second call begins with epoch 0; what goes on with it does not."""
    with made() as store, made() as whole:
        for one in (store, whole):
            trained(one, gradient, epochs=2)
        fail_at(gradient={8})
        found = trained(store, reset_optimizer=True, retries=1)
        trained(whole, gradient, reset_optimizer=True)
        assert bits(store) == bits(whole)
    assert [entry.epoch for entry in found.history] == [0, 1, 2]


@pytest.mark.parametrize("execution", ["resident", "graph"])
@pytest.mark.parametrize("what", ["rule", "reduce"])
@pytest.mark.parametrize("copies", [1, pytest.param(2, id="by message")])
@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_rule_and_reduce_may_fail_too(way, what, execution, copies):
    """On one of two shards alone: the other takes the round back."""
    reduce = mean if what == "reduce" else "mean"
    rule = Failing(0.1) if what == "rule" else optim.SGD(0.1)
    with made(rule, copies=copies) as store, made(rule) as whole:
        fail_at(gradient=(), reduce=())
        wanted = trained(whole, reduce=reduce, execution=execution)
        fail_at(gradient=(), reduce={9} if what == "reduce" else ())
        CALLS["step"] = 5 if what == "rule" else None
        found = trained(store, reduce=reduce, retries=1, execution=execution)
        for name, value in wanted.weights.items():
            np.testing.assert_array_equal(found.weights[name], value)
    assert found.stats.retried_runs == 1


@pytest.mark.parametrize("sync", ["ssp", "asp", daskps.ASP(damping=0.5)])
@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_without_rounds_it_goes_on_about_there(way, sync):
    with made() as store:
        fail_at(gradient={9})
        found = trained(store, sync=sync, retries=1)
        assert found.stats.retried_runs == 1
        assert [entry.epoch for entry in found.history] == [0, 1, 2]


@pytest.mark.parametrize(
    ("calls", "how"),
    [
        ({5, 14}, {"retries": 1}),
        ({5}, {}),
        ({0, 1}, {"retries": 5}),
    ],
    ids=["one too many", "none by default", "before the first tick"],
)
@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_otherwise_the_error_surfaces(way, calls, how):
    with made() as store:
        fail_at(gradient=calls)
        with pytest.raises(AccidentError) as caught:
            trained(store, **how)
        assert any("raised in trainer" in note for note in caught.value.__notes__)
        # The store can be trained on.
        fail_at(gradient=())
        trained(store, epochs=1)


def never(params, X, y):
    may_fail("nan")
    return {"w": np.full(3, np.nan if next(CALLS["n"][0]) > 5 else 1.0)}


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_what_the_store_refuses_is_no_accident(way):
    with made() as store:
        fail_at(nan=(), n=())
        with pytest.raises(PushRejectedError):
            trained(store, never, retries=100)


class Angry:
    def on_epoch(self, run):
        raise AccidentError("a callback")


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_errors_of_callbacks_are_raised(way):
    with made() as store:
        fail_at(gradient=())
        with pytest.raises(AccidentError, match="a callback"):
            trained(store, callbacks=[Angry()], retries=3)


def noted(error):
    error.add_note("raised in trainer 0 of 1 at clock 1")
    return error


def test_whose_error_it_is():
    assert is_users(noted(ValueError()))
    assert is_users(noted(OSError()))
    for error in (PushRejectedError("x"), RunCancelledError("x"), TimeoutError()):
        assert not is_users(noted(error))
    assert not is_users(ValueError())


def test_only_so_many_within_the_window():
    """Two within 10 s: at 0, 6 they are; at 9 is a third; then it is over."""
    times = iter([0.0, 6.0, 10.5, 11.0])
    retries = Retries(2, 10.0, clock=lambda: next(times))
    found = [retries.fail(noted(ValueError())) for _ in range(4)]
    assert found == [True, True, True, False]
    assert not Retries().fail(noted(ValueError()))


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ((-1, "1s"), ValueError, "retries must be at least 0"),
        ((1.5, "1s"), TypeError, "retries is an int"),
        ((True, "1s"), TypeError, "retries is an int"),
        ((1, "soon"), ValueError, "retry_window"),
        ((1, -1), ValueError, "retry_window"),
        ((1, True), TypeError, "retry_window"),
    ],
)
def test_what_is_no_number_or_duration_is_refused(given, error, says):
    with pytest.raises(error, match=says):
        Retries.of(*given)
    assert Retries.of(3, "2 minutes").window == 120.0
    assert Retries.of(3, None).window == math.inf
