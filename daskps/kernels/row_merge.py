"""Rows of several ranks added up by their ids, along the tree over the ranks.

A row that only some ranks have brought is summed as :func:`daskps.reduction.fold` sums
arrays of those ranks: the others are skipped in place. So the bits of a sum depend on the
number of ranks and on who brought the row, and on nothing else.
"""
# ruff: noqa: PLR0913, PLR0917  (compiled functions take numbers, and by position)

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps.kernels.row_repeats import hash_table, spot
from daskps.kernels.words import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.kernels.words import Floats, GivenFloats, Ids, Ints, Longs
    from daskps.typing import Array

#: Nodes of a tree over the ranks that are open at once: one a level, and one more.
_OPEN = 32


def index(
    spans: Longs,
    ids: Ids,
    table: Ints,
    bits: int,
    distinct: Longs,
    first: Longs,
    last: Longs,
    following: Longs,
    place: Longs,
    owner: Longs,
) -> int:
    """Find the distinct ids, and of each who has brought it, rank by rank.

    `spans` has start, length and rank of each contribution, in the order of ranks.
    Returns how many ids there are. Mention k is at `place[k]`, of the rank `owner[k]`, and
    the next one of its id is `following[k]`.
    """
    n, k = 0, 0
    for one in range(0, spans.size, 3):
        start, rank = spans[one], spans[one + 2]
        for at in range(start, start + spans[one + 1]):
            row = ids[at]
            here = spot(table, distinct, row, bits)
            known = table[here] - 1
            if known < 0:
                distinct[n], first[n] = row, k
                last[n] = k
                n += 1
                table[here] = n
            else:
                following[last[known]] = k
                last[known] = k
            following[k], place[k], owner[k] = -1, at, rank
            k += 1
    return n


def is_within(a: int, b: int, rank: int, size: int) -> bool:
    """Return whether the smallest node of the tree that has ranks a < b has this one too."""
    lo, hi = 0, size
    while True:
        half = 1
        while 2 * half < hi - lo:
            half *= 2
        if b < lo + half:
            hi = lo + half
        elif a >= lo + half:
            lo += half
        else:
            return lo <= rank < hi


def fold(
    k: int,
    following: Longs,
    place: Longs,
    owner: Longs,
    size: int,
    dim: int,
    rows: GivenFloats,
    stack: Floats,
    ranks: Longs,
) -> None:
    """Add up the mentions of an id from the k-th on, in the first row of `stack`."""
    top = 0
    while k >= 0:
        a, b = place[k] * dim, top * dim
        for i in range(dim):
            stack[b + i] = rows[a + i]
        ranks[top] = owner[k]
        top += 1
        k = following[k]
        coming = size
        if k >= 0:
            coming = owner[k]
        # A node is complete once the next rank is outside of it.
        while top > 1 and not is_within(ranks[top - 2], ranks[top - 1], coming, size):
            a, b = (top - 2) * dim, (top - 1) * dim
            for i in range(dim):
                stack[a + i] += stack[b + i]
            top -= 1


def merge(
    n: int,
    first: Longs,
    following: Longs,
    place: Longs,
    owner: Longs,
    size: int,
    dim: int,
    rows: GivenFloats,
    divisor: GivenFloats,
    stack: Floats,
    ranks: Longs,
    out: Floats,
) -> None:
    """Add up the rows of each id along the tree over `size` ranks, and divide the sum."""
    d = divisor[0]
    for j in range(n):
        k, to = first[j], j * dim
        a, second = place[k] * dim, following[k]
        if second < 0:
            for i in range(dim):
                out[to + i] = rows[a + i] / d
        elif following[second] < 0:
            b = place[second] * dim
            for i in range(dim):
                out[to + i] = (rows[a + i] + rows[b + i]) / d
        else:
            fold(k, following, place, owner, size, dim, rows, stack, ranks)
            for i in range(dim):
                out[to + i] = stack[i] / d


_module = functools.cache(functools.partial(plain, (merge,)))
_index_module = functools.cache(functools.partial(plain, (index,)))


class Brought(NamedTuple):
    """Where the rows of one rank are; none of them twice."""

    start: int
    n: int
    rank: int


def merge_rows(
    brought: Sequence[Brought],
    ids: Array,
    rows: Array,
    size: int,
    divisor: float = 1.0,
    *,
    out: Callable[[int], Array] | None = None,
    cache_dir: str | None = None,
) -> tuple[Array, Array]:
    """Add up the rows that ranks have brought, id by id.

    Parameters
    ----------
    brought : sequence of Brought
        The places of each rank's rows, in the order of ranks.
    ids : ndarray, shape (m,), int64
        Contiguous.
    rows : ndarray, shape (m, dim), float32 or float64
        Contiguous.
    size : int
        Number of ranks P.
    divisor : float
        The divisor of each sum.
    out : callable, optional
        Makes the array of `n` sums, of shape (n, dim).
    cache_dir : str, optional
        Where the compiled loops are kept, as in `build`.

    Returns
    -------
    tuple of (ndarray, ndarray)
        The distinct ids, rank by rank in order of first appearance, and their sums.

    Raises
    ------
    ValueError
        If an array is not as described, or rows are not where they are said to be.
    """
    n, dim = sum(one.n for one in brought), rows.shape[-1]
    _check(brought, ids, rows, size)
    table, bits = hash_table(n)
    distinct, first, last, following, place, owner = np.empty((6, n), np.int64)
    spans = np.array(brought, np.int64).reshape(-1)
    chain = first, last, following, place, owner
    loop = _index_module(cache_dir).function("index")
    found = loop(spans, ids, table, bits, distinct, *chain)
    sums = np.empty((found, dim), rows.dtype) if out is None else out(found)
    _module(cache_dir, floats=rows.dtype.name).function("merge")(
        found,
        first,
        following,
        place,
        owner,
        size,
        dim,
        rows.reshape(-1),
        np.array([divisor], rows.dtype),
        np.empty(_OPEN * dim, rows.dtype),
        np.empty(_OPEN, np.int64),
        sums.reshape(-1),
    )
    return distinct[:found], sums


def warm(dtype: np.dtype[Any], *, cache_dir: str | None = None) -> None:
    """Compile what merges rows of a dtype, so that the first round finds it."""
    _index_module(cache_dir).function("index")
    _module(cache_dir, floats=dtype.name).function("merge")


def _check(brought: Sequence[Brought], ids: Array, rows: Array, size: int) -> None:
    """Refuse what would be read or written outside."""
    shapes = ids.ndim == 1 and rows.ndim == 2 and len(rows) == len(ids)
    dtypes = ids.dtype == np.int64 and rows.dtype in (np.float32, np.float64)
    whole = ids.flags.c_contiguous and rows.flags.c_contiguous
    inside = all(0 <= b.start <= b.start + b.n <= len(ids) for b in brought)
    ranks = [one.rank for one in brought]
    in_order = ranks == sorted(set(ranks)) and all(0 <= r < size for r in ranks)
    if not (shapes and dtypes and whole and inside and in_order):
        raise ValueError(
            f"{len(brought)} contributions {list(brought)!r:.80} are none of "
            f"{ids.dtype} ids of shape {ids.shape} and {rows.dtype} rows of shape "
            f"{rows.shape}, from {size} ranks in their order"
        )
