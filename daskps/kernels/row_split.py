"""Ids of rows in the order of whose they are: sorted by range, or by owners that are known."""
# ruff: noqa: PLR0917  (compiled functions take arguments by position)

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps.kernels import scratch
from daskps.kernels.words import plain

if TYPE_CHECKING:
    from daskps.kernels.words import Ids, Ints, Long, Longs
    from daskps.typing import Array


def near(edges: Ids, row: Long, s: Long) -> Any:
    """Return the range that a number is in, and that may be `s` or one near it."""
    while row < edges[s]:
        s -= 1
    while row >= edges[s + 1]:
        s += 1
    return s


def add_up(starts: Longs) -> None:
    """Make of how many there are in each range where they begin."""
    for s in range(1, starts.size):
        starts[s] += starts[s - 1]


def owners(ids: Ids, edges: Ids, owner: Ints, starts: Longs) -> int:
    """Find the range that each id is in, and count; stop at the first in none."""
    n = edges.size - 1
    low, high = edges[0], edges[n]
    per_row = n / max(1, high - low)
    for k in range(ids.size):
        row = ids[k]
        if row < low or row >= high:
            return k
        # Ranges are about as long as each other: a guess, and then the few next to it.
        s = near(edges, row, min(n - 1, int((row - low) * per_row)))
        owner[k] = s
        starts[s + 1] += 1
    add_up(starts)
    return len(ids)


def place(ids: Ids, owner: Ints, starts: Longs, pos: Longs, placed: Longs) -> None:
    """Put ids in the order of their ranges, and of appearance in each."""
    for k in range(ids.size):
        to = starts[owner[k]]
        starts[owner[k]] = to + 1
        pos[to] = k
        placed[to] = ids[k]
    for s in range(starts.size - 1, 0, -1):
        starts[s] = starts[s - 1]
    starts[0] = 0


def halves(ids: Ids, edges: Ids, starts: Longs, pos: Longs, placed: Longs) -> bool:
    """Put ids in the order of two ranges; return whether all of them are in these."""
    low, edge, high = edges[0], edges[1], edges[2]
    first, lowest, highest = 0, low, low
    for k in range(ids.size):
        row = ids[k]
        lowest, highest = min(lowest, row), max(highest, row)
        first += row < edge
    if lowest < low or highest >= high:
        return False
    # Ids come in any order: what depends on them is no branch.
    a, b = 0, first
    for k in range(ids.size):
        row = ids[k]
        is_first = row < edge
        to = a if is_first else b
        placed[to], pos[to] = row, k
        a += is_first
        b += not is_first
    starts[1], starts[2] = first, ids.size
    return True


_module = functools.cache(functools.partial(plain, (owners, place, halves)))


class Split(NamedTuple):
    """Ids by owner: those of owner s are at [starts[s], starts[s + 1])."""

    ids: Array
    #: Where each was; None where that is where it is.
    pos: Array | None
    starts: list[int]


def split(ids: Array, edges: Array, *, cache_dir: str | None = None) -> Split | None:
    """Sort ids by the range of rows that they are in, and keep their order in each.

    Parameters
    ----------
    ids : ndarray, shape (k,), int64
        Contiguous, in any order; they may repeat.
    edges : ndarray, shape (n + 1,), int64
        Range s is rows [edges[s], edges[s + 1]); some may be empty.
    cache_dir : str, optional
        Where the compiled loops are kept, as in `build`.

    Returns
    -------
    Split or None
        None if an id is in no range: `layout.ids.check_ids` says which.
    """
    n, k = len(edges) - 1, len(ids)
    if n == 1:
        inside = not k or (ids.min() >= edges[0] and ids.max() < edges[1])
        return Split(ids, None, [0, k]) if inside else None
    starts = np.zeros(n + 1, np.int64)
    if n == 2 and k:
        pos, placed = scratch.empty(2 * k, np.int64).reshape(2, k)
        if not _module(cache_dir).function("halves")(ids, edges, starts, pos, placed):
            return None
        return Split(placed, pos, starts.tolist())
    if k:
        owner = scratch.empty(k, np.int32)
        if _module(cache_dir).function("owners")(ids, edges, owner, starts) < k:
            return None
        return split_by(ids, owner, starts, cache_dir=cache_dir)
    return Split(ids, None, starts.tolist())


def split_by(
    ids: Array, owner: Array, starts: Array, *, cache_dir: str | None = None
) -> Split:
    """Sort ids by owners that are known, and keep their order in each.

    Parameters
    ----------
    ids : ndarray, shape (k,), int64
        Contiguous.
    owner : ndarray, shape (k,), int32
        The owner of each, from 0 to n - 1.
    starts : ndarray, shape (n + 1,), int64
        How many ids those before each owner have together.
    cache_dir : str, optional
        Where the compiled loops are kept, as in `build`.

    Returns
    -------
    Split
        The ids by owner.
    """
    pos, placed = scratch.empty(2 * len(ids), np.int64).reshape(2, len(ids))
    _module(cache_dir).function("place")(ids, owner, starts, pos, placed)
    return Split(placed, pos, starts.tolist())
