"""When a run ends before its last epoch: conditions, which ``&`` and ``|`` combine.

Examples
--------
>>> def gradient(params, X, y):
...     error = params["w"] - X.mean(axis=0)
...     return float(error @ error), {"w": 2 * error}
>>> store = daskps.create({"w": np.zeros(2)}, optimizer=daskps.optim.SGD(0.1))
>>> until = daskps.stop.steps(3) | daskps.stop.loss_below(1e-3)
>>> result = daskps.train(store, gradient, np.ones((8, 2)), epochs=99, stop=until)
>>> result.version, result.history[-1].step
(3, 3)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from daskps import config
from daskps.store.arguments import number, whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.training.result import Epoch

__all__ = [
    "Condition",
    "epochs",
    "loss_below",
    "no_improvement",
    "score_above",
    "seconds",
    "steps",
]


class Reached(NamedTuple):
    """How far a run is: the epochs that have ended, and what came after the last."""

    history: Sequence[Epoch]
    #: Rounds of the store since its epoch 0.
    step: int
    #: Of all epochs in the history, and since.
    seconds: float


class Condition:
    """Something that may end a run; ``a & b`` ends it when both hold, ``a | b`` either.

    What is called with a history of epochs says whether it holds at the end of the last.
    """

    def holds(self, at: Reached) -> bool:
        """Return whether the run is to end."""
        raise NotImplementedError

    @property
    def limit(self) -> int | None:
        """The round at which it holds, whatever else comes; None where nobody knows."""
        return None

    @property
    def is_sudden(self) -> bool:
        """Whether it may come to hold within an epoch, at a round that nobody knows."""
        return False

    @property
    def metrics(self) -> frozenset[str]:
        """What it wants of `validate`."""
        return frozenset()

    def __call__(self, history: Sequence[Epoch]) -> bool:
        """Return whether it holds at the end of a history."""
        if not history:
            return False
        spent = sum(epoch.seconds for epoch in history)
        return self.holds(Reached(history, history[-1].step, spent))

    def __and__(self, other: object) -> Condition:
        return _Both(self, other) if isinstance(other, Condition) else NotImplemented

    def __or__(self, other: object) -> Condition:
        return _Either(self, other) if isinstance(other, Condition) else NotImplemented


@dataclass(frozen=True, repr=False)
class _Pair(Condition):
    left: Condition
    right: Condition

    @property
    def metrics(self) -> frozenset[str]:
        return self.left.metrics | self.right.metrics

    @property
    def _limits(self) -> list[int]:
        """Of those that have one."""
        limits = self.left.limit, self.right.limit
        return [n for n in limits if n is not None]

    @property
    def _is_any_sudden(self) -> bool:
        return self.left.is_sudden or self.right.is_sudden


@dataclass(frozen=True, repr=False)
class _Both(_Pair):
    def holds(self, at: Reached) -> bool:
        return self.left.holds(at) and self.right.holds(at)

    @property
    def limit(self) -> int | None:
        return max(self._limits) if len(self._limits) == 2 else None

    @property
    def is_sudden(self) -> bool:
        # One side may hold at a round, after the other did at the end of an epoch.
        return self._is_any_sudden or len(self._limits) == 1

    def __repr__(self) -> str:
        sides = (self.left, self.right)
        return " & ".join(
            f"({of!r})" if isinstance(of, _Either) else repr(of) for of in sides
        )


@dataclass(frozen=True, repr=False)
class _Either(_Pair):
    def holds(self, at: Reached) -> bool:
        return self.left.holds(at) or self.right.holds(at)

    @property
    def limit(self) -> int | None:
        return min(self._limits, default=None)

    @property
    def is_sudden(self) -> bool:
        return self._is_any_sudden

    def __repr__(self) -> str:
        return f"{self.left!r} | {self.right!r}"


@dataclass(frozen=True, repr=False)
class _Steps(Condition):
    n: int

    def holds(self, at: Reached) -> bool:
        return at.step >= self.n

    @property
    def limit(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"steps({self.n})"


@dataclass(frozen=True, repr=False)
class _Epochs(Condition):
    n: int

    def holds(self, at: Reached) -> bool:
        return bool(at.history) and at.history[-1].epoch + 1 >= self.n

    def __repr__(self) -> str:
        return f"epochs({self.n})"


@dataclass(frozen=True, repr=False)
class _LossBelow(Condition):
    loss: float

    def holds(self, at: Reached) -> bool:
        found = at.history[-1].loss if at.history else None
        return found is not None and found < self.loss

    def __repr__(self) -> str:
        return f"loss_below({self.loss:g})"


@dataclass(frozen=True, repr=False)
class _ScoreAbove(Condition):
    score: float
    name: str

    def holds(self, at: Reached) -> bool:
        if not at.history:
            return False
        metrics = at.history[-1].metrics
        if self.name not in metrics:
            raise ValueError(
                f"validate returned no metric {self.name!r}, which stop={self!r} looks "
                f"at; it returned {sorted(metrics)}"
            )
        return metrics[self.name] > self.score

    @property
    def metrics(self) -> frozenset[str]:
        return frozenset([self.name])

    def __repr__(self) -> str:
        return f"score_above({self.score:g}, {self.name!r})"


@dataclass(frozen=True, repr=False)
class _Seconds(Condition):
    seconds: float

    def holds(self, at: Reached) -> bool:
        return at.seconds >= self.seconds

    @property
    def is_sudden(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"seconds({self.seconds:g})"


@dataclass(frozen=True, repr=False)
class _NoImprovement(Condition):
    patience: int
    min_delta: float

    def holds(self, at: Reached) -> bool:
        best, since = math.inf, 0
        for epoch in at.history:
            if epoch.loss is None:
                continue
            if epoch.loss < best - self.min_delta:
                best, since = epoch.loss, 0
            else:
                since += 1
        return since >= self.patience

    def __repr__(self) -> str:
        return f"no_improvement({self.patience}, {self.min_delta:g})"


def steps(n: int) -> Condition:
    """End after exactly `n` rounds, also in the middle of an epoch.

    Parameters
    ----------
    n : int
        Rounds of the store since its epoch 0, at least 1: a call that goes on where
        another one has ended counts on. Under SSP and ASP no trainer makes more steps.

    Returns
    -------
    Condition
        For ``train(stop=...)``.

    Examples
    --------
    >>> daskps.stop.steps(100) | daskps.stop.loss_below(0.1)
    steps(100) | loss_below(0.1)
    """
    return _Steps(whole(n, "n", least=1))


def epochs(n: int) -> Condition:
    """End when the store has had `n` epochs.

    Parameters
    ----------
    n : int
        Epochs of the store, at least 1, those before the call included.

    Returns
    -------
    Condition
        For ``train(stop=...)``.

    Examples
    --------
    >>> daskps.stop.epochs(5) & daskps.stop.loss_below(0.5)
    epochs(5) & loss_below(0.5)
    """
    return _Epochs(whole(n, "n", least=1))


def loss_below(loss: float) -> Condition:
    """End after an epoch whose mean loss is below `loss`.

    Parameters
    ----------
    loss : float
        The bound, in units of the loss that the gradient function returns.

    Returns
    -------
    Condition
        For ``train(stop=...)``; it never holds where no loss is returned.

    Examples
    --------
    >>> daskps.stop.loss_below(0.01)
    loss_below(0.01)
    """
    return _LossBelow(number(loss, "loss"))


def score_above(score: float, name: str) -> Condition:
    """End after an epoch of which `validate` says more than `score`.

    Parameters
    ----------
    score : float
        The bound.
    name : str
        Which of the metrics that `validate` returns.

    Returns
    -------
    Condition
        For ``train(validate=..., stop=...)``.

    Examples
    --------
    >>> daskps.stop.score_above(0.95, "accuracy")
    score_above(0.95, 'accuracy')
    """
    if not isinstance(name, str):
        raise TypeError(f"name is that of a metric of validate, found {name!r:.60}")
    return _ScoreAbove(number(score, "score"), name)


def seconds(duration: float | str) -> Condition:
    """End after some time of training, at the next round that is heard of.

    Parameters
    ----------
    duration : float or str
        Seconds, or a duration such as "10m", above 0: those of all epochs in the
        history, of calls that this one goes on from too. Clocks are heard of ten times a
        second.

    Returns
    -------
    Condition
        For ``train(stop=...)``.

    Examples
    --------
    >>> daskps.stop.seconds("1h")
    seconds(3600)
    """
    found = config.deadline(duration, "duration")
    if found is None or found <= 0:
        raise ValueError(f"duration is above 0 seconds, found {duration!r}")
    return _Seconds(found)


def no_improvement(patience: int, min_delta: float = 0.0) -> Condition:
    """End after some epochs whose loss was not below the best before.

    Parameters
    ----------
    patience : int
        How many epochs one after the other, at least 1.
    min_delta : float
        By how much a loss must be below the best one to count, at least 0.

    Returns
    -------
    Condition
        For ``train(stop=...)``.

    Examples
    --------
    >>> daskps.stop.no_improvement(3, min_delta=1e-4)
    no_improvement(3, 0.0001)
    """
    delta = number(min_delta, "min_delta", least=0)
    return _NoImprovement(whole(patience, "patience", least=1), delta)
