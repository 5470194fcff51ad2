"""First values of the slots of update rules, which say how wide a slot is.

The first slot of a parameter with a *master* is its weights once more, in the wider dtype
that its updates are computed in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from daskps.layout.arrays import compute_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

#: The dtype of masters, by that of the weights that may have one.
MASTERS: Final[Mapping[str, str]] = {"float16": "float32", "float32": "float64"}
#: The mark of a master where :func:`marked` gives the numbers of slots.
_MASTER: Final = -1


class PerRow(float):
    """The first value of a slot of one number per row of a table.

    A plain number is that of a slot of one number per element.
    """

    __slots__ = ()


class Master(float):
    """The mark of a master in place of a first value: it begins with the weights."""

    __slots__ = ()


class OfWeights(float):
    """The mark of a slot that begins with the weights, in place of a first value."""

    __slots__ = ()


def width(first: float, dim: int) -> int:
    """Return how many numbers a slot has for a row of `dim` elements."""
    return 1 if isinstance(first, PerRow) else dim


def has_master(values: Sequence[float]) -> bool:
    """Return whether the first slot is a master."""
    return bool(values) and isinstance(values[0], Master)


def of_weights(values: Sequence[float], *, anew: bool = False) -> list[int]:
    """Return which slots begin with the weights; masters do so no second time, `anew`."""
    kinds = (OfWeights,) if anew else (OfWeights, Master)
    return [j for j, first in enumerate(values) if isinstance(first, kinds)]


def slot_dtype(dtype: str, values: Sequence[float]) -> str:
    """Return the dtype of slots of a parameter or table, that have these first values."""
    computed = compute_dtype(dtype)
    return MASTERS.get(dtype, computed) if has_master(values) else computed


def marked(values: Iterable[float]) -> list[int]:
    """Return which of the slots with these first values are no plain ones.

    The numbers of those with one number per row, and -1 where the first is a master.
    """
    found = [_MASTER for v in values if isinstance(v, Master)]
    return found + [j for j, v in enumerate(values) if isinstance(v, PerRow)]


def with_marks(values: Iterable[float], marks: Iterable[int]) -> tuple[float, ...]:
    """Return first values of which :func:`marked` gives `marks`."""
    chosen = set(marks)
    found = [PerRow(v) if j in chosen else v for j, v in enumerate(values)]
    if found and _MASTER in chosen:
        found[0] = Master()
    return tuple(found)
