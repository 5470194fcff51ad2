"""Pulls that wait for a version."""

from __future__ import annotations

import numpy as np
import pytest

import daskps
from daskps import TableSpec
from tests.support import INSIDE

inside = pytest.mark.parametrize("way", INSIDE, indirect=True)


@inside
def test_a_shard_without_elements_is_not_waited_for(way):
    """It never has an update: one element is in the first of two shards."""
    with daskps.create({"w": np.zeros(1)}, shards=2) as store:
        assert store.assign({"w": np.ones(1)}).pairs == ((0, 1),)
        out = {"w": np.empty(1)}
        for how in ({}, {"names": "w"}, {"out": out}):
            assert store.pull(min_version=1, timeout=30, **how)["w"] == [1.0]
        assert store.pull_async(min_version=1, timeout=30).result()["w"] == [1.0]


@inside
def test_a_store_without_arrays_has_none_to_pull(way):
    with daskps.create({"t": TableSpec(4, 2)}, shards=2) as store:
        assert store.pull(timeout=30) == {}
        assert store.pull_async(timeout=30).result() == {}
