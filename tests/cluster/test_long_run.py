"""Pushes, rounds and tasks leave nothing behind that would grow with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import daskps
from daskps import optim
from tests.cluster import long_run


@pytest.mark.parametrize(
    ("copies", "n"), [(1, 150), (2, 50)], ids=["one copy", "two copies"]
)
def test_nothing_grows_with_a_run(client: Any, copies: int, n: int) -> None:
    """But two events for each run, and the place of each pusher, which is reused."""
    params = {"w": np.zeros(long_run.WIDTH)}
    with daskps.create(params, optimizer=optim.SGD(1.0), copies=copies) as store:
        long_run.work(client, store, 20)
        grown = long_run.growth(client, store, n)
    assert grown.pop("events") == 2 * 2
    assert 0 <= grown.pop("most producers") <= n // 50
    # What tests before this one have left may go meanwhile.
    assert max(grown.values()) <= 0, grown
