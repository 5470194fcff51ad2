"""Gradients that are late, compensated for what was done meanwhile."""
# ruff: noqa: PLR0913, PLR0917  (an update takes weight, gradient, slots and scalars)

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.limits import MOST_TRAINERS
from daskps.optim.base import Rule, learning_rate
from daskps.optim.checks import check_numbers, store, whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.optim.base import LearningRate

#: Of the running mean of squares, and what is added to it: those of the paper.
_DECAY, _EPS = 0.95, 1e-7


@dataclass(frozen=True, repr=False, eq=False)
class DCASGD(Rule):
    """Asynchronous SGD with delay compensation.

    A trainer computes its gradient for the weights that it has pulled, which others have
    changed by the time it arrives: the term with `lam` estimates what it would be now, from
    the difference to the weights that this trainer's last push left.

    Parameters
    ----------
    lr : float or callable
        Learning rate, in [0, inf), or a schedule.
    lam : float
        How much of the delay is compensated, in [0, inf); 0 is SGD.
    adaptive : bool
        Divide `lam` by the root of a running mean of squared gradients, of all trainers
        together (DC-ASGD-a).
    ranks : int
        How many trainers a run may have, 1,024 at most: each has as much state as there
        are weights.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If an argument is out of range.

    Notes
    -----
    Of the gradient g of rank m, element by element::

        w ← w - lr (g + λ g² (w - b_m)),  b_m ← w

    where b is the weights after this rank's last push, at first the initial ones. With
    `adaptive`, v ← 0.95 v + 0.05 g² and λ becomes λ / √(v + 1e-7). Algorithm 1 and
    section 5 of [1]_, whose servers note b when a trainer pulls.

    For runs under ASP and SSP alone: rounds have no rank, and neither has a push from
    outside of runs; both are refused, as are more trainers, tables, and `sync_every`.

    References
    ----------
    .. [1] S. Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay
       Compensation", ICML 2017, arXiv:1609.08326.

    Examples
    --------
    >>> def loop(trainer, part):
    ...     trainer.push({"w": np.ones(3)})
    >>> store = daskps.create({"w": np.ones(3)}, optimizer=DCASGD(0.1, ranks=2))
    >>> _ = daskps.run(store, loop, [0, 0], sync="asp")
    >>> store["w"].pull()  # the second: 0.9 - 0.1 (1 + 0.04 (0.9 - 1))
    array([0.8004, 0.8004, 0.8004])
    """

    lr: LearningRate
    lam: float = 0.04
    adaptive: bool = False
    ranks: int = field(kw_only=True)

    def __post_init__(self) -> None:
        check_numbers(self, "[0, inf)", "lam")
        given: object = self.adaptive
        if not isinstance(given, bool):
            raise TypeError(f"adaptive must be True or False, not {given!r}")
        ranks = whole("ranks", self.ranks)
        if ranks > MOST_TRAINERS:
            raise ValueError(
                f"ranks must be at most {MOST_TRAINERS:,}, as many trainers as a shard "
                f"has room for; found {ranks:,}"
            )
        store(self, lr=learning_rate(self.lr), ranks=ranks)

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state arrays: one per rank, and the mean of squares."""
        more = ("mean_square",) if self.adaptive else ()
        return *self.rank_slots, *more

    @property
    def rank_slots(self) -> tuple[str, ...]:
        """The slots that each trainer has one of."""
        return tuple(f"backup.{rank}" for rank in range(self.ranks))

    def prepare(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the scalars of update number `step`."""
        more = (_DECAY, _EPS) if self.adaptive else ()
        return (lr, self.lam, *more)

    @property
    def update(self) -> Callable[..., Any]:
        """The function for one weight."""
        return _adaptive if self.adaptive else _plain


def _plain(w: Any, g: Any, backup: Any, lr: Any, lam: Any) -> Any:
    w = w - lr * (g + lam * g * g * (w - backup))
    return w, w


def _adaptive(
    w: Any,
    g: Any,
    backup: Any,
    mean_square: Any,
    lr: Any,
    lam: Any,
    decay: Any,
    eps: Any,
) -> Any:
    mean_square = decay * mean_square + (1.0 - decay) * g * g
    w = w - lr * (g + lam / np.sqrt(mean_square + eps) * g * g * (w - backup))
    return w, w, mean_square
