"""The helpers for tests of others, where they refuse, and what they do not import."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import daskps
from daskps import optim, testing


def test_pytest_is_imported_for_fixtures_alone() -> None:
    code = (
        "import sys, daskps.testing as t\n"
        "assert 'pytest' not in sys.modules\n"
        "assert t.client and t.cluster and 'pytest' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'clients'"):
        _ = testing.clients


@pytest.mark.parametrize("change", ["number", "machine", "namespace"])
def test_only_processes_that_can_be_reached_are_killed(change: str) -> None:
    """The number of a worker elsewhere is that of any process here."""

    def run(place: Callable[[], Any], workers: list[str]) -> dict[str, Any]:
        _, machine, namespace = place()
        of_worker = {
            "number": (os.getpid(), machine, namespace),
            "machine": (os.getppid(), "another", namespace),
            "namespace": (os.getppid(), machine, namespace + 1),
        }
        return {workers[0]: of_worker[change]}

    client = mock.Mock(run=run)
    client.nthreads.return_value = {"tcp://a:1": 1}
    with (
        mock.patch("os.kill") as kill,
        pytest.raises(ValueError, match="is no other process of this machine"),
    ):
        testing.kill_worker(client, "tcp://a:1")
    kill.assert_not_called()
    with pytest.raises(ValueError, match="no worker 'tcp://b:2'; there are"):
        testing.kill_worker(client, "tcp://b:2")


def test_until_gives_up() -> None:
    with pytest.raises(AssertionError, match=r"not within 0\.0 s"):
        testing.until(lambda: None, 0.0)


def test_pushes_that_are_lost_or_counted_twice_are_found() -> None:
    oracle = testing.PushOracle(shards=3, producers=2, pushes=120)
    values = oracle.params()

    def apply(grads: dict[str, Any]) -> None:
        for name, grad in grads.items():
            values[name] = values[name] - grad

    for push in range(120):
        apply(oracle.grads(1, push))
    assert oracle.faults(values) == []
    assert oracle.total(values) == 120
    whole = {name: value.copy() for name, value in values.items()}
    # One shard lost a push; then another one took one twice.
    values["o2"] = whole["o2"] + oracle.grads(1, 77)["o2"]
    assert oracle.faults(values) == ["push 77 of 1 is on [0, 1] only"]
    values = {**whole, "o1": whole["o1"] - oracle.grads(1, 76)["o1"]}
    assert oracle.faults(values)


def test_state_of_a_rule_begins_where_the_rule_says() -> None:
    rule = optim.Adagrad(0.1, initial_accumulator_value=3.0)
    found = testing.updated(rule, np.ones((2, 2)), [np.ones((2, 2))] * 2)
    assert found.shape == (2, 2)
    np.testing.assert_allclose(found, 1 - 0.1 / 2 - 0.1 / 5**0.5)
    assert daskps.testing.updated(rule, [1.0], []).tolist() == [1.0]


@pytest.mark.parametrize(
    "error",
    [daskps.StoreClosedError("gone"), daskps.StoreNotFoundError("gone")],
    ids=["closed", "freed"],
)
def test_a_store_that_goes_meanwhile_is_no_error(error: Exception) -> None:
    """As a session store whose last handle is collected just then."""
    stores = [
        [],
        [SimpleNamespace(uid="1", name="s"), SimpleNamespace(uid="2", name="t")],
    ]
    handle = mock.Mock(**{"return_value.delete.side_effect": [error, None]})
    with (
        mock.patch.object(daskps, "list_stores", side_effect=stores),
        mock.patch.object(daskps, "ParameterStore", handle),
        testing.cleaned(mock.MagicMock()),
    ):
        pass
    assert handle.call_args_list == [mock.call("1", "s"), mock.call("2", "t")]
