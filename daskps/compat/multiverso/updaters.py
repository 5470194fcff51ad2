"""Multiverso's updaters as rules: they change a table by a difference that is added."""
# ruff: noqa: PLR0917  (an update takes its slots and scalars one by one)

from __future__ import annotations

from typing import Any

import numpy as np

from daskps import optim
from daskps.optim.checks import in_range


class Momentum(optim.Rule):
    """Subtract a moving mean of what is added: ``s = m s + (1 - m) d; w = w - s``.

    Parameters
    ----------
    momentum : float
        The share that stays, in [0, 1). The name "momentum" stands for 0, which is what
        their bindings send.

    Examples
    --------
    >>> from daskps.compat import multiverso
    >>> def main():
    ...     multiverso.init()
    ...     table = multiverso.ArrayTableHandler(1)
    ...     table.add([1.0])
    ...     table.add([1.0])
    ...     return table.get().tolist()
    >>> multiverso.launch(main, 1, updater=multiverso.Momentum(0.5))
    [[-1.25]]
    """

    slots = ("smooth",)

    def __init__(self, momentum: float = 0.0) -> None:
        super().__init__(1.0)
        self.momentum = in_range("momentum", momentum, "[0, 1)")

    def prepare(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the scalars of one update."""
        return (self.momentum,)

    @staticmethod
    def update(w: Any, g: Any, smooth: Any, momentum: Any) -> tuple[Any, Any]:
        """Return weight and mean."""
        smooth = momentum * smooth + (1 - momentum) * g
        return w - smooth, smooth


class AdaGrad(optim.Rule):
    """Divide what is added by the root of its squares so far.

    With g = d / lr: ``G = G + g g; w = w - rho / sqrt(G + 1e-6) g`` (Duchi, Hazan,
    Singer: Adaptive subgradient methods, 2011). G is of the table, and not of each worker.

    Parameters
    ----------
    rho : float
        The step, above 0.
    lr : float
        The factor that the worker has multiplied its gradient with, above 0.

    Examples
    --------
    >>> from daskps.compat import multiverso
    >>> def main():
    ...     multiverso.init()
    ...     table = multiverso.ArrayTableHandler(1)
    ...     table.add([0.5])
    ...     return f"{table.get()[0]:.3f}"
    >>> multiverso.launch(main, 1, updater=multiverso.AdaGrad(0.1, 0.5))
    ['-0.100']
    """

    slots = ("squares",)

    def __init__(self, rho: float = 0.1, lr: float = 0.01) -> None:
        super().__init__(in_range("lr", lr, "(0, inf)"))
        self.rho = in_range("rho", rho, "(0, inf)")

    def prepare(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the scalars of one update."""
        return self.rho, lr

    @staticmethod
    def update(w: Any, g: Any, squares: Any, rho: Any, lr: Any) -> tuple[Any, Any]:
        """Return weight and squares."""
        gradient = g / lr
        squares = squares + gradient * gradient
        return w - rho / np.sqrt(squares + 1e-6) * gradient, squares


#: Theirs that are refused, as these need what no table has.
_BY_WORKER = ("dcasgd", "dcasgda")
#: None is plus and equal, past all optimizers.
UPDATERS: dict[str, optim.Rule | None] = {
    "default": None,
    "sgd": optim.SGD(1.0),
    "momentum": Momentum(),
    "adagrad": AdaGrad(),
}


def updater_of(given: Any) -> optim.Rule | None:
    """Return the rule that a name stands for, or a rule itself.

    Raises
    ------
    ValueError, TypeError
        For another name, and what is neither.
    """
    if isinstance(given, optim.Rule):
        return given
    choices = ", ".join(map(repr, UPDATERS))
    if not isinstance(given, str):
        raise TypeError(f"updater is one of {choices} or a rule, found {given!r:.60}")
    if given in _BY_WORKER:
        raise ValueError(
            f"updater={given!r} keeps a copy of the weights for each worker, and what is "
            f"added to a table does not say whose it is; daskps.optim.DCASGD does the "
            f"same for pushes of trainers in daskps.run. Here it is one of {choices} or a "
            f"rule"
        )
    if given not in UPDATERS:
        raise ValueError(f"updater is one of {choices} or a rule, found {given!r:.60}")
    return UPDATERS[given]
