"""Gradients like those of the step before are checked as any others are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskps.errors import NoOptimizerError, PushRejectedError, UnknownParameterError
from daskps.layout.arrays import Layout
from daskps.store import intake
from daskps.store.intake import RepeatedGradients
from tests.cluster.callers import counted

SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "w": ((2, 3), "float32"),
    "b": ((), "float64"),
    "h": ((4,), "float16"),
    "n": ((2,), "int64"),
    "u": ((2,), "float32"),
}
LAYOUT = Layout.build(SHAPES, 2)
OPTIMIZERS = {LAYOUT[name].index: "sgd" for name in "wbh"}
GOOD: dict[str, Any] = {
    "w": np.ones((2, 3), "f4"),
    "b": np.array(2.0),
    "h": np.ones(4, "f4"),
}


def known(finite: bool = True) -> RepeatedGradients:
    found = RepeatedGradients(LAYOUT, OPTIMIZERS, finite=finite)
    found.take(GOOD)
    return found


def same(found: Any, given: Any) -> None:
    wanted = intake.gradients(LAYOUT, OPTIMIZERS, given, finite=True)
    assert [*found] == [*wanted]
    for index, array in wanted.items():
        assert found[index].dtype == array.dtype
        assert found[index].shape == array.shape
        assert found[index].tobytes() == array.tobytes()


def test_what_is_repeated_is_looked_at_in_one_go():
    gradients = known()
    names = counted(lambda: gradients.take(GOOD))
    # Of each array whether it is finite.
    assert names == ["RepeatedGradients.take", "finite", "finite", "finite"]
    same(gradients.take(GOOD), GOOD)
    assert np.shares_memory(gradients.take(GOOD)[LAYOUT["w"].index], GOOD["w"])


@pytest.mark.parametrize(
    "given",
    [
        {"w": GOOD["w"], "b": GOOD["b"]},
        {"b": GOOD["b"], "w": GOOD["w"], "h": GOOD["h"]},
        GOOD | {"w": np.ones((3, 2), "f4").T},
        GOOD | {"w": np.ones((2, 3), "f8")},
        GOOD | {"w": np.ones((2, 3), ">f4")},
        GOOD | {"w": [[1, 2, 3], [4, 5, 6]]},
        GOOD | {"b": 3},
        GOOD | {"h": np.ones(4, "f2")},
    ],
)
def test_what_differs_is_looked_at_anew(given):
    gradients = known()
    same(gradients.take(given), given)
    same(gradients.take(given), given)
    same(gradients.take(GOOD), GOOD)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"w": np.full((2, 3), np.nan, "f4")}, PushRejectedError),
        ({"b": np.array(np.inf)}, PushRejectedError),
        ({"w": np.ones((3, 2), "f4")}, PushRejectedError),
        ({"w": np.ma.masked_array(GOOD["w"], GOOD["w"] > 0)}, PushRejectedError),
        ({"n": np.ones(2)}, PushRejectedError),
        ({"u": np.ones(2, "f4")}, NoOptimizerError),
        ({"x": np.ones(2, "f4")}, UnknownParameterError),
    ],
)
def test_what_is_wrong_is_refused_after_any_that_were_good(bad, error):
    gradients = known()
    with pytest.raises(error) as found:
        gradients.take(GOOD | bad)
    with pytest.raises(error) as wanted:
        intake.gradients(LAYOUT, OPTIMIZERS, GOOD | bad, finite=True)
    assert str(found.value) == str(wanted.value)
    same(gradients.take(GOOD), GOOD)


def test_numbers_are_looked_at_only_where_that_is_asked_for():
    bad = GOOD | {"w": np.full((2, 3), np.nan, "f4")}
    assert np.isnan(known(finite=False).take(bad)[LAYOUT["w"].index]).all()


def test_names_that_are_nested_are_known_to_nobody():
    nested = {"w": {"a": np.ones(2, "f4")}}
    layout = Layout.build({"w/a": ((2,), "float32")}, 1)
    gradients = RepeatedGradients(layout, {0: "sgd"}, finite=True)
    for _ in range(2):
        assert gradients.take(nested)[0].tolist() == [1.0, 1.0]
