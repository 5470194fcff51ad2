"""When a run ends before its last epoch: by steps, time, losses and metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import optim, stop
from daskps.combination import Combination
from daskps.training.result import Epoch
from daskps.training.steps import FitPlan
from daskps.training.stop import Reached
from tests.support import mostly_inside

RNG = np.random.default_rng(3)
X = RNG.normal(size=(7, 3))
#: 7 rows over 3 trainers in pairs: 2 rounds an epoch.
HOW: dict[str, Any] = {"trainers": 3, "batch_size": 2, "seed": 4}


def anything(value: Any) -> Any:
    """Return what no annotation allows."""
    return value


def gradient(params, X, y):
    error = X @ params["w"] - 1
    return float((error**2).mean()), {"w": 2 * X.T @ error / len(X)}


def new_store():
    return daskps.create({"w": np.zeros(3)}, optimizer=optim.Adam(0.05), shards=2)


def history(*losses, step=10):
    return [
        Epoch(n, loss, {"accuracy": n / 10}, 2.0, 0, step=(n + 1) * step)
        for n, loss in enumerate(losses)
    ]


# -- conditions ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("condition", "losses", "holds"),
    [
        (stop.steps(20), (1, 1), True),
        (stop.steps(21), (1, 1), False),
        (stop.epochs(2), (1, 1), True),
        (stop.epochs(3), (1, 1), False),
        (stop.loss_below(0.5), (1, 0.5), False),
        (stop.loss_below(0.5), (1, 0.49), True),
        (stop.loss_below(0.5), (0.4, 0.6), False),
        (stop.loss_below(0.5), (None,), False),
        (stop.score_above(0.1, "accuracy"), (1, 1), False),
        (stop.score_above(0.1, "accuracy"), (1, 1, 1), True),
        (stop.seconds(4), (1, 1), True),
        (stop.seconds("5s"), (1, 1), False),
        (stop.no_improvement(2), (3, 2, 2, 2), True),
        (stop.no_improvement(2), (3, 2, 2, 1.9, 1.9), False),
        (stop.no_improvement(2, 0.5), (3, 2.6, 2.55), True),
        (stop.no_improvement(2, 0.5), (3, 2.6, 2.4), False),
        (stop.no_improvement(1), (None, None), False),
        (stop.steps(20) & stop.loss_below(0.5), (1, 1), False),
        (stop.steps(20) & stop.loss_below(0.5), (1, 0.1), True),
        (stop.steps(99) | stop.loss_below(0.5), (1, 0.1), True),
        (stop.steps(99) | stop.loss_below(0.5), (1, 0.6), False),
        (stop.loss_below(0.5), (), False),
    ],
)
def test_what_holds_at_the_end_of_a_history(condition, losses, holds):
    """Epochs of 10 rounds and 2 seconds; accuracies 0, 0.1, 0.2."""
    assert condition(history(*losses)) is holds


@pytest.mark.parametrize(
    ("condition", "limit", "sudden"),
    [
        (stop.steps(5), 5, False),
        (stop.steps(5) | stop.steps(3), 3, False),
        (stop.steps(5) & stop.steps(3), 5, False),
        (stop.steps(5) | stop.loss_below(1), 5, False),
        (stop.steps(5) & stop.loss_below(1), None, True),
        (stop.loss_below(1) & stop.epochs(1), None, False),
        (stop.seconds(1) | stop.steps(5), 5, True),
        (stop.seconds(1) & stop.epochs(5), None, True),
    ],
)
def test_where_a_condition_is_known_to_hold(condition, limit, sudden):
    """A number of rounds, or no number but at any moment of an epoch, or at its end."""
    assert condition.limit == limit
    assert condition.is_sudden is sudden


def test_what_came_after_the_last_epoch_counts():
    found = Reached(history(1), 15, 9.5)
    assert stop.steps(15).holds(found)
    assert not stop.steps(16).holds(found)
    assert stop.seconds(9).holds(found)
    assert not stop.seconds(10).holds(Reached([], 3, 9.5))


def test_conditions_say_what_they_are():
    either = stop.seconds("1m") | stop.score_above(0.9, "a")
    assert repr(stop.epochs(2) & either) == (
        "epochs(2) & (seconds(60) | score_above(0.9, 'a'))"
    )
    assert repr(stop.no_improvement(3) | either) == (
        "no_improvement(3, 0) | seconds(60) | score_above(0.9, 'a')"
    )


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: stop.steps(0), ValueError, "n must be at least 1"),
        (lambda: stop.steps(anything(1.5)), TypeError, "n is an int"),
        (lambda: stop.loss_below(float("nan")), ValueError, "loss must be a finite"),
        (
            lambda: stop.score_above(1, anything(None)),
            TypeError,
            "name is that of a metric",
        ),
        (lambda: stop.seconds(0), ValueError, "above 0 seconds, found 0"),
        (
            lambda: stop.seconds(anything(None)),
            ValueError,
            "above 0 seconds, found None",
        ),
        (lambda: stop.no_improvement(0), ValueError, "patience must be at least 1"),
        (lambda: stop.no_improvement(1, -1), ValueError, "min_delta must be at least"),
        (lambda: stop.steps(1) & bool, TypeError, "unsupported operand"),
        (lambda: stop.steps(1) | True, TypeError, "unsupported operand"),
        (
            lambda: stop.score_above(1, "f1")(history(1)),
            ValueError,
            r"no metric 'f1'.*returned \['accuracy'\]",
        ),
    ],
)
def test_what_is_no_condition_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_plan_knows_where_it_ends():
    """Clocks of 5 a run from clock 3 of its first epoch, epochs of 4."""
    plan = FitPlan(
        len, Combination("train"), 9, 1, True, 0, rounds=4, start=3, passed=9
    )
    ends = {most: FitPlan(**{**vars(plan), "most": most}).end(4) for most in (1, 5, 99)}
    assert ends == {1: (1, 0), 5: (2, 0), 99: (9, 0)}


# -- runs ----------------------------------------------------------------------


@mostly_inside("n", [5, 4, 1], train=True)
def test_steps_end_a_run_within_an_epoch(train, way, n):
    """The weights are those that as many rounds of a longer run lead to."""
    seen = []

    class Rounds:
        def on_epoch(self, run):
            seen.append(run.rounds)

    with new_store() as store, new_store() as other:
        how = {"stop": stop.steps(n), "callbacks": [Rounds()]}
        result = train(store, gradient, X, epochs=50, **HOW, **how)
        assert result.version == n
        ends = {5: [2, 4, 5], 4: [2, 4], 1: [1]}
        assert [epoch.step for epoch in result.history] == ends[n]
        assert set(seen) == {n}
        if n % 2 == 0:
            whole = train(other, gradient, X, epochs=n // 2, **HOW).weights["w"]
            assert result.weights["w"].tobytes() == whole.tobytes()


INSIDE = pytest.mark.parametrize(
    ("way", "train"), [("inside", "resident"), ("inside", "graph")], indirect=True
)


@INSIDE
def test_steps_are_those_of_the_store(train, way, tmp_path):
    """Of 3 and then 6 steps the second call makes three; at 6 it makes none."""
    with new_store() as store, new_store() as other:
        for n, version in [(3, 3), (6, 6), (6, 6)]:
            how = {"stop": stop.steps(n), "resume": n == 6}
            how["checkpoint"] = daskps.Checkpoints(str(tmp_path), every=10**6)
            assert train(store, gradient, X, epochs=50, **HOW, **how).version == version
        whole = train(other, gradient, X, epochs=3, **HOW).weights["w"]
        assert store["w"].pull().tobytes() == whole.tobytes()


class AtOnce(stop.Condition):
    """Ends a run within an epoch, when it has heard of a trainer that is further."""

    is_sudden = True

    def on_round(self, status):
        status.advance(status.clock + 1, status.slowest)

    def holds(self, at):
        return True

    def __call__(self, history):
        return False


@INSIDE
def test_a_push_that_came_to_nothing_is_no_round(train, way):
    """A trainer had pushed its next gradient when the others were stopped."""
    ends = AtOnce()
    with new_store() as store:
        how = {"stop": ends, "callbacks": [ends]}
        result = train(store, gradient, X, epochs=10**6, **HOW, **how)
        assert result.version == result.history[-1].step == result.stats.clock


@INSIDE
def test_time_ends_a_run_at_a_round(train, way):
    """Of a million epochs; what is entered last is where the store is."""
    with new_store() as store:
        how = {"stop": stop.seconds(0.05), "timeout": 60}
        result = train(store, gradient, X, epochs=10**6, **HOW, **how)
        assert result.version == result.history[-1].step == result.stats.clock
        assert 0 < result.version < 2 * 10**6
        assert sum(epoch.seconds for epoch in result.history) >= 0.05
        epochs = [epoch.epoch for epoch in result.history]
        assert epochs == list(range(len(epochs)))
        assert train(store, gradient, X, **HOW).version == result.version + 2


@INSIDE
def test_the_first_of_two_conditions_ends_a_run(train, way):
    with new_store() as store:
        how = {"validate": lambda params: {"norm": abs(params["w"]).sum()}}
        first = stop.score_above(1e9, "norm") | stop.epochs(2)
        result = train(store, gradient, X, epochs=9, stop=first, **HOW, **how)
        assert [epoch.step for epoch in result.history] == [2, 4]
        assert all(epoch.metrics["norm"] > 0 for epoch in result.history)
        both = stop.score_above(0, "norm") & stop.steps(7)
        result = train(store, gradient, X, epochs=9, stop=both, **HOW, **how)
        assert result.history[-1].step >= 7
        assert result.version == result.history[-1].step


@pytest.mark.parametrize("way", ["inside"], indirect=True)
@pytest.mark.parametrize("sync", ["asp", "ssp"])
def test_without_rounds_no_trainer_makes_more_steps(way, sync):
    """The first of three trainers has two batches an epoch, the others one or two."""
    with new_store() as store:
        how: Any = {"stop": stop.steps(3), "sync": sync, "epochs": 9}
        result = daskps.train(store, gradient, X, **HOW, **how)
        assert 3 <= result.version <= 9
        assert result.history[-1].step == 3


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_a_metric_without_validate_is_refused(way):
    with new_store() as store:
        with pytest.raises(ValueError, match=r"'f1' of validate, which is None"):
            daskps.train(store, gradient, X, stop=stop.score_above(1, "f1"), **HOW)
        plateau = daskps.ReduceOnPlateau(metric="f1")
        with pytest.raises(ValueError, match=r"at 'f1' of validate, which is None"):
            daskps.train(store, gradient, X, **HOW | {"callbacks": [plateau]})
        assert store.version == 0


class Third(daskps.stop.Condition):
    """One of a user's own."""

    def holds(self, at):
        return len(at.history) == 3


def test_a_condition_of_a_users_own_is_combined_as_others_are():
    one = Third() & daskps.stop.loss_below(9.0)
    assert repr(one).endswith("& loss_below(9)")
    history: Any = [SimpleNamespace(loss=1.0, step=n, seconds=0.0) for n in (1, 2, 3)]
    assert [one(history[:n]) for n in range(4)] == [False, False, False, True]
