"""Adagrad: a learning rate per weight that falls with its squared gradients."""
# ruff: noqa: PLR0917  (an update takes its slots and scalars one by one)

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.optim.base import LearningRate, Rule, learning_rate
from daskps.optim.checks import check_numbers, store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


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
    rowwise : bool
        Keep one sum per row of a table, of the mean over the row of the squared
        gradients, instead of one per weight. For tables only.

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
    `lr_decay` are those of `torch.optim.Adagrad`. `rowwise=True` is
    `EXACT_ROWWISE_ADAGRAD` of FBGEMM and TorchRec (`rowwise_adagrad` in
    fbgemm_gpu/codegen/genscript/optimizers.py): of the gradient g of a row, repeats added
    up, sum += mean(g * g), then w -= lr * g / (sqrt(sum) + eps); weight decay is that of
    its mode L2, as here without `rowwise`.

    Examples
    --------
    >>> Adagrad(lr=0.5)
    Adagrad(lr=0.5)
    >>> Adagrad(lr=0.5, rowwise=True)  # of a table
    Adagrad(lr=0.5, rowwise=True)
    """

    lr: LearningRate = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    rowwise: bool = False

    def __post_init__(self) -> None:
        store(self, lr=learning_rate(self.lr))
        start = "initial_accumulator_value"
        check_numbers(self, "[0, inf)", "lr_decay", "weight_decay", start, "eps")
        if not isinstance(self.rowwise, bool):
            raise TypeError(f"rowwise must be True or False, not {self.rowwise!r}")

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state arrays."""
        return ("sum",)

    @property
    def slot_init(self) -> Mapping[str, float]:
        """First values of slots that do not begin at 0."""
        return {"sum": self.initial_accumulator_value}

    @property
    def row_slots(self) -> tuple[str, ...]:
        """The slots with one element per row."""
        return self.slots if self.rowwise else ()

    @property
    def row_mean(self) -> Callable[..., Any] | None:
        """The function whose result is averaged over a row: the squared gradient."""
        return _square if self.rowwise else None

    def prepare(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the scalars of update number `step`."""
        return lr / (1.0 + (step - 1) * self.lr_decay), self.weight_decay, self.eps

    @property
    def update(self) -> Callable[..., Any]:
        """The function for one weight."""
        return _of_row if self.rowwise else _of_weight


def _of_weight(w: Any, g: Any, s: Any, lr: Any, decay: Any, eps: Any) -> Any:
    """Return the new weight and sum of squares."""
    g = g + decay * w
    s = s + g * g
    return w - lr * g / (np.sqrt(s) + eps), s


def _square(w: Any, g: Any, lr: Any, decay: Any, eps: Any) -> Any:
    """Return the squared gradient, whose mean over the row `_of_row` takes."""
    g = g + decay * w
    return g * g


def _of_row(w: Any, g: Any, mean: Any, s: Any, lr: Any, decay: Any, eps: Any) -> Any:
    """Return the new weight and the sum of the row."""
    s = s + mean
    return w - lr * (g + decay * w) / (np.sqrt(s) + eps), s
