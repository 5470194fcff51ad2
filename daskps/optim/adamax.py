"""Adamax: Adam with the largest gradient in place of the root of their squares."""
# ruff: noqa: PLR0913, PLR0917  (an update takes its slots and scalars one by one)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from daskps.optim.base import LearningRate, Rule, learning_rate
from daskps.optim.checks import check_numbers, store


@dataclass(frozen=True, repr=False)
class Adamax(Rule):
    """Divide the averaged gradient by a decaying maximum of its size.

    Parameters
    ----------
    lr : float or callable
        The learning rate, in [0, inf), or a schedule.
    beta1 : float
        In [0, 1): what the average of gradients keeps at each update.
    beta2 : float
        In [0, 1): what the maximum keeps.
    eps : float
        In (0, inf): added to the size of each gradient.
    weight_decay : float
        In [0, inf): times the weight, added to the gradient.

    Raises
    ------
    ValueError
        If an argument is out of range.
    TypeError
        If an argument has the wrong type.

    References
    ----------
    Kingma, Ba: Adam: A Method for Stochastic Optimization, 2015, algorithm 2, with
    `eps` and `weight_decay` as in `torch.optim.Adamax`.

    Examples
    --------
    >>> Adamax(lr=0.01)
    Adamax(lr=0.01)
    """

    lr: LearningRate = 2e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        store(self, lr=learning_rate(self.lr))
        check_numbers(self, "[0, 1)", "beta1", "beta2")
        # Without it a weight whose gradients were all 0 becomes 0 / 0.
        check_numbers(self, "(0, inf)", "eps")
        check_numbers(self, "[0, inf)", "weight_decay")

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state arrays."""
        return ("exp_avg", "exp_inf")

    def prepare(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the scalars of update number `step`."""
        size = lr / (1.0 - self.beta1**step)
        return size, 1.0 - self.beta1, self.beta2, self.eps, self.weight_decay

    @staticmethod
    def update(
        w: Any,
        g: Any,
        m: Any,
        u: Any,
        size: Any,
        a1: Any,
        b2: Any,
        eps: Any,
        decay: Any,
    ) -> Any:
        """Return the new weight, the average and the maximum."""
        g = g + decay * w
        m = m + a1 * (g - m)
        u = np.maximum(b2 * u, np.abs(g) + eps)
        return w - size * m / u, m, u
