"""First values of the slots of update rules, which say how wide a slot is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class PerRow(float):
    """The first value of a slot of one number per row of a table.

    A plain number is that of a slot of one number per element.
    """

    __slots__ = ()


def width(first: float, dim: int) -> int:
    """Return how many numbers a slot has for a row of `dim` elements."""
    return 1 if isinstance(first, PerRow) else dim


def per_row(values: Iterable[float]) -> list[int]:
    """Return which of the slots with these first values have one number per row."""
    return [j for j, first in enumerate(values) if isinstance(first, PerRow)]


def with_widths(values: Iterable[float], of_rows: Iterable[int]) -> tuple[float, ...]:
    """Return first values of which :func:`per_row` gives `of_rows`."""
    chosen = set(of_rows)
    return tuple(PerRow(v) if j in chosen else v for j, v in enumerate(values))
