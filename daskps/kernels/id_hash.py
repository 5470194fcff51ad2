"""Hashes of ids: whose a row with any id is.

The hash of an id is ``mix64(id ^ seed)``, of 64 bits, where ``mix64`` is the finalizer of
splitmix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators")::

    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)

of numbers without a sign that wrap around. It is one to one. Rows lie in memory where it
says: another one is another format. Its upper half says which bucket an id belongs to, of
``n``: ``(hash >> 32) * n >> 32``. Its lower half is for the index of a shard.
"""
# ruff: noqa: PLR0917  (compiled functions take arguments by position)

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.kernels.inputs import ID, check_input
from daskps.kernels.row_split import Split, add_up, near, split_by
from daskps.kernels.row_values import mixed
from daskps.kernels.words import plain

if TYPE_CHECKING:
    from daskps.kernels.words import Hash, Ids, Ints, Long, Longs
    from daskps.typing import Array

_HALF = 32
_WORD_MASK = (1 << 64) - 1


def bucket(row: Long, seed: Hash, n_buckets: Hash) -> Any:
    """Return the bucket of an id."""
    return (mixed(np.uint64(row) ^ seed) >> np.uint64(_HALF)) * n_buckets >> np.uint64(
        _HALF
    )


def bucketed(ids: Ids, seed: Hash, n_buckets: Hash, out: Longs) -> None:
    """Find the bucket of each id."""
    for k in range(ids.size):
        out[k] = np.int64(bucket(ids[k], seed, n_buckets))


def owners_by_hash(
    ids: Ids, seed: Hash, n_buckets: Hash, edges: Ids, owner: Ints, starts: Longs
) -> None:
    """Find the shard that owns the bucket of each id, and count."""
    n = edges.size - 1
    per_bucket = n / np.float64(n_buckets)
    for k in range(ids.size):
        found = np.int64(bucket(ids[k], seed, n_buckets))
        # Shards own about as many buckets as each other: a guess, and then those next to it.
        s = near(edges, found, min(n - 1, np.int64(found * per_bucket)))
        owner[k] = s
        starts[s + 1] += 1
    add_up(starts)


_module = functools.cache(functools.partial(plain, (bucketed, owners_by_hash)))


def buckets(
    ids: Array, seed: int, n_buckets: int, *, cache_dir: str | None = None
) -> Array:
    """Return the bucket of each id.

    Parameters
    ----------
    ids : ndarray, shape (k,), int64
        Any; contiguous.
    seed : int
        Of the table: 64 bits, with a sign or without.
    n_buckets : int
        At least 1, at most 2**32.
    cache_dir : str, optional
        Where the compiled loops are kept, as in `build`.

    Returns
    -------
    ndarray, shape (k,), int64
        Numbers from 0 to ``n_buckets - 1``.

    Raises
    ------
    ValueError
        If `ids` is not as described.
    """
    check_input(ids, ID, (ids.size,))
    out = np.empty(len(ids), np.int64)
    loop = _module(cache_dir).function("bucketed")
    loop(ids, np.uint64(seed & _WORD_MASK), np.uint64(n_buckets), out)
    return out


def hashes(ids: Array, seed: int) -> Array:
    """Return the whole hash of each id, which says where it is in a table.

    Parameters
    ----------
    ids : ndarray, int64
        Any.
    seed : int
        As in `buckets`.

    Returns
    -------
    ndarray, uint64
        As many.
    """
    found: Array = mixed(ids.view(np.uint64) ^ np.uint64(seed & _WORD_MASK))
    return found


def split(
    ids: Array, seed: int, edges: Array, *, cache_dir: str | None = None
) -> Split:
    """Sort ids by the shard that owns their bucket, and keep their order in each.

    Parameters
    ----------
    ids : ndarray, shape (k,), int64
        Any, in any order; contiguous. They may repeat.
    seed : int
        Of the table: 64 bits, with a sign or without.
    edges : ndarray, shape (n + 1,), int64
        Shard s owns buckets [edges[s], edges[s + 1]), maybe none; from
        :func:`daskps.layout.buckets.bucket_edges`.
    cache_dir : str, optional
        Where the compiled loops are kept, as in `build`.

    Returns
    -------
    Split
        As of :func:`daskps.kernels.row_split.split`; there is a shard for every id.

    Raises
    ------
    ValueError
        If an array is not as described.
    """
    check_input(ids, ID, (ids.size,))
    n, k = len(edges) - 1, len(ids)
    if n == 1 or not k:
        return Split(ids, None, [0] + [k] * n)
    check_input(edges, ID, (n + 1,))
    if edges[0] or not 0 < edges[n] <= 1 << _HALF or (edges[1:] < edges[:-1]).any():
        raise ValueError(
            f"expected edges that rise from 0 to at most 2**32, got {edges}"
        )
    starts, owner = np.zeros(n + 1, np.int64), np.empty(k, np.int32)
    word, n_buckets = np.uint64(seed & _WORD_MASK), np.uint64(edges[n])
    loop = _module(cache_dir).function("owners_by_hash")
    loop(ids, word, n_buckets, edges, owner, starts)
    return split_by(ids, owner, starts, cache_dir=cache_dir)
