"""Estimators of scikit-learn's that are fitted on parts of the rows and averaged."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from sklearn.base import clone

import daskps
from daskps.sklearn.estimator import Distributed, array_of, coded, dtype_of, learned
from daskps.store.arguments import whole
from daskps.training.data.rows import check_some, n_rows

if TYPE_CHECKING:
    from daskps.typing import Array


@dataclass(eq=False, repr=False)
class Averaged(Distributed):
    """An estimator of scikit-learn's that each trainer fits on its part of the rows.

    After each epoch all go on with the mean of their `coef_` and `intercept_`, weighted
    by rows. The rest of what a fitted one knows, such as how many rows it has seen, is
    that of the first trainer.

    Parameters
    ----------
    estimator : estimator
        It has `partial_fit`, and has learned `coef_` and `intercept_`: a linear model.
    epochs : int
        Passes of each `fit` over the data; a `partial_fit` is one.
    trainers : int, optional
        By default one per worker that owns shards.
    client : distributed.Client, optional
        The client; the current one by default. It is not pickled.

    Examples
    --------
    >>> from daskps.sklearn import Averaged
    >>> from sklearn.linear_model import Perceptron
    >>> X = np.random.default_rng(0).normal(size=(200, 2))
    >>> model = Averaged(Perceptron(), epochs=5).fit(X, X[:, 0] > X[:, 1])
    >>> model.score(X, X[:, 0] > X[:, 1]) > 0.95
    True
    """

    estimator: Any
    _: KW_ONLY
    epochs: int = 10
    trainers: int | None = None
    client: Any = None

    def _learn(self, X: Any, y: Any, classes: Any, *, begins: bool, once: bool) -> Self:
        epochs = 1 if once else whole(self.epochs, "epochs", least=1)
        named = {} if classes is None else {"classes": classes}
        of = shaped = self._form() if begins else self.to_local()
        # Trainers get arrays, whose columns have no names.
        vars(of).pop("feature_names_in_", None)
        if begins and hasattr(of, "partial_fit"):
            # Fitted on nothing but zeros, to see what it learns.
            labels = named.get("classes", np.zeros(1))
            zeros = np.zeros((len(labels), self.n_features_in_), dtype_of(X))
            shaped = self._form().partial_fit(zeros, labels, **named)
        is_linear = hasattr(shaped, "coef_") and hasattr(shaped, "intercept_")
        if not is_linear or getattr(of, "average", False):
            raise TypeError(
                f"Averaged takes an estimator whose partial_fit goes on from its coef_ and "
                f"intercept_, such as Perceptron(), found {of!r:.60}; leave out average=, "
                f"and train the parameters of other models with daskps.train"
            )
        with self.client.as_current() if self.client else nullcontext():
            X, y = array_of(X, counted=True), array_of(y, counted=True)
        check_some(n_rows(X))
        loop = partial(_epochs, local=of, epochs=epochs, **named)
        with daskps.create(_averaged(shaped), client=self.client) as store:
            parts = daskps.partition(X, y, self.trainers or len({*store.placement}))
            local, *_ = daskps.run(store, loop, parts, callbacks=())
        self.__dict__.update(learned(local))
        return self

    def _form(self) -> Any:
        return clone(self.estimator)


def _averaged(estimator: Any) -> dict[str, Array]:
    return {"coef": estimator.coef_, "intercept": estimator.intercept_}


def _epochs(
    trainer: daskps.Trainer, part: Any, *, local: Any, epochs: int, **named: Any
) -> Any:
    """Fit an estimator, each trainer its own, on one part; return that of the first."""
    X, y = part
    if not len(y):
        return None
    if named:
        coded(y, **named)  # refuses others
    for _ in range(epochs):
        local.partial_fit(X, y, **named)
        trainer.assign(_averaged(local), weight=len(y))
        found = trainer.pull()
        local.coef_, local.intercept_ = found["coef"], found["intercept"]
    return None if trainer.rank else local
