"""Buckets of ids: the shard of a row of any id, and the row that makes room for it.

An id belongs to a bucket by its hash (:mod:`daskps.kernels.id_hash`), and a shard owns
whole buckets, contiguous ones, like ``np.array_split``. How many there are depends on the
largest number of rows alone. A bucket holds so many rows and no more: which rows have to
go is settled inside one bucket, and so is the same on any number of shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from daskps.layout.bounds import bounds

if TYPE_CHECKING:
    from daskps.typing import Array

#: Rows that a bucket holds at most. With fewer, more rows are pushed out of buckets that
#: are full while others are not; with more, looking for the oldest one takes longer.
BUCKET_ROWS: Final = 128
#: Buckets of a table without a largest number of rows: all values of half a hash.
MOST_BUCKETS: Final = 2**32


def n_buckets(max_rows: int | None) -> int:
    """Return how many buckets a table has.

    Parameters
    ----------
    max_rows : int or None
        How many rows it holds at most, at least 1; None for any number.

    Returns
    -------
    int
        At least 1, and at most 2**32.
    """
    if max_rows is None:
        return MOST_BUCKETS
    return min(MOST_BUCKETS, -(-max_rows // BUCKET_ROWS))


def bucket_edges(n: int, n_shards: int) -> Array:
    """Return which buckets each shard owns: s those from edge s up to edge s + 1.

    Parameters
    ----------
    n : int
        Number of buckets.
    n_shards : int
        Number of shards; with fewer buckets some own none.

    Returns
    -------
    ndarray, shape (n_shards + 1,), int64
        The edges.
    """
    starts = [bounds(n, n_shards, s)[0] for s in range(n_shards)]
    return np.array([*starts, n], np.int64)


def bucket_rows(max_rows: int, bucket: int) -> int:
    """Return how many rows of a table are in the buckets before one.

    Parameters
    ----------
    max_rows : int
        How many rows the table holds at most.
    bucket : int
        Number of the bucket; the number of all buckets for all rows.

    Returns
    -------
    int
        The bucket itself holds those from here to where the next one's begin.
    """
    n = n_buckets(max_rows)
    return max_rows if bucket == n else bounds(max_rows, n, bucket)[0]
