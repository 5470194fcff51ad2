"""How anything is cut into parts of nearly the same size: like ``np.array_split``."""

from __future__ import annotations


def bounds(n: int, k: int, i: int) -> tuple[int, int]:
    """Return start and stop of part `i` of `n` elements cut in `k`, as array_split."""
    size, longer = divmod(n, k)
    start = i * size + min(i, longer)
    return start, start + size + (i < longer)
