"""Learning rates that change with the number of updates.

A schedule is any callable from the number of updates already applied to a
parameter (0 before the first) to a learning rate. These are small frozen values:
two with equal arguments are equal, and they pickle.

Examples
--------
>>> rate = daskps.optim.schedules.warmup(daskps.optim.schedules.cosine(0.1, 90), 10)
>>> daskps.optim.SGD(rate).rate(10)
0.1
"""
# ruff: noqa: N801  (they are called like functions: `schedules.cosine(0.1, 1000)`)

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from daskps.optim.checks import check_numbers, store, whole

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["constant", "cosine", "exponential", "polynomial", "step", "warmup"]


@dataclass(frozen=True)
class constant:
    """Give the same learning rate for ever.

    Parameters
    ----------
    lr : float
        The learning rate, in [0, inf).

    Examples
    --------
    >>> constant(0.1)(1000)
    0.1
    """

    lr: float

    def __post_init__(self) -> None:
        check_numbers(self, "[0, inf)", "lr")

    def __call__(self, updates: int) -> float:
        """Return the learning rate after `updates` updates."""
        return self.lr


@dataclass(frozen=True)
class step:
    """Multiply the learning rate by `factor` every `every` updates.

    Parameters
    ----------
    lr : float
        The learning rate of the first update.
    every : int
        Updates between two changes.
    factor : float
        In (0, inf).

    Examples
    --------
    >>> rate = step(1.0, every=10, factor=0.5)
    >>> rate(9), rate(10), rate(20)
    (1.0, 0.5, 0.25)
    """

    lr: float
    every: int
    factor: float = 0.1

    def __post_init__(self) -> None:
        store(self, every=whole("every", self.every))
        check_numbers(self, "[0, inf)", "lr")
        check_numbers(self, "(0, inf)", "factor")

    def __call__(self, updates: int) -> float:
        """Return the learning rate after `updates` updates."""
        return float(self.lr * self.factor ** (updates // self.every))


@dataclass(frozen=True)
class exponential:
    """Multiply the learning rate by `factor` after each update.

    Parameters
    ----------
    lr : float
        The learning rate of the first update.
    factor : float
        In (0, 1].

    Examples
    --------
    >>> rate = exponential(1.0, factor=0.5)
    >>> rate(0), rate(1), rate(2)
    (1.0, 0.5, 0.25)
    """

    lr: float
    factor: float

    def __post_init__(self) -> None:
        check_numbers(self, "[0, inf)", "lr")
        check_numbers(self, "(0, 1]", "factor")

    def __call__(self, updates: int) -> float:
        """Return the learning rate after `updates` updates."""
        return float(self.lr * self.factor**updates)


@dataclass(frozen=True)
class polynomial:
    """Fall from `lr` to `final` in `steps` updates, as a power of what is left.

    Parameters
    ----------
    lr : float
        The learning rate of the first update.
    steps : int
        Updates until `final` is reached; it stays there.
    power : float
        In (0, inf); 1 is a straight line.
    final : float
        The last learning rate.

    Examples
    --------
    >>> rate = polynomial(1.0, steps=4)
    >>> rate(0), rate(1), rate(4), rate(100)
    (1.0, 0.75, 0.0, 0.0)
    """

    lr: float
    steps: int
    power: float = 1.0
    final: float = 0.0

    def __post_init__(self) -> None:
        store(self, steps=whole("steps", self.steps))
        check_numbers(self, "[0, inf)", "lr", "final")
        check_numbers(self, "(0, inf)", "power")

    def __call__(self, updates: int) -> float:
        """Return the learning rate after `updates` updates."""
        left = 1.0 - min(updates, self.steps) / self.steps
        return float(self.final + (self.lr - self.final) * left**self.power)


@dataclass(frozen=True)
class cosine:
    """Fall from `lr` to `final` in `steps` updates along half a cosine.

    Parameters
    ----------
    lr : float
        The learning rate of the first update.
    steps : int
        Updates until `final` is reached; it stays there.
    final : float
        The last learning rate.

    References
    ----------
    Loshchilov, Hutter: SGDR: Stochastic Gradient Descent with Warm Restarts, 2017,
    equation 5, without restarts.

    Examples
    --------
    >>> rate = cosine(1.0, steps=2)
    >>> rate(0), round(rate(1), 3), rate(2)
    (1.0, 0.5, 0.0)
    """

    lr: float
    steps: int
    final: float = 0.0

    def __post_init__(self) -> None:
        store(self, steps=whole("steps", self.steps))
        check_numbers(self, "[0, inf)", "lr", "final")

    def __call__(self, updates: int) -> float:
        """Return the learning rate after `updates` updates."""
        wave = 1.0 + math.cos(math.pi * min(updates, self.steps) / self.steps)
        return self.final + (self.lr - self.final) * wave / 2.0


@dataclass(frozen=True)
class warmup:
    """Rise in a straight line from `start` for `steps` updates, then follow `after`.

    Parameters
    ----------
    after : float or callable
        A learning rate or a schedule. It begins, at 0, when the rise is over; its
        first value is what the rise ends at.
    steps : int
        Updates of the rise.
    start : float
        The learning rate of the first update.

    Examples
    --------
    >>> rate = warmup(1.0, steps=4)
    >>> rate(0), rate(1), rate(4)
    (0.0, 0.25, 1.0)
    """

    after: float | Callable[[int], float]
    steps: int
    start: float = 0.0

    def __post_init__(self) -> None:
        store(self, steps=whole("steps", self.steps))
        check_numbers(self, "[0, inf)", "start")
        if not callable(self.after):
            check_numbers(self, "[0, inf)", "after")

    def __call__(self, updates: int) -> float:
        """Return the learning rate after `updates` updates."""
        if updates >= self.steps:
            return self._after(updates - self.steps)
        share = updates / self.steps
        return self.start + (self._after(0) - self.start) * share

    def _after(self, updates: int) -> float:
        after = self.after
        return float(after(updates) if callable(after) else after)
