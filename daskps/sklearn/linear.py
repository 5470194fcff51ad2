"""Linear models by the losses, penalties and argument names of scikit-learn."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from sklearn import linear_model
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state

import daskps
from daskps.optim import SGD
from daskps.optim.schedules import inverse_time
from daskps.sklearn.estimator import Distributed, coded, dtype_of
from daskps.sklearn.gradient import Gradient
from daskps.training.functions import check_choice

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.typing import Array

#: Arguments that go to `train` as they are.
_OF_TRAIN = ("batch_size", "trainers", "sync", "shuffle")
#: The update rules of learning rates that are scikit-learn's.
_RATES: dict[str, Callable[[Any], Any]] = {
    # By rows steps get too small before there were many, by updates they stay too large
    # for long: on four data sets this was the best power of the rows of a batch.
    "optimal": lambda of: SGD(
        inverse_time(1 / (t := of.alpha**0.25), of.batch_size ** (2 / 3) * of.alpha / t)
    ),
    "invscaling": lambda of: SGD(inverse_time(of.eta0, 1.0, of.power_t)),
    "constant": lambda of: SGD(of.eta0),
}


@dataclass(eq=False, repr=False)
class _Linear(Distributed):
    """The arguments of both linear models, and how they train."""

    loss: str
    _: KW_ONLY
    penalty: str | None = "l2"
    alpha: float = 0.0001
    l1_ratio: float = 0.15
    fit_intercept: bool = True
    max_iter: int = 1000
    tol: float | None = 1e-3
    shuffle: bool = True
    epsilon: float = 0.1
    random_state: Any = None
    power_t: float
    n_iter_no_change: int = 5
    learning_rate: str
    eta0: float = 0.01
    batch_size: int = 64
    trainers: int | None = None
    sync: Any = "bsp"
    optimizer: Any = None
    client: Any = None

    def _check(self) -> None:
        check_choice("learning_rate", self.learning_rate, (*_RATES,))
        # The arguments that are scikit-learn's, in its words.
        self._form()._validate_params()  # noqa: SLF001
        if self.learning_rate == "optimal" and not (self.alpha or self.optimizer):
            raise ValueError("alpha must be > 0 since learning_rate is 'optimal'")

    def _learn(self, X: Any, y: Any, classes: Any, *, begins: bool, once: bool) -> Self:
        self._check()
        n_classes, stop = 0, None
        if classes is not None:
            n_classes, y = len(classes), coded(y, classes=classes)
        if not once and self.tol is not None:
            stop = daskps.stop.no_improvement(self.n_iter_no_change, self.tol)
        share = {"l1": 1.0, "elasticnet": self.l1_ratio}.get(str(self.penalty), 0.0)
        alpha = self.alpha if self.penalty else 0.0
        l1, l2 = alpha * share, alpha * (1 - share)
        store = None if begins else self._store
        if store is None:
            rows = n_classes if n_classes > 2 else 1
            coef = np.zeros((rows, self.n_features_in_), dtype_of(X))
            store = self._created(coef, begins=begins)
        # Where this fails the next call begins at the coefficients there are.
        self._store = None
        with nullcontext() if once else store:
            result = daskps.train(
                store,
                Gradient(self.loss, self.epsilon, l1, l2, n_classes),
                X,
                y,
                epochs=1 if once else self.max_iter,
                seed=int(check_random_state(self.random_state).randint(2**31 - 1)),
                stop=stop,
                callbacks=(),
                **{name: getattr(self, name) for name in _OF_TRAIN},
            )
        if once:
            self._store = store
        if classes is not None:
            self.classes_ = classes
        coef = result.weights["coef"]
        self.coef_ = coef if n_classes else coef[0]
        self.intercept_ = result.weights.get("intercept", np.zeros_like(coef[:, 0]))
        self.n_iter_, self.t_ = len(result.history), 1.0 + result.version
        if stop and self.n_iter_ == self.max_iter:
            told = "Maximum number of epochs reached before convergence; raise max_iter"
            warnings.warn(told, ConvergenceWarning, stacklevel=3)
        return self

    def _created(self, zeros: Array, *, begins: bool) -> Any:
        """Return a store that begins with zeros, or with the coefficients so far."""
        params = {"coef": zeros if begins else self.coef_.reshape(zeros.shape)}
        if self.fit_intercept:
            params["intercept"] = zeros[:, 0] if begins else self.intercept_
        rule = self.optimizer or _RATES[self.learning_rate](self)
        return daskps.create(params, client=self.client, optimizer=rule)

    def _form(self) -> Any:
        names = self._own().get_params().keys() & self.get_params().keys()
        return self._own(**{name: getattr(self, name) for name in names})


@dataclass(eq=False, repr=False)
class SGDClassifier(_Linear):
    """A linear classifier, as scikit-learn's of this name, trained on a cluster.

    Parameters
    ----------
    loss : str
        As of `sklearn.linear_model.SGDClassifier`.
    penalty, alpha, l1_ratio, fit_intercept, max_iter, tol, shuffle, epsilon, \
random_state, power_t, n_iter_no_change
        As there.
    learning_rate : {"optimal", "invscaling", "constant"}
        As there, by updates, each of which is by the mean over a batch of each trainer;
        for "optimal" one counts as ``batch_size ** (2 / 3)`` rows.
    eta0 : float
        The learning rate of the first update, but for "optimal".
    batch_size, trainers, sync
        As of :func:`daskps.train`.
    optimizer : daskps.optim.Rule, optional
        In place of `learning_rate`.
    client : distributed.Client, optional
        The client; the current one by default. It is not pickled.

    Examples
    --------
    >>> from daskps.sklearn import SGDClassifier
    >>> X = np.random.default_rng(0).normal(size=(200, 2))
    >>> model = SGDClassifier(loss="log_loss", max_iter=20, tol=None, random_state=0)
    >>> model.fit(X, X[:, 0] > X[:, 1]).score(X, X[:, 0] > X[:, 1]) > 0.95
    True
    >>> model.to_local().predict([[1.0, -1.0]])
    array([ True])
    """

    _own = linear_model.SGDClassifier
    loss: str = "hinge"
    _: KW_ONLY
    learning_rate: str = "optimal"
    power_t: float = 0.5


@dataclass(eq=False, repr=False)
class SGDRegressor(_Linear):
    """A linear model of numbers, as scikit-learn's of this name, trained on a cluster.

    Parameters
    ----------
    loss : str
        As of `sklearn.linear_model.SGDRegressor`.
    penalty, alpha, l1_ratio, fit_intercept, max_iter, tol, shuffle, epsilon, \
random_state, power_t, n_iter_no_change
        As there.
    learning_rate, eta0, batch_size, trainers, sync, optimizer, client
        As of :class:`SGDClassifier`.

    Examples
    --------
    >>> from daskps.sklearn import SGDRegressor
    >>> X = np.random.default_rng(0).normal(size=(200, 2))
    >>> model = SGDRegressor(eta0=0.5, max_iter=50, tol=None, random_state=0)
    >>> model.fit(X, X @ [1.0, -2.0]).coef_.round(2)
    array([ 1., -2.])
    """

    _own = linear_model.SGDRegressor
    loss: str = "squared_error"
    _: KW_ONLY
    learning_rate: str = "invscaling"
    power_t: float = 0.25
