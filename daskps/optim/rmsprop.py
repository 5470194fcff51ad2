"""RMSprop: Adagrad with a moving average instead of a sum."""
# ruff: noqa: PLR0913, PLR0917  (an update takes its slots and scalars one by one)

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.optim.base import LearningRate, Rule, learning_rate
from daskps.optim.checks import check_numbers, store

if TYPE_CHECKING:
    from collections.abc import Callable


def _plain(w: Any, g: Any, v: Any, lr: Any, new: Any, eps: Any, decay: Any) -> Any:
    g = g + decay * w
    v = v + new * (g * g - v)
    return w - lr * g / (np.sqrt(v) + eps), v


def _momentum(
    w: Any, g: Any, v: Any, b: Any, lr: Any, new: Any, eps: Any, decay: Any, mu: Any
) -> Any:
    g = g + decay * w
    v = v + new * (g * g - v)
    b = mu * b + g / (np.sqrt(v) + eps)
    return w - lr * b, v, b


def _centered(
    w: Any, g: Any, v: Any, a: Any, lr: Any, new: Any, eps: Any, decay: Any
) -> Any:
    g = g + decay * w
    v = v + new * (g * g - v)
    a = a + new * (g - a)
    # Not in the paper: rounding makes the variance of equal gradients negative.
    return w - lr * g / (np.sqrt(np.maximum(v - a * a, 0.0)) + eps), v, a


def _centered_momentum(
    w: Any,
    g: Any,
    v: Any,
    a: Any,
    b: Any,
    lr: Any,
    new: Any,
    eps: Any,
    decay: Any,
    mu: Any,
) -> Any:
    g = g + decay * w
    v = v + new * (g * g - v)
    a = a + new * (g - a)
    b = mu * b + g / (np.sqrt(np.maximum(v - a * a, 0.0)) + eps)
    return w - lr * b, v, a, b


@dataclass(frozen=True, repr=False)
class RMSprop(Rule):
    """Divide the step by the root of a moving average of squared gradients.

    Parameters
    ----------
    lr : float or callable
        The learning rate, in [0, inf), or a schedule.
    alpha : float
        In [0, 1): what the average keeps at each update (rho elsewhere).
    eps : float
        In [0, inf): added to the root.
    weight_decay : float
        In [0, inf): times the weight, added to the gradient.
    momentum : float
        In [0, 1). Above 0 the rule has the slot "momentum".
    centered : bool
        Divide by the standard deviation instead; adds the slot "grad_avg".

    Raises
    ------
    ValueError
        If an argument is out of range.
    TypeError
        If an argument has the wrong type.

    References
    ----------
    Tieleman, Hinton: Lecture 6.5, Neural Networks for Machine Learning, 2012.
    Graves: Generating Sequences With Recurrent Neural Networks, 2013, equations 38
    to 41 (centered, with momentum). `eps` outside the root as `torch.optim.RMSprop`.

    Examples
    --------
    >>> RMSprop(lr=0.1, centered=True).slots
    ('square_avg', 'grad_avg')
    """

    lr: LearningRate = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False

    def __post_init__(self) -> None:
        store(self, lr=learning_rate(self.lr))
        check_numbers(self, "[0, 1)", "alpha", "momentum")
        check_numbers(self, "[0, inf)", "eps", "weight_decay")
        if not isinstance(self.centered, bool):
            raise TypeError(f"centered must be True or False, not {self.centered!r}")

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state arrays."""
        centered = ("grad_avg",) if self.centered else ()
        momentum = ("momentum",) if self.momentum else ()
        return ("square_avg", *centered, *momentum)

    def prepare(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the scalars of update number `step`."""
        scalars = (lr, 1.0 - self.alpha, self.eps, self.weight_decay)
        return (*scalars, self.momentum) if self.momentum else scalars

    @property
    def update(self) -> Callable[..., Any]:
        """The function for one weight."""
        if self.centered:
            return _centered_momentum if self.momentum else _centered
        return _momentum if self.momentum else _plain
