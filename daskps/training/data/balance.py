"""Parts of equal size: rows are repeated, or left out, by a seed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

_Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.intp]]
#: Row numbers: a slice where they are regular, else an array.
Rows: TypeAlias = slice | _Numbers
BALANCES = ("replicate", "subsample", "average")
#: Keeps these draws apart from the order of rows of the same rank.
_DRAW = 1


def balanced(parts: Sequence[Rows], n: int, balance: str, seed: Any) -> list[Rows]:
    """Give all parts the same number of rows.

    Parameters
    ----------
    parts : sequence of slice or ndarray
        Row numbers of each part.
    n : int
        Number of rows that slices are of.
    balance : {"replicate", "subsample", "average"}
        As many as the largest part has, the smallest, or their mean, rounded to the
        nearest and halves up.
    seed : int
        Seed of the draws, which depend on it and on the rank alone.

    Returns
    -------
    list of slice or ndarray
        A part that is too small has all its rows, each as often as the others but for
        one: its own rows come first. Of one that is too large some are left, in their
        order.

    Raises
    ------
    ValueError
        If the balance is unknown, or a part is empty and another one is not.
    """
    if balance not in BALANCES:
        raise ValueError(f"{balance=} is unknown; choose one of {', '.join(BALANCES)}")
    numbers = [
        np.arange(*part.indices(n)) if isinstance(part, slice) else part
        for part in parts
    ]
    sizes = [len(of) for of in numbers]
    k, total = len(sizes), sum(sizes)
    if total and 0 in sizes:
        raise ValueError(
            f"part {sizes.index(0)} of {k} has no rows: {balance=} can repeat none, and "
            f"must not leave out all of the others; use fewer parts or other weights"
        )
    mean = (2 * total + k) // (2 * k)
    size = {"replicate": max(sizes), "subsample": min(sizes), "average": mean}[balance]
    keys = [np.random.SeedSequence(seed, spawn_key=(rank, _DRAW)) for rank in range(k)]
    # A slice stays one where nothing is drawn: NumPy then gives a view.
    return [
        part if len(of) == size else _drawn(of, size, np.random.default_rng(key))
        for part, of, key in zip(parts, numbers, keys, strict=True)
    ]


def _drawn(numbers: _Numbers, size: int, rng: np.random.Generator) -> _Numbers:
    """Return `size` rows of a part that has another number of them."""
    order = rng.permutation(len(numbers))
    if size < len(numbers):
        return numbers[np.sort(order[:size])]
    often, rest = divmod(size, len(numbers))
    return np.concatenate([*[numbers] * often, numbers[order[:rest]]])
