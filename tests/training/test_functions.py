"""What the user's functions take and return, and what is said where they do not."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import optim
from daskps.errors import PushRejectedError
from daskps.training.functions import (
    advice,
    check_function,
    metrics_of,
    note_arguments,
)


class Callable3:
    def __call__(self, params: Any, X: Any, y: Any = None) -> None: ...


@functools.wraps(lambda params, X: None)
def wrapper(*args: Any) -> None: ...


@pytest.mark.parametrize(
    ("what", "function"),
    [
        ("gradient", lambda params, X, y: None),
        ("gradient", lambda *args: None),
        ("gradient", functools.partial(lambda a, p, X, y: None, 1)),
        ("gradient", Callable3()),
        ("gradient", wrapper),
        ("gradient", max),  # does not tell
        ("loop", lambda trainer, part: None),
        ("validate", lambda params, more=1: None),
        ("stop", daskps.optim.SGD),
    ],
)
def test_functions_that_take_their_arguments(what: str, function: Any) -> None:
    check_function(what, function)


@pytest.mark.parametrize(
    ("what", "function", "message"),
    [
        ("gradient", 3, "gradient must be a function, found 3"),
        ("validate", {"a": 1}, "validate must be a function"),
        (
            "gradient",
            lambda params, X: None,
            r"called as gradient\(params, X_batch, y_batch\), but lambda\(params, X\) "
            r"does not take that \(too many.*without labels y_batch is None",
        ),
        ("gradient", lambda p, X, y, z: None, r"\(missing a required argument: 'z'\)"),
        ("loop", lambda trainer: None, r"called as loop\(trainer, part\)"),
        ("stop", lambda: None, r"called as stop\(history\).*\(too many"),
    ],
)
def test_functions_that_do_not(what: str, function: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        check_function(what, function)


def test_metrics_are_numbers_by_name() -> None:
    found = metrics_of({"a": np.float32(0.5), 1: np.array(2)})
    assert found == {"a": 0.5, "1": 2.0}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (0.5, r"validate returned 0\.5 \(float\); return a dict.*'accuracy': 0\.9"),
        (None, r"returned None \(NoneType\)"),
        ({"a": "high"}, "returned 'high' for 'a'; return a dict"),
        ({"a": np.ones(3)}, r"returned array\(.*for 'a'"),
    ],
)
def test_what_validate_returns_otherwise_is_named(found: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        metrics_of(found)


def test_labels_are_missed_only_where_there_are_none() -> None:
    for y, text, noted in [
        (None, "bad operand: 'NoneType'", True),
        (None, "no such file", False),
        (np.ones(1), "bad operand: 'NoneType'", False),
    ]:
        error = TypeError(text)
        note_arguments(error, {"w": y}, y)
        assert hasattr(error, "__notes__") is noted


def test_params_of_a_list_are_a_dict(train: Any, client: Any) -> None:
    def error(params: Any, X: Any, y: Any) -> Any:
        return X @ params[0]

    with (
        daskps.create(
            [np.zeros(2), np.zeros(())], optimizer=optim.SGD(0.1), client=client
        ) as made,
        pytest.raises(KeyError) as raised,
    ):
        train(made, error, X, Y)
    assert any("params['0']; daskps.unflatten" in n for n in raised.value.__notes__)


BAD = np.zeros((4, 3))
BAD[1:3, 2] = np.nan


@pytest.mark.parametrize(
    ("X", "y", "said"),
    [
        (BAD, None, "so has X of its batch, in 2 of 4 rows, first in column 2: drop"),
        (
            SimpleNamespace(toarray=lambda: BAD),
            None,
            "so has X of its batch, in 2 of 4 rows",
        ),
        (np.zeros((4, 3)), BAD[:, 2], "so has y of its batch, in 2 of 4 rows: drop"),
        (BAD.reshape(2, 2, 3), None, "X of its batch, in 2 of 2 rows: drop"),
        (np.zeros((4, 3)), np.zeros(4), "X and y of its batch are finite: lower the"),
        (np.array(["a"]), None, "lower the learning rate"),
        (np.zeros((0, 3)), None, "lower the learning rate"),
    ],
)
def test_advice_looks_at_the_batch(X: Any, y: Any, said: str) -> None:
    assert said in advice(X, y)


# -- in a run --------------------------------------------------------------------------

X, Y = np.ones((40, 2)), np.ones(40)
#: Out of mypy's sight, which finds mistakes as well.
run_train: Any = daskps.train


def gradient(params: Any, X: Any, y: Any) -> Any:
    error = X @ params["w"] - y
    return float(error @ error), {"w": X.T @ error}


@pytest.fixture
def store(client: Any) -> Any:
    return daskps.create({"w": np.zeros(2)}, optimizer=optim.SGD(0.1))


def test_nan_in_the_data_is_not_blamed_on_the_learning_rate(
    train: Any, store: Any
) -> None:
    dirty = X.copy()
    dirty[7, 1] = np.nan
    with pytest.raises(PushRejectedError, match="so has X of its batch, in 1 of") as e:
        train(store, gradient, dirty, Y)
    assert "learning rate" not in str(e.value)
    assert store.version == 0


def test_forgotten_labels_are_noted(train: Any, store: Any) -> None:
    with pytest.raises(TypeError, match="NoneType") as caught:
        train(store, gradient, X)
    assert any("called without y" in note for note in caught.value.__notes__)


def test_functions_are_looked_at_before_anything_starts(store: Any) -> None:
    takes_two: Any = {"validate": lambda params, more: {}}
    for bad in ({"validate": 3}, {"stop": 3}, takes_two):
        with pytest.raises(TypeError, match=r"must be a function|called as validate"):
            run_train(store, gradient, X, Y, **bad)
    with pytest.raises(TypeError, match="validate returned 0"):
        run_train(store, gradient, X, Y, validate=lambda params: 0.5)


def test_bfloat16_rows_are_refused_with_the_fix(store: Any) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"X is a Tensor of bfloat16.*\.float\(\)"):
        daskps.train(store, gradient, torch.ones(40, 2, dtype=torch.bfloat16), Y)


class Counting:
    """A gradient that counts its calls."""

    calls = 0

    def __call__(self, params: Any, X: Any, y: Any) -> Any:
        self.calls += 1
        return {"w": np.array([float(self.calls)])}


def test_a_gradient_keeps_its_state_for_each_rank(train: Any, client: Any) -> None:
    """Of more ranks than threads, over two windows of rounds; a second run begins anew."""
    worker, gradient = min(client.nthreads()), Counting()
    about: dict[str, Any] = {"batch_size": 1, "trainers": 4, "workers": worker}
    with daskps.create({"w": np.zeros(1)}, optimizer=optim.SGD(1.0)) as store:
        for run in (1, 2):
            found = train(store, gradient, np.zeros((80, 1)), **about)
            assert found.weights["w"] == -run * sum(range(1, 21))
    assert gradient.calls == 0
