"""Adam, and AdamW with its decay of the weights themselves."""
# ruff: noqa: PLR0913, PLR0917  (an update takes its slots and scalars one by one)

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from daskps.optim.base import LearningRate, Rule, learning_rate
from daskps.optim.checks import check_numbers, store


@dataclass(frozen=True, repr=False)
class _Moments(Rule):
    """Arguments, slots and scalars that both rules share."""

    lr: LearningRate = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        store(self, lr=learning_rate(self.lr))
        check_numbers(self, "[0, 1)", "beta1", "beta2")
        check_numbers(self, "[0, inf)", "eps", "weight_decay")

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state arrays."""
        return ("exp_avg", "exp_avg_sq")

    def _moments(self, step: int, lr: float) -> tuple[float, ...]:
        """Return step size, root's factor, 1 - beta1, 1 - beta2 and eps.

        The bias corrections belong to the update, not to the weight: a power per
        weight costs more than all the rest.
        """
        size = lr / (1.0 - self.beta1**step)
        root = 1.0 / math.sqrt(1.0 - self.beta2**step)
        return size, root, 1.0 - self.beta1, 1.0 - self.beta2, self.eps


@dataclass(frozen=True, repr=False)
class Adam(_Moments):
    """Adam: moving averages of the gradient and its square, corrected for bias.

    Parameters
    ----------
    lr : float or callable
        The learning rate, in [0, inf), or a schedule.
    beta1 : float
        In [0, 1): what the average of gradients keeps at each update.
    beta2 : float
        In [0, 1): what the average of squared gradients keeps.
    eps : float
        In [0, inf): added to the corrected root.
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
    Kingma, Ba: Adam: A Method for Stochastic Optimization, 2015, algorithm 1.

    Examples
    --------
    >>> Adam(lr=0.01)
    Adam(lr=0.01)
    """

    def prepare(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the scalars of update number `step`."""
        return (*self._moments(step, lr), self.weight_decay)

    @staticmethod
    def update(
        w: Any,
        g: Any,
        m: Any,
        v: Any,
        size: Any,
        root: Any,
        a1: Any,
        a2: Any,
        eps: Any,
        decay: Any,
    ) -> Any:
        """Return the new weight and both averages."""
        g = g + decay * w
        m = m + a1 * (g - m)
        v = v + a2 * (g * g - v)
        return w - size * m / (np.sqrt(v) * root + eps), m, v


@dataclass(frozen=True, repr=False)
class AdamW(_Moments):
    """Adam whose weight decay does not go through the averages.

    Parameters
    ----------
    lr : float or callable
        The learning rate, in [0, inf), or a schedule.
    beta1 : float
        In [0, 1): what the average of gradients keeps at each update.
    beta2 : float
        In [0, 1): what the average of squared gradients keeps.
    eps : float
        In [0, inf): added to the corrected root.
    weight_decay : float
        In [0, inf): each update multiplies the weight by `1 - lr * weight_decay`.

    Raises
    ------
    ValueError
        If an argument is out of range.
    TypeError
        If an argument has the wrong type.

    References
    ----------
    Loshchilov, Hutter: Decoupled Weight Decay Regularization, 2019, algorithm 2,
    with the decay times the learning rate as in `torch.optim.AdamW`.

    Examples
    --------
    >>> AdamW(lr=0.01, weight_decay=0.1)
    AdamW(lr=0.01, weight_decay=0.1)
    """

    weight_decay: float = 1e-2

    def prepare(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the scalars of update number `step`."""
        return (*self._moments(step, lr), 1.0 - lr * self.weight_decay)

    @staticmethod
    def update(
        w: Any,
        g: Any,
        m: Any,
        v: Any,
        size: Any,
        root: Any,
        a1: Any,
        a2: Any,
        eps: Any,
        keep: Any,
    ) -> Any:
        """Return the new weight and both averages."""
        m = m + a1 * (g - m)
        v = v + a2 * (g * g - v)
        return keep * w - size * m / (np.sqrt(v) * root + eps), m, v
