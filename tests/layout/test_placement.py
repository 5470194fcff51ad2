from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.errors import LayoutError
from daskps.layout.placement import check_memory, place, shards_on


@given(st.integers(1, 200), st.integers(1, 30))
def test_shards_are_dealt_in_runs_balanced_within_one(n_shards, n_servers):
    servers = [f"tcp://{i}" for i in range(n_servers)]
    owners = place(n_shards, servers)
    counts = Counter(owners)
    assert len(owners) == n_shards
    assert len(counts) == min(n_shards, n_servers)
    assert max(counts.values()) - min(counts.values()) <= 1
    # Neighbours are together: no server comes back after another one.
    assert list(dict.fromkeys(owners)) == servers[: len(counts)]
    assert sorted(owners, key=servers.index) == list(owners)


@pytest.mark.parametrize(("n", "servers"), [(1, []), (0, ["a"])])
def test_nothing_to_place_or_nowhere_is_refused(n, servers):
    with pytest.raises(LayoutError, match="at least one of each"):
        place(n, servers)


def test_memory_is_counted_with_what_is_held():
    check_memory({"a": 50}, {"a": 30}, {"a": 100}, 0.8)
    with pytest.raises(LayoutError, match=r"worker a need 51 bytes.*30 already.*80%"):
        check_memory({"a": 51}, {"a": 30}, {"a": 100}, 0.8)


def test_a_worker_without_a_limit_takes_everything():
    check_memory({"a": 10**15, "b": 10**15}, {}, {"a": 0}, 0.5)


def test_what_is_placed_goes_to_all_shards_of_its_servers_or_one_of_one():
    owners = ("a", "a", "b", "b", "c")
    assert shards_on(["b"], owners) == (2,)
    assert shards_on(["b", "b"], owners) == (2,)
    assert shards_on(["c", "a"], owners) == (0, 1, 4)
    with pytest.raises(
        LayoutError, match=r"names 'd', which owns no shard.*\['a', 'b'"
    ):
        shards_on(["a", "d"], owners)
