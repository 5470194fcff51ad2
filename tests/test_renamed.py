"""Old names of settings, counters and metrics hold for one release, with one warning."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from typing import Any

import dask
import pytest

from daskps.store.renamed import Renamed
from tests.support import store


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("ways.process", "carriers.process", False),
        ("ways.machine", "carriers.machine", False),
        ("ways.lane", "carriers.socket", False),
        ("ways.locked-reads", "carriers.locked-reads", True),
    ],
)
def test_an_old_setting_holds_and_warns(old: str, new: str, value: object) -> None:
    with pytest.warns(FutureWarning, match=f"'daskps.{new}'"):
        setting = dask.config.set({f"daskps.{old}": value})
    with setting:
        assert dask.config.get(f"daskps.{new}") is value


def test_an_old_setting_of_the_environment_holds_and_is_logged() -> None:
    code = "from daskps import config; print(config.load().socket_carrier)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "DASK_DASKPS__WAYS__LANE": "false"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "False\n"
    assert "daskps.ways.lane is called daskps.carriers.socket now" in found.stderr


def test_an_old_counter_is_there_and_warns() -> None:
    found = Renamed({"carriers": {"a": "socket", "b": "message"}, "sockets": 2, "n": 1})
    found = pickle.loads(pickle.dumps(found))
    assert [*found] == ["carriers", "sockets", "n", "ways", "lanes"]
    assert (found["sockets"], found["n"], found.get("lanes")) == (2, 1, 2)
    with pytest.warns(FutureWarning, match="'ways' is called 'carriers' now"):
        assert found["ways"] == {"a": "lane", "b": "message"}
    assert [*Renamed({"n": 1})] == ["n"]


def shown(dask_worker: Any) -> dict[str, int]:
    """Return the numbers that a worker shows of its host."""
    found: dict[str, int] = dask_worker.metrics["daskps"](dask_worker)
    return found


def test_stats_and_metrics_have_both_names(client) -> None:
    with store(client) as s, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        found = s.stats()
        for old, new in ("ways", "carriers"), ("lanes", "sockets"):
            assert found["handle"][old] == found["handle"][new]
        for row in found["shards"]:
            assert row["lane_calls"] == row["socket_calls"]
        for totals in client.run(shown).values():
            assert totals["lanes"] == totals["sockets"]
