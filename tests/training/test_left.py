"""Values that trainers leave in a store as their run ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from distributed import Client

import daskps
from daskps import optim
from daskps.training.left import LeftValues, combined


def test_means_are_weighted_and_what_is_equal_stays() -> None:
    value = np.full(3, 0.1, "f4")
    found = combined(LeftValues({"w": value}, weight) for weight in (3.0, 7.0, 0.1))
    assert found["w"].astype("f4").tobytes() == value.tobytes()
    left = [
        LeftValues({"w": np.array([1.0]), "n": np.array([5])}, 0.0),
        LeftValues({"w": np.array([2.0]), "n": np.array([6])}, 1.0),
        LeftValues({"w": np.array([6.0]), "n": np.array([7])}, 3.0),
    ]
    assert combined(left)["w"].tolist() == [5.0]
    assert combined(left)["n"].tolist() == [6]
    assert combined([]) == combined(left[:1]) == {}


def test_the_last_call_holds_and_is_read_at_the_end(client: Client) -> None:
    def loop(trainer: Any, part: float) -> int:
        values = np.zeros(2)
        trainer.leave({"w": np.ones(2)})
        trainer.leave({"s": {"mean": values}}, weight=part)
        trainer.push({"w": np.ones(2)})
        values += part
        return int(trainer.rank)

    params = {"w": np.zeros(2), "s": {"mean": np.zeros(2, "f4")}}
    rules = {"w": optim.SGD(1.0), "s/*": None}
    with daskps.create(params, optimizer=rules, client=client) as store:
        assert daskps.run(store, loop, [1.0, 3.0]) == [0, 1]
        assert store.pull("s/mean")["s/mean"].tolist() == [2.5, 2.5]
        assert store.pull("w")["w"].tolist() == [-1.0, -1.0]
        with pytest.raises(daskps.NoOptimizerError):
            store.push({"s/mean": np.ones(2)})


@pytest.mark.parametrize(
    ("values", "error", "said"),
    [
        ({"x": 1.0}, daskps.UnknownParameterError, "'x'"),
        ({"w": np.ones(3)}, daskps.PushRejectedError, "shape"),
        ({"w": np.full(2, np.nan)}, daskps.PushRejectedError, "NaN"),
        (3, TypeError, "mapping"),
    ],
)
def test_values_that_the_store_does_not_take(
    client: Client, values: Any, error: type[Exception], said: str
) -> None:
    def loop(trainer: Any, part: Any) -> None:
        trainer.push({"w": np.ones(2)})
        # Else one of them may fail before the other one has pushed.
        trainer.pull()
        trainer.leave(values if trainer.rank else {"w": np.full(2, 9.0)})

    rule = optim.SGD(1.0)
    with daskps.create({"w": np.zeros(2)}, optimizer=rule, client=client) as store:
        with pytest.raises(error, match=said):
            daskps.run(store, loop, [0, 1])
        # The run has failed, so nobody leaves anything.
        assert store.pull()["w"].tolist() == [-1.0, -1.0]
        with pytest.raises(ValueError, match="weight"):
            daskps.run(store, lambda t, _: t.leave({}, weight=-1), [0])
