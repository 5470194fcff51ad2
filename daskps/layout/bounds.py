"""Cuts into parts of nearly the same size, like ``np.array_split``."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def bounds(n: int, k: int, i: int) -> tuple[int, int]:
    """Return start and stop of part `i` of `n` elements cut in `k`, as array_split."""
    size, longer = divmod(n, k)
    start = i * size + min(i, longer)
    return start, start + size + (i < longer)


def spread(edges: Sequence[int], shards: Sequence[int], n_shards: int) -> Sequence[int]:
    """Return where the parts of all shards begin, of what is cut over some of them.

    Parameters
    ----------
    edges : sequence of int
        Where the part of each of these shards begins, and the last of them ends.
    shards : sequence of int
        The numbers of the shards, ascending.
    n_shards : int
        Number of all shards.

    Returns
    -------
    sequence of int
        Where the part of each shard begins, and the last one ends. Those of other shards
        are empty.

    Examples
    --------
    >>> spread([0, 5, 10], (1, 3), 5)
    [0, 0, 5, 5, 10, 10]
    """
    return [edges[bisect_left(shards, shard)] for shard in range(n_shards + 1)]
