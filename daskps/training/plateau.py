"""Smaller learning rates where an epoch is no better than those before it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from daskps.store.arguments import number, whole
from daskps.training.functions import check_choice

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from daskps.optim import Rule
    from daskps.training.result import Epoch, RunStatus


@dataclass(eq=False, repr=False)
class ReduceOnPlateau:
    """Multiply all learning rates by `factor` after epochs that have not become better.

    As `torch.optim.lr_scheduler.ReduceLROnPlateau` does, with its arguments. In
    :func:`train` trainers wait at the end of an epoch until it was looked at, and all of
    them go on with the same rates (:meth:`daskps.ParameterStore.scale_lr`).

    Parameters
    ----------
    mode : {"min", "max"}
        Whether smaller is better, or larger.
    factor : float
        Above 0 and below 1.
    patience : int
        How many epochs in a row may be no better; the next one is one too many.
    threshold : float
        By how much one has to be better than the best.
    threshold_mode : {"rel", "abs"}
        Whether that is a share of the best, or a difference.
    cooldown : int
        How many epochs are not looked at after the rates were reduced.
    min_lr : float
        The lowest rate; above 0 only where all parameters have the same rate, which is
        no schedule.
    eps : float
        Rates that would change by no more are left as they are. Of several the largest
        counts, of schedules what they begin with.
    metric : str, optional
        Name of the metric of `validate` to look at; by default the loss.

    Raises
    ------
    ValueError
        For arguments out of range; TypeError for those of another type.

    Notes
    -----
    A run that resumes from a checkpoint goes on as if nothing had happened: the epochs of
    its history are looked at again, and the checkpoint has the rates. Otherwise an object
    goes on over several calls of :func:`train`.

    Examples
    --------
    >>> store = daskps.create({"w": np.zeros(1)}, optimizer=daskps.optim.SGD(1.0))
    >>> def gradient(params, X, y):
    ...     return 1.0, {"w": np.ones(1)}  # a loss that stays as it is
    >>> plateau = ReduceOnPlateau(factor=0.5, patience=1)
    >>> _ = daskps.train(store, gradient, np.zeros((2, 1)), epochs=5, callbacks=[plateau])
    >>> store["w"].pull()  # 1 three times, then 0.5
    array([-4.])
    """

    mode: str = "min"
    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    threshold_mode: str = "rel"
    cooldown: int = 0
    min_lr: float = 0.0
    eps: float = 1e-8
    metric: str | None = field(default=None, kw_only=True)
    #: The best so far, how many since were not better, and how many are not looked at.
    best: float = field(init=False)
    num_bad_epochs: int = field(init=False)
    cooldown_counter: int = field(init=False)

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, ("min", "max"))
        check_choice("threshold_mode", self.threshold_mode, ("rel", "abs"))
        given: object = self.metric
        if given is not None and not isinstance(given, str):
            raise TypeError(f"metric is the name of a metric, found {given!r:.60}")
        self.factor = number(self.factor, "factor")
        if not 0 < self.factor < 1:
            raise ValueError(f"factor is above 0 and below 1, found {self.factor!r}")
        self.patience = whole(self.patience, "patience", least=0)
        self.cooldown = whole(self.cooldown, "cooldown", least=0)
        self.threshold = number(self.threshold, "threshold", least=0)
        self.min_lr = number(self.min_lr, "min_lr", least=0)
        self.eps = number(self.eps, "eps", least=0)
        #: Learning rates, and by what each is multiplied so far.
        self._rates: list[tuple[float, float]] = []
        self._anew()

    def _anew(self) -> None:
        self.best = math.inf if self.mode == "min" else -math.inf
        self.num_bad_epochs = self.cooldown_counter = 0

    def __repr__(self) -> str:
        return f"ReduceOnPlateau(factor={self.factor:g}, patience={self.patience})"

    def begin(
        self, rated: Iterable[tuple[Rule, float]], history: Sequence[Epoch]
    ) -> None:
        """Hear of the rules of a store, what multiplies their rates, and earlier epochs.

        Parameters
        ----------
        rated : iterable of (Rule, float)
            Of all parameters and tables, and by what the rate of each is multiplied.
        history : sequence of Epoch
            Epochs of a run that is gone on with, which are looked at again.

        Raises
        ------
        ValueError
            For a `min_lr` where there is more than one rate.

        Examples
        --------
        >>> ReduceOnPlateau().begin([(daskps.optim.SGD(0.1), 1.0)], [])
        """
        # Thousands of parameters have few rules and factors.
        every = dict.fromkeys(rated)
        self._rates = sorted({(rule.rate(0, 0), factor) for rule, factor in every})
        schedules = any(callable(rule.lr) for rule, _ in every)
        if self.min_lr and (len(self._rates) != 1 or schedules):
            rates = [rate * factor for rate, factor in self._rates]
            raise ValueError(
                f"min_lr={self.min_lr:g} needs one learning rate that is no schedule, "
                f"found {'a schedule' if schedules else rates!r:.80}; leave it at 0"
            )
        if history:
            self._anew()
            for epoch in history:
                # Of some that a run has ended with nobody has heard.
                found = epoch.metrics.get(self.metric) if self.metric else epoch.loss
                if found is not None:
                    self._look(found)

    def on_epoch(self, run: RunStatus) -> None:
        """Do nothing: rates were reduced before others hear of the epoch."""

    def reduction(self, epoch: Epoch) -> float | None:
        """Return by what all learning rates are multiplied after an epoch, if they are.

        Parameters
        ----------
        epoch : Epoch
            The one that has ended.

        Returns
        -------
        float or None
            The factor for :meth:`daskps.ParameterStore.scale_lr`.

        Raises
        ------
        ValueError
            If the epoch has no loss, or no such metric.

        Examples
        --------
        >>> from types import SimpleNamespace
        >>> plateau = ReduceOnPlateau(factor=0.5, patience=0)
        >>> plateau.begin([(daskps.optim.SGD(0.1), 1.0)], [])
        >>> [plateau.reduction(SimpleNamespace(loss=loss)) for loss in (3.0, 2.0, 2.0)]
        [None, None, 0.5]
        """
        if not self._look(self._value(epoch)) or not self._rates:
            return None
        current = [rate * factor for rate, factor in self._rates]
        by = self.factor
        if self.min_lr:
            by = max(by, self.min_lr / current[0])
        if max(current) * (1 - by) <= self.eps:
            return None
        # As shards do it: a run that resumes hears of these very factors.
        self._rates = [(rate, factor * by) for rate, factor in self._rates]
        return by

    def _value(self, epoch: Epoch) -> float:
        """Return what of an epoch is looked at."""
        if self.metric is None:
            if epoch.loss is None:
                raise ValueError(
                    "ReduceOnPlateau looks at the loss, and the gradient function returns "
                    "none; return (loss, grads), or pass metric= and validate="
                )
            return epoch.loss
        if self.metric not in epoch.metrics:
            raise ValueError(
                f"ReduceOnPlateau looks at {self.metric!r}, and validate returns "
                f"{sorted(epoch.metrics)}; pass one of these as metric="
            )
        return epoch.metrics[self.metric]

    def _look(self, value: float) -> bool:
        """Take in the value of an epoch; return whether rates are to be reduced."""
        if self._is_better(value):
            self.best, self.num_bad_epochs = value, 0
        else:
            self.num_bad_epochs += 1
        if self.cooldown_counter:
            self.cooldown_counter -= 1
            self.num_bad_epochs = 0
        if self.num_bad_epochs <= self.patience:
            return False
        self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0
        return True

    def _is_better(self, value: float) -> bool:
        sign = 1.0 if self.mode == "min" else -1.0
        if self.threshold_mode == "rel":
            return sign * value < sign * (self.best * (1.0 - sign * self.threshold))
        return sign * value < sign * self.best - self.threshold
