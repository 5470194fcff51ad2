"""Ids by hash: buckets and shards, against plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskps.kernels import id_hash
from daskps.layout.buckets import bucket_edges, bucket_rows, n_buckets
from tests.kernels.compiling import kept

WORD = 2**64
INT64 = st.integers(-(2**63), 2**63 - 1)


def mix64(x: int) -> int:
    """As the paper writes it, with numbers that do not wrap around."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB % WORD
    return x ^ x >> 31


def bucket(row: int, seed: int, n: int) -> int:
    return (mix64((row ^ seed) % WORD) >> 32) * n >> 32


@settings(max_examples=40)
@given(
    st.lists(INT64, max_size=40),
    INT64 | st.integers(0, WORD - 1),
    st.none() | st.integers(1, 5_000) | st.integers(2**40, 2**62),
    st.integers(1, 9),
)
def test_ids_are_split_by_the_owner_of_their_bucket(
    values: Any, seed: int, rows: int | None, shards: int
) -> None:
    n, ids = n_buckets(rows), np.array(values, np.int64)
    wanted = [bucket(i, seed, n) for i in values]
    assert id_hash.buckets(ids, seed, n, cache_dir=kept()).tolist() == wanted
    edges = bucket_edges(n, shards)
    found = id_hash.split(ids, seed, edges, cache_dir=kept())
    pos = np.arange(len(ids)) if found.pos is None else found.pos
    assert len(found.starts) == shards + 1
    assert found.starts[-1] == len(ids)
    for s in range(shards):
        expected = [k for k, b in enumerate(wanted) if edges[s] <= b < edges[s + 1]]
        part = slice(found.starts[s], found.starts[s + 1])
        assert pos[part].tolist() == expected
        assert found.ids[part].tolist() == ids[expected].tolist()


def test_the_hash_stays_what_it_is() -> None:
    """Rows in memory and in snapshots lie where it says."""
    ids = np.array([0, 1, -1, 2**63 - 1, -(2**63), 1234567890123], np.int64)
    assert id_hash.buckets(ids, 0, 2**32, cache_dir=kept()).tolist() == [
        mix64(i % WORD) >> 32 for i in ids.tolist()
    ]
    # The third number that splitmix64 gives from 1234567, from its authors' program.
    state = (1234567 + 3 * 0x9E3779B97F4A7C15) % WORD
    assert mix64(state) == 9817491932198370423
    given = np.array([state - (state >> 63 << 64)], np.int64)
    assert (
        id_hash.buckets(given, 0, 2**32, cache_dir=kept())[0]
        == 9817491932198370423 >> 32
    )


def test_shards_get_about_as_many_ids_of_any_kind() -> None:
    for ids in (np.arange(40_000), np.arange(40_000) << 40, -np.arange(40_000) * 64):
        for rows in (None, 40_000):
            edges = bucket_edges(n_buckets(rows), 5)
            counts = np.diff(id_hash.split(ids, 99, edges, cache_dir=kept()).starts)
            assert abs(counts / 8_000 - 1).max() < 0.08


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 1_000, 12_345])
def test_buckets_hold_all_rows_and_no_more(rows: int) -> None:
    n = n_buckets(rows)
    starts = [bucket_rows(rows, b) for b in range(n + 1)]
    assert (starts[0], starts[-1]) == (0, rows)
    held = np.diff(starts)
    assert held.max() <= 128
    assert held.max() - held.min() <= 1
    for shards in (1, 2, 3, 5):
        edges = bucket_edges(n, shards)
        assert (edges[0], edges[-1], len(edges)) == (0, n, shards + 1)
        assert (np.diff(edges) >= 0).all()


def test_arrays_that_are_no_ids_or_edges_are_refused() -> None:
    ids, edges = np.arange(4), bucket_edges(8, 2)
    for bad in (ids.astype("u8"), ids[::2], ids.reshape(2, 2)):
        with pytest.raises(ValueError, match="expected a contiguous int64"):
            id_hash.split(bad, 0, edges, cache_dir=kept())
        with pytest.raises(ValueError, match="expected a contiguous int64"):
            id_hash.buckets(bad, 0, 8, cache_dir=kept())
    for wrong in ([1, 4, 8], [0, 9, 8], [0, 4, 2**33], [0, 0, 0]):
        with pytest.raises(ValueError, match="expected edges"):
            id_hash.split(ids, 0, np.array(wrong), cache_dir=kept())
