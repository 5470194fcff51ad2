"""FTRL-Proximal: weights that are exactly 0 where the gradients do not insist."""
# ruff: noqa: PLR0913, PLR0917  (an update takes its slots and scalars one by one)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from daskps.optim.base import LearningRate, Rule, learning_rate
from daskps.optim.checks import check_numbers, in_range, store


@dataclass(frozen=True, repr=False)
class Ftrl(Rule):
    """Follow the regularised leader: with `l1` most weights stay exactly 0.

    Parameters
    ----------
    lr : float or callable
        The learning rate, in (0, inf), or a schedule that never gives 0 (alpha in the
        paper).
    l1 : float
        In [0, inf): a weight is 0 until its sum of gradients is larger.
    l2 : float
        In [0, inf): draws weights to 0.
    beta : float
        In [0, inf): lessens the first steps; the step is `lr / (beta + sqrt(n))` where
        `n` is the sum of squared gradients.

    Raises
    ------
    ValueError
        If an argument is out of range, or a schedule gives 0.
    TypeError
        If an argument has the wrong type.

    Notes
    -----
    A weight is a function of its slots "z" and "n", which begin at 0: whatever it was
    before is given up at its first update. Let weights begin at 0.

    References
    ----------
    McMahan and others: Ad Click Prediction: a View from the Trenches, 2013,
    algorithm 1.

    Examples
    --------
    >>> Ftrl(0.1, l1=1.0)
    Ftrl(lr=0.1, l1=1.0)
    """

    lr: LearningRate = 0.1
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 1.0

    def __post_init__(self) -> None:
        store(self, lr=learning_rate(self.lr))
        if not callable(self.lr):
            check_numbers(self, "(0, inf)", "lr")
        check_numbers(self, "[0, inf)", "l1", "l2", "beta")

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state arrays."""
        return ("z", "n")

    def prepare(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the scalars of update number `step`."""
        rate = 1.0 / in_range("the learning rate of Ftrl", lr, "(0, inf)")
        return rate, self.l1, self.l2, self.beta

    @staticmethod
    def update(
        w: Any, g: Any, z: Any, n: Any, rate: Any, l1: Any, l2: Any, beta: Any
    ) -> Any:
        """Return the new weight and both sums."""
        before, n = np.sqrt(n), n + g * g
        after = np.sqrt(n)
        # The difference of the roots, without what their subtraction loses.
        sigma = g * g / np.maximum(before + after, 1e-30) * rate
        z = z + (g - sigma * w)
        # The part of z above l1, 0 up to there; the divisor is never 0.
        left = z - np.minimum(np.maximum(z, -l1), l1)
        return 0.0 - left / np.maximum((beta + after) * rate + l2, 1e-30), z, n
