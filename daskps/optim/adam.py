"""Adam, and AdamW with its decay of the weights themselves."""
# ruff: noqa: PLR0913, PLR0917  (an update takes its slots and scalars one by one)

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.optim.base import LearningRate, Rule, learning_rate
from daskps.optim.checks import check_numbers, store

if TYPE_CHECKING:
    from collections.abc import Callable


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


def _adam(
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


def _adam_root(
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
    under: Any,
) -> Any:
    """Return the new weight and both averages, with a number added under the root."""
    g = g + decay * w
    m = m + a1 * (g - m)
    v = v + a2 * (g * g - v)
    return w - size * m / (np.sqrt(v * root * root + under) + eps), m, v


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
    bias_correction : bool
        Divide both averages by what they lack in their first updates. Without it the
        first steps are longer, with the usual betas about three times `lr`.
    eps_root : float
        In [0, inf): added under the root, to the corrected average of squares.

    Raises
    ------
    ValueError
        If an argument is out of range.
    TypeError
        If an argument has the wrong type.

    References
    ----------
    Kingma, Ba: Adam: A Method for Stochastic Optimization, 2015, algorithm 1; without
    `bias_correction` its steps without the two lines that correct. `eps_root` is that
    of `optax.adam`.

    Examples
    --------
    >>> Adam(lr=0.01)
    Adam(lr=0.01)
    """

    bias_correction: bool = True
    eps_root: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "[0, inf)", "eps_root")
        if not isinstance(self.bias_correction, bool):
            raise TypeError(
                f"bias_correction must be True or False, not {self.bias_correction!r}"
            )

    def prepare(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the scalars of update number `step`."""
        size, root, *others = self._moments(step, lr)
        if not self.bias_correction:
            size, root = lr, 1.0
        scalars = size, root, *others, self.weight_decay
        return (*scalars, self.eps_root) if self.eps_root else scalars

    @property
    def update(self) -> Callable[..., Any]:
        """The function for one weight."""
        return _adam_root if self.eps_root else _adam


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
