"""What a run says of itself: once, and only where something looks wrong."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import daskps
from daskps.layout.arrays import Layout
from daskps.training.advice import Losses, first_loss, unnamed, unnamed_text


def said(losses: list[float], first: float | None = None) -> list[int]:
    """Return the epochs of which something was said."""
    watch = Losses()
    return [
        epoch
        for epoch, loss in enumerate(losses)
        if watch.look(epoch, loss, None if epoch else first)
    ]


@pytest.mark.parametrize(
    ("losses", "first", "epochs"),
    [
        ([1.0, 0.5, 499.0], None, []),
        ([1.0, 0.5, 501.0, 502.0, 0.1, 503.0], None, [2]),  # once
        ([1e5], 3.0, [0]),  # in the first epoch
        ([1e5], None, []),
        ([1e5, 1e7, 2e8], None, [2]),
        ([math.inf, math.nan], 1.0, []),  # refused elsewhere
        ([-1.0, -0.0001, -1000.0], None, []),
        ([-1.0, 1000.0], None, []),
        ([1.0, 1e-9, 1e-5], None, []),  # rounding errors
        ([1.0, 1e-9, 2e-3], None, [2]),
        ([0.0, 0.5, 600.0], None, [2]),
    ],
)
def test_a_loss_a_thousand_times_its_best_is_said(
    losses: list[float], first: float | None, epochs: list[int]
) -> None:
    assert said(losses, first) == epochs


def test_first_loss_is_of_the_first_rows_of_all_ranks() -> None:
    assert first_loss([{"first": (8.0, 4)}, {"first": [1.0, 5]}]) == 1.0
    assert first_loss([{"first": (0.0, 0)}]) is None


def meta(**optimizers: bool) -> Any:
    shapes = dict.fromkeys(optimizers, ((2,), "float32"))
    layout = Layout.build({**shapes, "empty": ((0,), "float32")}, 2)
    rules = [i for i, has in enumerate(optimizers.values()) if has] + [len(optimizers)]
    return SimpleNamespace(layout=layout, optimizers=dict.fromkeys(rules, "SGD"))


def test_unnamed_are_those_with_a_rule_that_no_shard_has_changed() -> None:
    store = meta(a=True, b=True, frozen=False)
    assert unnamed(store, [[0], []]) == ["b"]
    assert unnamed(store, [[0], [1]]) == []
    assert unnamed(store, [[], []]) == ["a", "b"]
    # A shard that came here during the run does not know.
    assert unnamed(store, [[0], None]) == []


def test_tables_are_unnamed_as_arrays_are() -> None:
    tables = {"emb": (9, 2, "float32"), "n": (9, 1, "int8")}
    layout = Layout.build({"w": ((2,), "float32")}, 2, tables=tables)
    rules = dict.fromkeys([0, *(layout.table_by_name[n].index for n in tables)], "SGD")
    del rules[layout.table_by_name["n"].index]
    store: Any = SimpleNamespace(layout=layout, optimizers=rules)
    assert unnamed(store, [[0], []]) == ["emb"]
    assert unnamed(store, [[], [layout.table_by_name["emb"].index]]) == ["w"]


def test_many_names_are_counted() -> None:
    text = unnamed_text("s", [f"p{i}" for i in range(7)])
    assert "'p4' and 2 others" in text
    assert "p5" not in text
    assert "other" not in unnamed_text("s", ["p", "q"])


def halves(params: Any, X: Any, y: Any = None) -> Any:
    """Name one of two parameters, with a sum where a mean belongs."""
    return float(params["w"] ** 2), {"w": 6.0 * params["w"]}


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Any:
    """Returns what was said since it was asked last."""
    caplog.set_level(logging.WARNING, "daskps.training")

    def news() -> list[str]:
        found = [r.getMessage() for r in caplog.records if "daskps.t" in r.name]
        caplog.clear()
        return found

    return news


def test_a_run_says_both_once(train: Any, client: Any, warnings: Any) -> None:
    """The loss grows 25-fold with each of the three rounds of an epoch."""
    params = {"w": np.float64(1), "b": np.zeros(2), "c": np.zeros(1, int)}
    with daskps.create(params, optimizer=daskps.optim.SGD(1.0)) as store:
        train(store, halves, np.zeros((192, 1)), epochs=2, trainers=1)
    diverges, names = warnings()
    assert "the loss of epoch 1 is 3.39e+06, and was 1 before" in diverges
    assert "means over the batch, and not sums" in diverges
    assert "'b'" in names
    assert "'w'" not in names
    assert "'c'" not in names


def test_a_loop_that_names_some_hears_of_the_others(client: Any, warnings: Any) -> None:
    def push(trainer: Any, part: Any) -> None:
        trainer.push({"w": np.ones(1)})

    def pull(trainer: Any, part: Any) -> None:
        trainer.pull()

    params = {"w": np.zeros(1), "b": np.zeros(2)}
    for sync in ("bsp", "asp"):
        with daskps.create(params, optimizer=daskps.optim.SGD(1.0)) as store:
            daskps.run(store, pull, [0], sync=sync)
            assert warnings() == []
            daskps.run(store, push, [0], sync=sync)
            [text] = warnings()
            assert "'b'" in text


def test_models_that_are_averaged_name_what_they_change(
    train: Any, client: Any, warnings: Any
) -> None:
    def step(params: Any, X: Any, y: Any = None) -> Any:
        return {"w": np.ones(1)}

    params = {"w": np.zeros(1), "b": np.zeros(2)}
    with daskps.create(params, optimizer=daskps.optim.SGD(1.0)) as store:
        train(store, step, np.zeros((8, 1)), average="models", trainers=1)
    [text] = warnings()
    assert "'b'" in text
    assert "'w'" not in text


def test_a_run_whose_store_has_gone_since_ends_well(client: Any) -> None:
    def last(trainer: Any, part: Any) -> int:
        return int(trainer.push({"w": np.ones(1)}))

    class Delete:
        def on_stop(self, run: Any) -> None:
            run.store.delete()

    params, rule = {"w": np.zeros(1)}, daskps.optim.SGD(1.0)
    store = daskps.create(params, optimizer=rule, name="goes")
    assert daskps.run(store, last, [0], callbacks=[Delete()]) == [1]
