"""Tables of so many rows at most: ids are in buckets, and each bucket has its rows, compiled.

The buckets of a table are numbered, and its shards have some of them each, in order; which
one an id is in follows from its hash. So how many shards there are changes no row's fate.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from daskps.kernels.id_hash import bucket
from daskps.kernels.index_probe import (
    BUCKETS,
    FIRST_BUCKET,
    HEAD,
    KEYS,
    MAX_ROWS,
    ROWS,
    SEED,
    STATE,
)


def rows_before(words: Any, places: Any, number: Any) -> Any:
    """Return how many rows of the whole table are in the buckets before one."""
    head = places[2 * HEAD]
    most, n = words[head + MAX_ROWS], words[head + BUCKETS]
    return number * (most // n) + min(number, most % n)


def seat(words: Any, places: Any, row: Any, stamp: Any) -> Any:
    """Return a row of an id's bucket: a free one, or -2 minus the one that has to go.

    -1 if it is the id itself that has to.
    """
    head, keys, state = places[2 * HEAD], places[2 * KEYS], places[2 * STATE]
    seed, n = np.uint64(words[head + SEED]), np.uint64(words[head + BUCKETS])
    mine = np.int64(bucket(row, seed, n))
    start = rows_before(words, places, words[head + FIRST_BUCKET])
    low = rows_before(words, places, mine) - start
    high = rows_before(words, places, mine + 1) - start
    oldest, its_stamp, its_id = np.int64(-1), stamp, row
    for at in range(low, high):
        now = words[state + at]
        if now <= 0:
            return np.int64(at)
        its_key = words[keys + at]
        if now < its_stamp or (now == its_stamp and its_key < its_id):
            oldest, its_stamp, its_id = np.int64(at), now, its_key
    return np.int64(-1) if oldest < 0 else -2 - oldest


def is_here(words: Any, places: Any, row: Any) -> Any:
    """Return whether an id's bucket is one of this piece, where there are buckets."""
    head = places[2 * HEAD]
    if words[head + BUCKETS] == 0:
        return True
    seed, n = np.uint64(words[head + SEED]), np.uint64(words[head + BUCKETS])
    mine = np.int64(bucket(row, seed, n))
    low = words[head + FIRST_BUCKET]
    stop = rows_before(words, places, low) + words[head + ROWS]
    return mine >= low and rows_before(words, places, mine + 1) <= stop
