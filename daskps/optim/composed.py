"""Rules made of other rules: with clipped gradients, with other multiples of lr and decay."""
# ruff: noqa: N801  (they are called like functions: `chain(clip_by_value(-1, 1), rule)`)

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.optim.base import Rule
from daskps.optim.checks import check_numbers, store
from daskps.optim.function import Function

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def _clip(g: Any, lo: Any, hi: Any) -> Any:
    return np.minimum(np.maximum(g, lo), hi)


@dataclass(frozen=True)
class clip_by_value:
    """Bring each element of a gradient into an interval, as a part of :func:`chain`.

    Parameters
    ----------
    lo, hi : float
        The ends, finite; `lo` at most `hi`.

    Raises
    ------
    ValueError
        If `lo` is above `hi`, or one is not finite.
    TypeError
        If one is no number.

    See Also
    --------
    chain : Where it goes.

    Examples
    --------
    >>> chain(clip_by_value(-1, 1), daskps.optim.SGD(0.1))
    chain(clip_by_value(lo=-1.0, hi=1.0), SGD(lr=0.1))
    """

    lo: float
    hi: float

    def __post_init__(self) -> None:
        check_numbers(self, "(-inf, inf)", "lo", "hi")
        if self.lo > self.hi:
            raise ValueError(
                f"lo must be at most hi, got lo={self.lo!r} and hi={self.hi!r}"
            )


class Around(Rule):
    """A rule that leaves to another one all that it does not change."""

    _inner: Rule

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state arrays: those of the rule inside."""
        return self._inner.slots

    @property
    def slot_init(self) -> Mapping[str, float]:
        """First values of slots that do not begin at 0."""
        return self._inner.slot_init

    @property
    def row_slots(self) -> tuple[str, ...]:
        """The slots with one element per row."""
        return self._inner.row_slots

    @property
    def rank_slots(self) -> tuple[str, ...]:
        """The slots that each trainer has one of."""
        return self._inner.rank_slots

    @property
    def row_mean(self) -> Callable[..., Any] | None:
        """The function whose result is averaged over a row."""
        return self._inner.row_mean

    @property
    def before(self) -> tuple[tuple[Callable[..., Any], int], ...]:
        """The functions that a gradient goes through first."""
        return self._inner.before

    def prepare(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the scalars of update number `step`."""
        return tuple(self._inner.prepare(step, lr))

    @property
    def update(self) -> Callable[..., Any]:
        """The function for one weight."""
        return self._inner.update


class chain(Around):
    """Change a gradient, element by element, before a rule applies it.

    Parameters
    ----------
    *parts : clip_by_value or Rule
        The parts that the gradient goes through, in this order, and last the rule.

    Raises
    ------
    TypeError
        If the last one is no rule, or one before it is no :func:`clip_by_value`.

    Notes
    -----
    Clipped is what reaches the rule: in a round the reduced gradient, otherwise the
    pushed one times its weight. Weight decay is the rule's and comes after.

    Examples
    --------
    >>> store = daskps.create(
    ...     {"w": np.zeros(3)}, optimizer=chain(clip_by_value(-1, 1), daskps.optim.SGD(0.5))
    ... )
    >>> _ = store.push({"w": np.array([-9.0, 0.25, 2.0])})
    >>> store["w"].pull()
    array([ 0.5  , -0.125, -0.5  ])
    """

    parts: tuple[Any, ...]

    def __init__(self, *parts: clip_by_value | Rule) -> None:
        last = parts[-1] if parts else None
        if not isinstance(last, Rule):
            raise TypeError(
                f"chain ends with a rule, got {last!r}; write "
                f"chain(clip_by_value(-1, 1), SGD(0.1))"
            )
        others: tuple[object, ...] = parts[:-1]
        for part in others:
            if not isinstance(part, clip_by_value):
                hint = "; only the last may be a rule" if isinstance(part, Rule) else ""
                raise TypeError(
                    f"before the rule of chain stands clip_by_value(lo, hi), not "
                    f"{part!r}{hint}"
                )
        _check_elementwise(last, "chain")
        store(self, parts=parts, lr=last.lr, _inner=last)

    @property
    def before(self) -> tuple[tuple[Callable[..., Any], int], ...]:
        """The functions that a gradient goes through first, the last one first."""
        return (*self._inner.before, *[(_clip, 2)] * (len(self.parts) - 1))

    def prepare(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the scalars of the rule, then those of each part, the last one first."""
        ends = [end for part in self.parts[-2::-1] for end in (part.lo, part.hi)]
        return (*super().prepare(step, lr), *ends)

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.parts))})"


@dataclass(frozen=True, repr=False, eq=False)
class scaled(Around):
    """Multiply learning rate and weight decay of a rule, for some of the parameters.

    Parameters
    ----------
    rule : Rule
        The rule.
    lr_mult : float
        In [0, inf): times the learning rate, the schedule's too, and one that a push
        gives for once.
    decay_mult : float
        In [0, inf): times the rule's `weight_decay`.

    Raises
    ------
    TypeError
        If `rule` is no rule, or a multiple no number.
    ValueError
        If a multiple is out of range, or the rule has no `weight_decay` to multiply.

    Examples
    --------
    >>> rule = daskps.optim.SGD(0.1, weight_decay=1e-4)
    >>> optimizer = {"*/bias": scaled(rule, lr_mult=2.0, decay_mult=0.0), "*": rule}
    >>> optimizer["*/bias"].scalars(1)  # 0.2, and no decay
    (0.2,)
    """

    rule: Rule
    lr_mult: float = 1.0
    decay_mult: float = 1.0

    def __post_init__(self) -> None:
        given: object = self.rule
        if not isinstance(given, Rule):
            raise TypeError(f"scaled takes a rule such as SGD(0.1), not {given!r}")
        _check_elementwise(given, "scaled")
        check_numbers(self, "[0, inf)", "lr_mult", "decay_mult")
        inner = self.rule
        if self.decay_mult != 1.0:
            inner = _times_decay(inner, self.decay_mult)
        store(self, lr=self.rule.lr, _inner=inner)

    def prepare(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the scalars of update number `step`."""
        return super().prepare(step, lr * self.lr_mult)


def _check_elementwise(rule: Rule, what: str) -> None:
    if isinstance(rule, Function):
        raise TypeError(
            f"{what} takes rules of single elements, and {rule!r} is given whole "
            f"arrays; do it in the function"
        )


def _times_decay(rule: Rule, factor: float) -> Rule:
    """Return a rule with another weight decay, wherever in it that is."""
    if isinstance(rule, chain):
        return chain(*rule.parts[:-1], _times_decay(rule.parts[-1], factor))
    if isinstance(rule, scaled):
        return scaled(_times_decay(rule.rule, factor), rule.lr_mult, rule.decay_mult)
    arguments = {n: getattr(rule, n) for n in inspect.signature(type(rule)).parameters}
    if "weight_decay" not in arguments:
        raise ValueError(
            f"decay_mult={factor!r} has nothing to multiply: {rule!r} takes no "
            f"weight_decay"
        )
    arguments["weight_decay"] *= factor
    return type(rule)(**arguments)
