"""Stochastic gradient descent: plain, with momentum, with Nesterov's momentum."""
# ruff: noqa: PLR0917  (an update takes its slots and scalars one by one)

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from daskps.optim.base import LearningRate, Rule, learning_rate
from daskps.optim.checks import check_numbers, store

if TYPE_CHECKING:
    from collections.abc import Callable


def _plain(w: Any, g: Any, lr: Any) -> Any:
    return w - lr * g


def _decayed(w: Any, g: Any, lr: Any, decay: Any) -> Any:
    return w - lr * (g + decay * w)


def _momentum(w: Any, g: Any, b: Any, lr: Any, momentum: Any, decay: Any) -> Any:
    b = momentum * b + (g + decay * w)
    return w - lr * b, b


def _nesterov(w: Any, g: Any, b: Any, lr: Any, momentum: Any, decay: Any) -> Any:
    g = g + decay * w
    b = momentum * b + g
    return w - lr * (g + momentum * b), b


@dataclass(frozen=True, repr=False)
class SGD(Rule):
    """Stochastic gradient descent.

    Parameters
    ----------
    lr : float or callable
        The learning rate, in [0, inf), or a schedule.
    momentum : float
        In [0, 1). Above 0 the rule has the slot "momentum".
    nesterov : bool
        Look one step ahead; needs a momentum.
    weight_decay : float
        In [0, inf): times the weight, added to the gradient.

    Raises
    ------
    ValueError
        If an argument is out of range, or `nesterov` is without momentum.
    TypeError
        If an argument has the wrong type.

    Notes
    -----
    The velocity is that of `torch.optim.SGD`: the learning rate multiplies it when
    it is applied, not when it is collected.

    References
    ----------
    Polyak: Some methods of speeding up the convergence of iteration methods, 1964.
    Sutskever, Martens, Dahl, Hinton: On the importance of initialization and
    momentum in deep learning, 2013, section 2.

    Examples
    --------
    >>> SGD(0.1, momentum=0.9)
    SGD(lr=0.1, momentum=0.9)
    """

    lr: LearningRate
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        store(self, lr=learning_rate(self.lr))
        check_numbers(self, "[0, 1)", "momentum")
        check_numbers(self, "[0, inf)", "weight_decay")
        if not isinstance(self.nesterov, bool):
            raise TypeError(f"nesterov must be True or False, not {self.nesterov!r}")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov=True needs a momentum in (0, 1), got 0")

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state arrays."""
        return ("momentum",) if self.momentum else ()

    def prepare(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the scalars of update number `step`."""
        if self.momentum:
            return lr, self.momentum, self.weight_decay
        return (lr, self.weight_decay) if self.weight_decay else (lr,)

    @property
    def update(self) -> Callable[..., Any]:
        """The function for one weight."""
        if self.momentum:
            return _nesterov if self.nesterov else _momentum
        return _decayed if self.weight_decay else _plain
