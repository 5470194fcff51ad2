"""Adagrad: a learning rate per weight that falls with its squared gradients."""
# ruff: noqa: PLR0917  (an update takes its slots and scalars one by one)

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.optim.base import LearningRate, Rule, learning_rate
from daskps.optim.checks import check_numbers, store

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, repr=False)
class Adagrad(Rule):
    """Divide the step by the root of the sum of all squared gradients.

    Parameters
    ----------
    lr : float or callable
        The learning rate, in [0, inf), or a schedule.
    lr_decay : float
        In [0, inf): update t uses `lr / (1 + (t - 1) * lr_decay)`.
    weight_decay : float
        In [0, inf): times the weight, added to the gradient.
    initial_accumulator_value : float
        In [0, inf): first value of the slot "sum".
    eps : float
        In [0, inf): added to the root.

    Raises
    ------
    ValueError
        If an argument is out of range.
    TypeError
        If an argument has the wrong type.

    References
    ----------
    Duchi, Hazan, Singer: Adaptive Subgradient Methods for Online Learning and
    Stochastic Optimization, 2011, figure 1 (diagonal). `eps` outside the root and
    `lr_decay` are those of `torch.optim.Adagrad`.

    Examples
    --------
    >>> Adagrad(lr=0.5)
    Adagrad(lr=0.5)
    """

    lr: LearningRate = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        store(self, lr=learning_rate(self.lr))
        start = "initial_accumulator_value"
        check_numbers(self, "[0, inf)", "lr_decay", "weight_decay", start, "eps")

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state arrays."""
        return ("sum",)

    @property
    def slot_init(self) -> Mapping[str, float]:
        """First values of slots that do not begin at 0."""
        return {"sum": self.initial_accumulator_value}

    def prepare(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the scalars of update number `step`."""
        return lr / (1.0 + (step - 1) * self.lr_decay), self.weight_decay, self.eps

    @staticmethod
    def update(w: Any, g: Any, s: Any, lr: Any, decay: Any, eps: Any) -> Any:
        """Return the new weight and sum of squares."""
        g = g + decay * w
        s = s + g * g
        return w - lr * g / (np.sqrt(s) + eps), s
