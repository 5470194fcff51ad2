"""The base class of update rules.

A rule is written once, as two pure functions: `prepare` turns the hyper-parameters
and the step count into a few scalars, once per update and in float64; `update` maps
one weight, its gradient, its slots and those scalars to the new weight and slots.
`daskps.kernels` compiles `update` to the loops over arrays.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from daskps.errors import PushRejectedError
from daskps.optim.checks import in_range
from daskps.optim.schedules import by_epoch
from daskps.usercode import user_code

#: A number, or a schedule: updates already applied -> learning rate.
LearningRate: TypeAlias = float | Callable[[int], float]
_RATE, _PREPARE = user_code("the schedule"), user_code("prepare of the optimizer")


class Rule(ABC):
    """How a gradient changes a weight; subclass it for a rule of your own.

    A subclass has `slots` (if it keeps state), `prepare` and `update`, and stores
    each argument of its `__init__` under the argument's name: equality, hash and
    repr are made from these attributes, which must not change afterwards.

    Parameters
    ----------
    lr : float or callable
        The learning rate, in [0, inf), or a schedule that gives it from the number
        of updates already applied to the parameter.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If an argument is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> class SignSGD(Rule):
    ...     def prepare(self, step, lr):
    ...         return (lr,)
    ...
    ...     @staticmethod
    ...     def update(w, g, lr):
    ...         return w - lr * np.sign(g)
    >>> SignSGD(0.1)
    SignSGD(lr=0.1)
    """

    lr: LearningRate

    def __init__(self, lr: LearningRate) -> None:
        self.lr = learning_rate(lr)

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state arrays, one element per weight."""
        return ()

    @property
    def slot_init(self) -> Mapping[str, float]:
        """First values of slots that do not begin at 0."""
        return {}

    @property
    def row_slots(self) -> tuple[str, ...]:
        """Those of `slots` with one element per row of a table, not per weight.

        `update` returns the same for all weights of a row there. A rule with such slots
        has `row_mean`, and updates tables only.
        """
        return ()

    @property
    def row_mean(self) -> Callable[..., Any] | None:
        """The function `(w, g, *scalars) -> number` whose mean over a row `update` takes.

        Between the gradient and the slots, that is `update` is then
        `(w, g, mean, *slots, *scalars) -> (w, *slots)`. Written as `update` is; None for
        a rule that needs nothing of a row, which updates arrays as well.
        """
        return None

    @property
    def before(self) -> tuple[tuple[Callable[..., Any], int], ...]:
        """Functions that each element of a gradient goes through, the last one first.

        Each is `(g, *scalars) -> g`, written as `update` is, with the number of its
        scalars, which follow those of `update` in this order.
        """
        return ()

    @property
    def rank_slots(self) -> tuple[str, ...]:
        """The first ones of `slots`, where each trainer has one of them, by its rank.

        They begin with the weights, and `update` takes one in their place, that of the
        trainer whose gradient it is. A rule with such slots updates arrays, in runs under
        ASP and SSP of so many trainers at most.
        """
        return ()

    @abstractmethod
    def prepare(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the scalars of one update.

        Parameters
        ----------
        step : int
            Number of this update, counted from 1, per parameter.
        lr : float
            The learning rate of this update.

        Returns
        -------
        tuple of float
            The scalars that `update` takes after the slots; always as many.
        """

    @property
    @abstractmethod
    def update(self) -> Callable[..., Any]:
        """The function `(w, g, *slots, *scalars) -> (w, *slots)` for one weight.

        Usually a staticmethod; a property where the arguments choose among several.
        It may use arithmetic, `numpy` and `math` functions and numbers. Without
        slots it may return the bare weight.
        """

    def rate(self, step0: int, epoch: int | None = None) -> float:
        """Return the learning rate of the update after `step0` others.

        Parameters
        ----------
        step0 : int
            Updates already applied.
        epoch : int, optional
            The epoch under way, where there is one.

        Returns
        -------
        float
            Finite and not negative.

        Raises
        ------
        ValueError
            If the schedule gives anything else; TypeError if it gives no number.
        PushRejectedError
            If it goes by epochs, and there is none.

        Examples
        --------
        >>> daskps.optim.SGD(daskps.optim.schedules.step(1.0, every=10)).rate(10)
        0.1
        """
        if not callable(self.lr):
            return self.lr
        schedule, at = self.lr, step0
        if isinstance(schedule, by_epoch):
            if epoch is None:
                raise PushRejectedError(
                    f"the learning rate of {self!r} goes by epochs, which only "
                    f"daskps.train counts; nothing was applied, push with lr=, or give "
                    f"the optimizer a schedule of updates"
                )
            schedule, at = schedule.schedule, epoch
        try:
            with _RATE:
                lr = schedule(at)
        except Exception as error:
            error.add_note(f"raised by the learning rate of {self!r} at {at}")
            raise
        return in_range(f"the learning rate of {self!r} at {at}", lr)

    @property
    def goes_by_epoch(self) -> bool:
        """Whether the learning rate is a function of the epoch."""
        return isinstance(self.lr, by_epoch)

    def scalars(
        self,
        step: int,
        lr: float | None = None,
        epoch: int | None = None,
        factor: float = 1.0,
    ) -> tuple[float, ...]:
        """Return what `prepare` gives for the effective learning rate.

        Parameters
        ----------
        step : int
            Number of this update, counted from 1.
        lr : float, optional
            Overrides the rule's own learning rate this once.
        epoch : int, optional
            The epoch under way, where there is one.
        factor : float, default 1.0
            Times the learning rate, see :meth:`daskps.ParameterStore.scale_lr`.

        Returns
        -------
        tuple of float
            The scalars.

        Raises
        ------
        ValueError
            If the learning rate is negative or not finite.
        PushRejectedError
            As :meth:`rate`.

        Examples
        --------
        >>> daskps.optim.SGD(0.1, momentum=0.9).scalars(1)  # lr, momentum, weight decay
        (0.1, 0.9, 0.0)
        """
        effective = self.rate(step - 1, epoch) if lr is None else in_range("lr", lr)
        with _PREPARE:
            return tuple(map(float, self.prepare(step, effective * factor)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rule):
            return NotImplemented
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), tuple(sorted(vars(self).items(), key=_name))))

    def __repr__(self) -> str:
        shown = []
        for name, parameter in inspect.signature(type(self)).parameters.items():
            value = getattr(self, name, parameter.default)
            if name == "lr" or value != parameter.default:
                shown.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


def _name(item: tuple[str, Any]) -> str:
    return item[0]


def learning_rate(lr: Any) -> LearningRate:
    """Return `lr` checked: a schedule as it is, a number as a float.

    Parameters
    ----------
    lr : float or callable
        The caller's value.

    Returns
    -------
    float or callable
        The checked learning rate.

    Raises
    ------
    TypeError
        If it is neither a number nor callable, or a class.
    ValueError
        If it is negative or not finite.
    """
    if isinstance(lr, type):
        raise TypeError(f"lr must be a number or a schedule, not the class {lr!r}")
    return lr if callable(lr) else in_range("lr", lr)
