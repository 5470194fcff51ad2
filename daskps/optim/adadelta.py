"""Adadelta: steps as long as the steps before them, whatever the gradient's unit."""
# ruff: noqa: PLR0913, PLR0917  (an update takes its slots and scalars one by one)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from daskps.optim.base import LearningRate, Rule, learning_rate
from daskps.optim.checks import check_numbers, store


@dataclass(frozen=True, repr=False)
class Adadelta(Rule):
    """Scale the gradient by the ratio of two moving roots: of steps and of gradients.

    Parameters
    ----------
    lr : float or callable
        The learning rate, in [0, inf), or a schedule: times the step of the paper,
        which has none.
    rho : float
        In [0, 1): what both averages keep at each update.
    eps : float
        In (0, inf): added under both roots. The first steps are about as long as its
        root.
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
    Zeiler: ADADELTA: An Adaptive Learning Rate Method, 2012, algorithm 1. `lr` and
    `weight_decay` are those of `torch.optim.Adadelta`.

    Examples
    --------
    >>> Adadelta(rho=0.95)
    Adadelta(lr=1.0, rho=0.95)
    """

    lr: LearningRate = 1.0
    rho: float = 0.9
    eps: float = 1e-6
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        store(self, lr=learning_rate(self.lr))
        check_numbers(self, "[0, 1)", "rho")
        # Without it no step is ever taken: the first average of steps is 0.
        check_numbers(self, "(0, inf)", "eps")
        check_numbers(self, "[0, inf)", "weight_decay")

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state arrays."""
        return ("square_avg", "acc_delta")

    def prepare(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the scalars of update number `step`."""
        return lr, 1.0 - self.rho, self.eps, self.weight_decay

    @staticmethod
    def update(
        w: Any, g: Any, v: Any, d: Any, lr: Any, new: Any, eps: Any, decay: Any
    ) -> Any:
        """Return the new weight and both averages."""
        g = g + decay * w
        v = v + new * (g * g - v)
        delta = np.sqrt(d + eps) / np.sqrt(v + eps) * g
        d = d + new * (delta * delta - d)
        return w - lr * delta, v, d
