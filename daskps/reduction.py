"""Adding contributions in one fixed order, so that a run has one set of bits.

Sums follow a binary tree over the ranks 0..P-1 that depends on P alone: a node over
the ranks [lo, hi) adds the node of its left part, of the largest power of two ranks
that is less than all, to that of the rest. Ranks that deliver nothing are skipped in
place. Compacting the ranks instead would change the order of the additions, and with
it the bits, whenever a rank sits out.

With powers of two the leaves pair up, (0, 1), (2, 3) and so on, and of a pair a round
never holds more than one sum: halves of odd length would hold two thirds of P.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from functools import lru_cache
from typing import Any

import numpy as np

from daskps.backend import returned, stacked
from daskps.typing import Array
from daskps.usercode import user_code

#: One contribution: arrays and their weights, both by key.
Node = tuple[dict[Any, Array], dict[Any, float]]
Reducer = Callable[[Array, Array], Array]
#: Makes an array like ``np.empty(n, dtype)``.
Empty = Callable[[int, Any], Array]

REDUCTIONS = ("mean", "sum")
#: The operation of an all-reduce on two arrays; a mean divides at the root.
OPERATIONS: Mapping[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "max": np.maximum,
    "min": np.minimum,
}


def check_reduce(reduce: str | Reducer) -> None:
    """Refuse what is neither a known reduction nor callable."""
    if isinstance(reduce, str):
        if reduce not in REDUCTIONS:
            raise ValueError(
                f"reduce={reduce!r} is not known; choose one of {REDUCTIONS} or pass "
                f"a function f(stacked, weights) -> (n,)"
            )
    elif not callable(reduce):
        raise TypeError(
            f"reduce must be one of {REDUCTIONS} or a function, found {reduce!r}"
        )


def split(lo: int, hi: int) -> int:
    """Return the border of the two parts of the tree node over [lo, hi)."""
    return lo + (1 << (hi - lo - 1).bit_length() - 1)


@lru_cache(maxsize=2048)
def path(rank: int, size: int) -> tuple[tuple[int, int, int, bool], ...]:
    """Return the way from a rank up to the root of the tree over `size`.

    Returns
    -------
    tuple of (int, int, int, bool)
        Per node above: the ranks [lo, hi) of it, the border of its parts, and whether
        the other part is the left one.

    Examples
    --------
    >>> path(2, 3)
    ((0, 3, 2, True),)
    """
    found, (lo, hi) = [], (0, size)
    while hi - lo > 1:
        border = split(lo, hi)
        is_right = rank >= border
        found.append((lo, hi, border, is_right))
        lo, hi = (border, hi) if is_right else (lo, border)
    return tuple(reversed(found))


def merge(
    left: Node, right: Node, empty: Empty = np.empty, combine: np.ufunc = np.add
) -> Node:
    """Add `right` to `left` key by key, in place where an array may be written to.

    Contributions that must outlive the sum are handed over as read-only views; their
    sum goes into an array that `empty` makes. `combine` may be another operation.
    """
    arrays, weights = left
    for key, value in right[0].items():
        if key in arrays:
            into = arrays[key]
            arrays[key] = combine(into, value, out=_writeable(into, empty))
            weights[key] += right[1][key]
        else:
            arrays[key], weights[key] = value, right[1][key]
    return left


def mean(node: Node, empty: Empty = np.empty) -> dict[Any, Array]:
    """Divide each sum by its weight, once, at the root of the tree."""
    arrays, weights = node
    for key, value in arrays.items():
        if weights[key] != 1.0:
            out = _writeable(value, empty)
            arrays[key] = np.divide(value, weights[key], out=out)
    return arrays


def _writeable(array: Array, empty: Empty) -> Array:
    return array if array.flags.writeable else empty(len(array), array.dtype)


def cover(present: Set[int], absent: Set[int], size: int) -> list[tuple[int, int]]:
    """Return the largest nodes of the tree that hold `present` ranks and no others.

    Parameters
    ----------
    present : set of int
        Ranks whose contributions are in one place.
    absent : set of int
        Ranks that sit out; they are nowhere and in nobody's way.
    size : int
        Number of ranks P.

    Returns
    -------
    list of (int, int)
        Disjoint [lo, hi), in order; each has a rank of `present`, and together they
        have all of them.

    Examples
    --------
    >>> cover({0, 1, 2, 5}, {3}, 6)
    [(0, 4), (5, 6)]
    """
    found: list[tuple[int, int]] = []

    def visit(lo: int, hi: int) -> bool:
        """Return whether [lo, hi) is complete; note the complete parts if not."""
        if hi - lo == 1:
            return lo in present or lo in absent
        border = split(lo, hi)
        parts = [part for part in ((lo, border), (border, hi)) if not visit(*part)]
        if not parts:
            return True
        if len(parts) == 1:
            whole = (lo, border) if parts[0] != (lo, border) else (border, hi)
            found.append(whole)
        return False

    if visit(0, size):
        found.append((0, size))
    return sorted(n for n in found if not present.isdisjoint(range(*n)))


def fold(
    nodes: Mapping[tuple[int, int], Node],
    lo: int,
    hi: int,
    empty: Empty = np.empty,
    *,
    combine: np.ufunc = np.add,
) -> Node | None:
    """Return the sum over the ranks [lo, hi), a node of the tree, in its order.

    `nodes` are parts of the tree by their first rank and the one after their last:
    single ranks, or sums. Ranks in none of them sit out.
    """
    if (lo, hi) in nodes or hi - lo == 1:
        return nodes.get((lo, hi))
    border = split(lo, hi)
    left = fold(nodes, lo, border, empty, combine=combine)
    right = fold(nodes, border, hi, empty, combine=combine)
    return merge(left, right, empty, combine) if left and right else left or right


class Reduction:
    """One reduction over P ranks, which come in any order.

    Of sums, nodes of the tree that are complete are added up at once: at most
    ceil(P / 2) + 1 arrays of a key are held. A function gets all of them at the end.

    Parameters
    ----------
    size : int
        Number of ranks P.
    reduce : "mean", "sum", "max", "min" or callable
        For "mean" the arrays are already multiplied by their weights. A callable gets
        the arrays stacked, shape (P', n), and the weights, shape (P',), float64, of the
        ranks that delivered the key, in rank order.
    empty : callable, optional
        Makes the arrays of sums.
    """

    def __init__(
        self, size: int, reduce: str | Reducer, empty: Empty = np.empty
    ) -> None:
        self.size, self.reduce, self._empty = size, reduce, empty
        self.present: set[int] = set()
        self.absent: set[int] = set()
        self.nodes: dict[tuple[int, int], Node] = {}

    def add(self, node: Node, lo: int, hi: int = 0) -> bool:
        """Take the node of the ranks [lo, hi), or of one; return whether all are in.

        Arrays that may be written to are the reduction's own from then on.
        """
        hi = hi or lo + 1
        self.nodes[lo, hi] = node
        self.present.update(range(lo, hi))
        self.absent -= self.present
        if isinstance(self.reduce, str):
            known = self.present | self.absent
            for first, last, _, _ in path(lo, self.size):
                if not known.issuperset(range(first, last)):
                    break
                if last - first > hi - lo:
                    self._merge(first, last)
        return self.complete

    def leave_out(self, rank: int) -> bool:
        """Wait for a rank no longer; return whether all others are in."""
        if rank not in self.present:
            self.absent.add(rank)
        return self.complete

    @property
    def complete(self) -> bool:
        """Whether no rank is waited for, and at least one has come."""
        known = len(self.present) + len(self.absent)
        return bool(self.present) and known >= self.size

    def take_weighed(self) -> Iterator[tuple[Any, Array, float]]:
        """Give each key with its reduced array, and the weight of those that had it."""
        weights = {} if callable(self.reduce) else self._merge(0, self.size)[1]
        for key, array in self.take().items():
            yield key, array, weights.get(key, 1.0)

    def take(self) -> dict[Any, Array]:
        """Return the reduced array of every key that any rank delivered."""
        if callable(self.reduce):
            return _reduce_by({lo: n for (lo, _), n in self.nodes.items()}, self.reduce)
        total = self._merge(0, self.size)
        with np.errstate(all="ignore"):
            return mean(total, self._empty) if self.reduce == "mean" else total[0]

    def _merge(self, lo: int, hi: int) -> Node:
        """Add up what has come of the ranks [lo, hi), and keep the sum alone."""
        combine = OPERATIONS[str(self.reduce)]
        with np.errstate(all="ignore"):
            node = fold(self.nodes, lo, hi, self._empty, combine=combine) or ({}, {})
        for span in [span for span in self.nodes if lo <= span[0] < hi]:
            del self.nodes[span]
        self.nodes[lo, hi] = node
        return node


def reduce_all(
    nodes: Mapping[int, Node], size: int, reduce: str | Reducer
) -> dict[Any, Array]:
    """Reduce the contributions of one round by rank, given all at once, and consumed."""
    found = Reduction(size, reduce)
    for rank, node in nodes.items():
        found.add(node, rank)
    return found.take()


def _reduce_by(nodes: Mapping[int, Node], reduce: Reducer) -> dict[Any, Array]:
    keys = sorted({key for arrays, _ in nodes.values() for key in arrays})
    found = {}
    for key in keys:
        ranks = [r for r in sorted(nodes) if key in nodes[r][0]]
        brought = stacked([nodes[r][0][key] for r in ranks])
        weights = np.array([nodes[r][1][key] for r in ranks], dtype=np.float64)
        with user_code("the reduce function"):
            result = reduce(brought, weights)
        found[key] = returned(result, brought[0], "the reduce function")
    return found
