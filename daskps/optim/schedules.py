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

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from daskps.optim.checks import check_numbers, in_range, store, whole

__all__ = [
    "by_epoch",
    "constant",
    "cosine",
    "exponential",
    "inverse_time",
    "natural_exp",
    "piecewise",
    "polynomial",
    "step",
    "warm_restarts",
    "warmup",
]


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


@dataclass(frozen=True)
class natural_exp:
    """Multiply the learning rate by ``exp(-rate)`` every `every` updates.

    Parameters
    ----------
    lr : float
        The learning rate of the first update.
    rate : float
        In [0, inf).
    every : int
        Updates between two changes.

    Examples
    --------
    >>> rate = natural_exp(1.0, rate=0.5, every=10)
    >>> rate(9), round(rate(10), 4), round(rate(20), 4)
    (1.0, 0.6065, 0.3679)
    """

    lr: float
    rate: float
    every: int = 1

    def __post_init__(self) -> None:
        store(self, every=whole("every", self.every))
        check_numbers(self, "[0, inf)", "lr", "rate")

    def __call__(self, updates: int) -> float:
        """Return the learning rate after `updates` updates."""
        return self.lr * math.exp(-self.rate * (updates // self.every))


@dataclass(frozen=True)
class inverse_time:
    """Divide the learning rate by a power of ``1 + rate * updates``.

    Parameters
    ----------
    lr : float
        The learning rate of the first update.
    rate : float
        In [0, inf).
    power : float
        In (0, inf).

    References
    ----------
    Robbins, Monro: A Stochastic Approximation Method, 1951: with a power in (1/2, 1]
    such steps lead to the optimum of a convex function.

    Examples
    --------
    >>> rate = inverse_time(1.0, rate=1.0)
    >>> rate(0), rate(1), rate(3)
    (1.0, 0.5, 0.25)
    """

    lr: float
    rate: float
    power: float = 1.0

    def __post_init__(self) -> None:
        check_numbers(self, "[0, inf)", "lr", "rate")
        check_numbers(self, "(0, inf)", "power")

    def __call__(self, updates: int) -> float:
        """Return the learning rate after `updates` updates."""
        return float(self.lr / (1.0 + self.rate * updates) ** self.power)


@dataclass(frozen=True)
class piecewise:
    """Follow one learning rate or schedule after the other.

    Parameters
    ----------
    lrs : sequence of float or callable
        Learning rates, or schedules that each begin at 0 when their turn comes.
    boundaries : sequence of int
        Numbers of updates after which the next one holds, rising; one fewer.

    Examples
    --------
    >>> rate = piecewise([0.1, 0.01, step(0.001, every=5)], boundaries=[10, 20])
    >>> rate(9), rate(10), rate(20), rate(25)
    (0.1, 0.01, 0.001, 0.0001)
    """

    lrs: Sequence[float | Callable[[int], float]]
    boundaries: Sequence[int]

    def __post_init__(self) -> None:
        lrs, ends = _listed("lrs", self.lrs), _listed("boundaries", self.boundaries)
        ends = tuple(whole(f"boundaries[{i}]", end) for i, end in enumerate(ends))
        if len(lrs) != len(ends) + 1:
            raise ValueError(
                f"lrs must be one more than boundaries, got {len(lrs)} and {len(ends)}"
            )
        if any(a >= b for a, b in itertools.pairwise(ends)):
            raise ValueError(f"boundaries must rise, got {list(ends)}")
        checked = (
            lr if callable(lr) else in_range(f"lrs[{i}]", lr)
            for i, lr in enumerate(lrs)
        )
        store(self, lrs=tuple(checked), boundaries=ends)

    def __call__(self, updates: int) -> float:
        """Return the learning rate after `updates` updates."""
        n = sum(updates >= end for end in self.boundaries)
        lr, since = self.lrs[n], self.boundaries[n - 1] if n else 0
        return float(lr(updates - since) if callable(lr) else lr)


@dataclass(frozen=True)
class warm_restarts:
    """Fall from `lr` to `final` along half a cosine, again and again.

    Parameters
    ----------
    lr : float
        The learning rate that each fall begins with.
    steps : int
        Updates of the first fall.
    mult : int
        How many times as long each next one takes.
    final : float
        The rate that each fall leads to.

    References
    ----------
    Loshchilov, Hutter: SGDR: Stochastic Gradient Descent with Warm Restarts, 2017,
    equation 5; `steps` and `mult` are ``T_0`` and ``T_mult`` of
    `torch.optim.lr_scheduler.CosineAnnealingWarmRestarts`.

    Examples
    --------
    >>> rate = warm_restarts(1.0, steps=2, mult=2)
    >>> rate(0), round(rate(1), 3), rate(2), round(rate(4), 3), rate(6)
    (1.0, 0.5, 1.0, 0.5, 1.0)
    """

    lr: float
    steps: int
    mult: int = 1
    final: float = 0.0

    def __post_init__(self) -> None:
        store(self, steps=whole("steps", self.steps), mult=whole("mult", self.mult))
        check_numbers(self, "[0, inf)", "lr", "final")

    def __call__(self, updates: int) -> float:
        """Return the learning rate after `updates` updates."""
        length = self.steps
        if self.mult == 1:
            updates %= length
        while updates >= length:
            updates, length = updates - length, length * self.mult
        wave = 1.0 + math.cos(math.pi * updates / length)
        return self.final + (self.lr - self.final) * wave / 2.0


@dataclass(frozen=True)
class by_epoch:
    """Follow a schedule by the epochs of `train` instead of by updates.

    It is the learning rate of a rule, and no part of another schedule. The epoch is
    the store's: that under way, from 0, which goes on from one call of
    :func:`daskps.train` to the next.

    Parameters
    ----------
    schedule : callable
        Epochs that have ended -> learning rate.

    Raises
    ------
    TypeError
        If `schedule` is no schedule.

    Notes
    -----
    Only `train` counts epochs: pushes outside of runs, and those of :func:`daskps.run`,
    are refused, unless they have a learning rate of their own. Under SSP and ASP all
    trainers follow the epoch of the one that is furthest behind.

    Examples
    --------
    >>> daskps.optim.SGD(by_epoch(step(1.0, every=30))).rate(1000, epoch=30)
    0.1
    """

    schedule: Callable[[int], float]

    def __post_init__(self) -> None:
        given: Any = self.schedule
        if not callable(given) or isinstance(given, (type, by_epoch)):
            raise TypeError(
                f"by_epoch takes a schedule such as step(0.1, 30), not {given!r}"
            )

    def __call__(self, updates: int) -> float:
        """Refuse to be asked by updates.

        Raises
        ------
        TypeError
            Always.
        """
        raise TypeError(
            f"{self!r} goes by epochs, not by updates: it is the learning rate of a "
            f"rule, as in SGD(by_epoch(schedule)), and no part of another schedule"
        )


def _listed(name: str, values: Any) -> tuple[Any, ...]:
    """Return what was given as a tuple; TypeError for what is none."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise TypeError(
            f"{name} must be a list, not {type(values).__name__}: {values!r}"
        )
    return tuple(values)
