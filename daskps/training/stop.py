"""Conditions that end a run before its last epoch; ``&`` and ``|`` combine them.

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
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from daskps import config
from daskps.store.arguments import number, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    """Progress of a run: the epochs that have ended, and the rounds after the last."""

    history: Sequence[Epoch]
    #: Rounds of the store since its epoch 0.
    step: int
    #: Of all epochs in the history, and since.
    seconds: float


class Condition:
    """Something that may end a run; ``a & b`` ends it when both hold, ``a | b`` either.

    Called with a history of epochs it says whether it holds at the end of the last.
    A condition of one's own has a method ``holds``.

    Examples
    --------
    >>> class Even(daskps.stop.Condition):
    ...     def holds(self, at):
    ...         return len(at.history) % 2 == 0
    >>> (Even() | daskps.stop.epochs(3))([])
    False
    """

    #: Whether one of two is enough.
    is_either = False
    #: The round at which it holds, whatever else comes; None where nobody knows.
    limit: int | None = None
    #: Whether it may come to hold within an epoch, at a round that nobody knows.
    is_sudden = False
    #: The metrics of `validate` that it looks at.
    metrics: frozenset[str] = frozenset()

    def holds(self, at: Reached) -> bool:
        """Return whether a run that is so far is to end.

        Parameters
        ----------
        at : Reached
            Its ``history`` of epochs, the ``step`` it has come to, and the ``seconds``
            of all.

        Returns
        -------
        bool
            Whether it is to end.
        """
        raise NotImplementedError

    def __call__(self, history: Sequence[Epoch]) -> bool:
        """Return whether it holds at the end of a history."""
        if not history:
            return False
        spent = sum(epoch.seconds for epoch in history)
        return self.holds(Reached(history, history[-1].step, spent))

    def __and__(self, other: object) -> Condition:
        found: Condition = _joined(self, other, all)
        return found

    def __or__(self, other: object) -> Condition:
        found: Condition = _joined(self, other, any)
        return found


@dataclass(frozen=True, eq=False, repr=False)
class _Made(Condition):
    """A condition that a function of this module has made."""

    text: str
    test: Callable[[Reached], bool]
    limit: int | None = None
    is_sudden: bool = False
    metrics: frozenset[str] = frozenset()
    is_either: bool = False

    def holds(self, at: Reached) -> bool:
        return self.test(at)

    def __repr__(self) -> str:
        return self.text


def _joined(one: Condition, other: object, how: Callable[[Any], bool]) -> Any:
    """Return what holds where all of two do, or any."""
    if not isinstance(other, Condition):
        return NotImplemented
    sides, is_either = (one, other), how is any
    limits = [side.limit for side in sides if side.limit is not None]
    limit = min(limits, default=None)
    is_sudden = one.is_sudden or other.is_sudden
    texts = [repr(side) for side in sides]
    if not is_either:
        texts = [f"({side!r})" if side.is_either else repr(side) for side in sides]
        limit = max(limits) if len(limits) == 2 else None
        # One side may hold at a round, after the other did at the end of an epoch.
        is_sudden |= len(limits) == 1
    return _Made(
        (" | " if is_either else " & ").join(texts),
        lambda at: how(side.holds(at) for side in sides),
        limit,
        is_sudden,
        one.metrics | other.metrics,
        is_either,
    )


def _has_score(score: float, name: str, text: str, at: Reached) -> bool:
    if not at.history:
        return False
    metrics = at.history[-1].metrics
    if name not in metrics:
        raise ValueError(
            f"validate returned no metric {name!r}, which stop={text} looks "
            f"at; it returned {sorted(metrics)}"
        )
    return metrics[name] > score


def _is_stuck(patience: int, min_delta: float, at: Reached) -> bool:
    best, since = math.inf, 0
    for epoch in at.history:
        if epoch.loss is None:
            continue
        if epoch.loss < best - min_delta:
            best, since = epoch.loss, 0
        else:
            since += 1
    return since >= patience


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
    n = whole(n, "n", least=1)
    return _Made(f"steps({n})", lambda at: at.step >= n, limit=n)


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
    n = whole(n, "n", least=1)
    return _Made(
        f"epochs({n})", lambda at: bool(at.history) and at.history[-1].epoch + 1 >= n
    )


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
    bound = number(loss, "loss")

    def holds(at: Reached) -> bool:
        found = at.history[-1].loss if at.history else None
        return found is not None and found < bound

    return _Made(f"loss_below({bound:g})", holds)


def score_above(score: float, name: str) -> Condition:
    """End after an epoch of which `validate` says more than `score`.

    Parameters
    ----------
    score : float
        The bound.
    name : str
        Name of the metric that `validate` returns.

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
    bound = number(score, "score")
    text = f"score_above({bound:g}, {name!r})"
    holds = partial(_has_score, bound, name, text)
    return _Made(text, holds, metrics=frozenset([name]))


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
    text = f"seconds({found:g})"
    return _Made(text, lambda at: at.seconds >= found, is_sudden=True)


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
    n = whole(patience, "patience", least=1)
    return _Made(f"no_improvement({n}, {delta:g})", partial(_is_stuck, n, delta))
