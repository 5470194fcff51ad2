"""Fits on a cluster, and predictions where the data are: common to all estimators."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import dask.array as da
import numpy as np
from dask.base import is_dask_collection
from sklearn.base import BaseEstimator, is_classifier
from sklearn.exceptions import DataConversionWarning
from sklearn.utils import column_or_1d, get_tags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.typing import Array


def _is_table(data: Any) -> bool:
    """Tell whether it is a frame of Dask's, or a column of one."""
    return hasattr(data, "map_partitions")


def _looked_at(estimator: Any, X: Any, y: Any, *, reset: bool) -> tuple[Any, Any]:
    """Return data as `train` takes them, after the checks of scikit-learn.

    Of what is lazy only the columns are looked at; `train` refuses the rest.
    """
    if not is_dask_collection(X):
        how = {"accept_sparse": "csr", "y_numeric": not is_classifier(estimator)}
        how |= {"dtype": [np.float64, np.float32], "reset": reset}
        found: tuple[Any, Any] = validate_data(estimator, X, y, **how)
        return found
    _check_columns(estimator, X, y, reset=reset)
    if not is_dask_collection(y):
        return X, column_or_1d(y, warn=True)
    if y.ndim == 2 and y.shape[1] == 1:
        told = "A column-vector y was passed when a 1d array was expected."
        warnings.warn(told, DataConversionWarning, stacklevel=3)
        y = y.iloc[:, 0] if hasattr(y, "iloc") else y[:, 0]
    return X, y


def _check_columns(estimator: Any, X: Any, *y: Any, reset: bool) -> None:
    if X.ndim != 2:
        raise ValueError(
            f"Expected 2D array, got {X.ndim}D array instead; reshape it with "
            f"X.reshape(-1, 1) if it has one feature"
        )
    # An empty frame has the names; of an array there is but the width.
    names = _meta(X) if _is_table(X) else np.empty((1, X.shape[1]))
    validate_data(estimator, names, *y, reset=reset, skip_check_array=True)


def dtype_of(X: Any) -> Any:
    """Return the dtype of coefficients: float32 for features in it, else float64."""
    dtypes = X.dtypes if hasattr(X, "dtypes") else [X.dtype]
    return np.dtype("f4" if {*map(str, dtypes)} == {"float32"} else "f8")


def array_of(table: Any, *, counted: bool = False) -> Any:
    """Return a frame of Dask's as an array of it, and anything else as it is."""
    if not _is_table(table):
        return table
    # Not to_dask_array: blocks of strings would be no arrays.
    array = table.map_partitions(np.asarray, meta=np.asarray(_meta(table)))
    return array.compute_chunk_sizes() if counted else array


def _meta(table: Any) -> Any:
    return table._meta  # noqa: SLF001 - as all of Dask's own extensions do


def _classes_of(y: Any, client: Any) -> Array:
    """Return the labels there are, in order."""
    if is_dask_collection(y):
        y = array_of(y)
        y = y.map_blocks(np.unique, dtype=y.dtype).compute(scheduler=client)
    found: Array = np.unique(np.asarray(y))
    check_classification_targets(found)
    if len(found) < 2:
        raise ValueError(
            f"The number of classes has to be greater than one; got {len(found)} class"
        )
    return found


def coded(y: Any, *, classes: Array) -> Any:
    """Return labels as their places among the classes."""
    if is_dask_collection(y):
        if _is_table(y):
            return y.map_partitions(coded, classes=classes, meta=(y.name, np.intp))
        return y.map_blocks(coded, classes=classes, dtype=np.intp)
    labels = np.asarray(y)
    places = np.searchsorted(classes, labels).clip(max=len(classes) - 1)
    if (is_new := classes[places] != labels).any():
        raise ValueError(
            f"y has the labels {np.unique(labels[is_new]).tolist()!s:.80}, which are none "
            f"of the classes {classes.tolist()!s:.80}; name all of them in the first "
            f"partial_fit(X, y, classes=...)"
        )
    # Those of a frame stay beside its rows.
    return type(y)(places, index=y.index) if hasattr(y, "iloc") else places


def learned(estimator: Any) -> dict[str, Any]:
    """Return the attributes of an estimator that a fit has given it."""
    return {name: of for name, of in vars(estimator).items() if name.endswith("_")}


def _has(method: str) -> Callable[[Any], bool]:
    return lambda estimator: hasattr(estimator._form(), method)  # noqa: SLF001


class Distributed(BaseEstimator):
    """Fits on a cluster, and predicts by scikit-learn's own estimator where the data are."""

    client: Any
    #: Return scikit-learn's estimator as it is before it is fitted.
    _form: Callable[[], Any]
    #: Learn from data, `classes` (None for numbers), whether this `begins`, `once`.
    _learn: Callable[..., Self]
    #: Of `partial_fit`, for the next one.
    _store = None

    def __getstate__(self) -> dict[str, Any]:
        # Another process has a client of its own, and goes on from the coefficients.
        state = {**super().__getstate__(), "client": None}
        state.pop("_store", None)
        return state

    def __sklearn_tags__(self) -> Any:
        return get_tags(self._form())

    def __sklearn_clone__(self) -> Self:
        made: Self = super(Distributed, copy.copy(self)).__sklearn_clone__()
        made.client = self.client
        return made

    def fit(self, X: Any, y: Any) -> Self:
        """Train from the beginning, in a store that is freed at the end.

        Parameters
        ----------
        X : array_like, sparse matrix, frame, or dask array or frame, shape (n, p)
            Rows.
        y : array_like or dask collection, shape (n,)
            Their labels or values.

        Returns
        -------
        estimator
            This one.

        Raises
        ------
        ValueError, TypeError
            For arguments and data that cannot be, and without a client.
        """
        X, y = _looked_at(self, X, y, reset=True)
        classes = _classes_of(y, self.client) if is_classifier(self) else None
        return self._learn(X, y, classes, begins=True, once=False)

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> Self:
        """Go on for one epoch.

        Parameters
        ----------
        X : array_like, sparse matrix, frame, or dask array or frame, shape (n, p)
            Rows.
        y : array_like or dask collection, shape (n,)
            Their labels or values.
        classes : array_like, shape (k,), optional
            All labels there will be, in the first call of a classifier.

        Returns
        -------
        estimator
            This one.

        Raises
        ------
        ValueError
            For a label that is none of `classes`, and as `fit` does.
        """
        begins = not hasattr(self, "coef_")
        if is_classifier(self):
            given = None if classes is None else _classes_of(classes, None)
            classes = given if begins else self.classes_
            if classes is None:
                raise ValueError(
                    "classes must be passed on the first call to partial_fit"
                )
            if given is not None and not np.array_equal(given, classes):
                raise ValueError(
                    f"classes={given.tolist()!s:.80} is not the same as on last call to "
                    f"partial_fit, was: {classes.tolist()!s:.80}"
                )
        X, y = _looked_at(self, X, y, reset=begins)
        return self._learn(X, y, classes, begins=begins, once=True)

    def predict(self, X: Any) -> Any:
        """Return the label or the value of each row.

        Parameters
        ----------
        X : array_like, sparse matrix, frame, or dask array or frame, shape (n, p)
            Rows.

        Returns
        -------
        ndarray or dask array, shape (n,)
            Lazy where `X` is.

        Raises
        ------
        NotFittedError
            Before the first fit; ValueError for other columns than those it saw.
        """
        return self._each("predict", X)

    @available_if(_has("decision_function"))
    def decision_function(self, X: Any) -> Any:
        """Return scores, shape (n,) for two classes, else (n, k), as `predict` does."""
        return self._each("decision_function", X)

    @available_if(_has("predict_proba"))
    def predict_proba(self, X: Any) -> Any:
        """Return probabilities of the classes, shape (n, k), as `predict` does."""
        return self._each("predict_proba", X)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Return the accuracy of a classifier, or how much a regressor explains (R²).

        Parameters
        ----------
        X : array_like, sparse matrix, frame, or dask array or frame, shape (n, p)
            Rows.
        y : array_like or dask collection, shape (n,)
            Their labels or values.
        sample_weight : array_like, shape (n,), optional
            How much each row counts.

        Returns
        -------
        float or dask array, shape ()
            Lazy where `X` is: ``float(...)`` computes it.

        Raises
        ------
        NotFittedError
            Before the first fit.
        """
        if not is_dask_collection(X):
            return self.to_local().score(X, y, sample_weight)
        found, mean = self.predict(X), partial(da.average, weights=sample_weight)
        y = array_of(y)
        if is_classifier(self):
            return mean(found == y)
        return 1 - mean((y - found) ** 2) / mean((y - mean(y)) ** 2)

    def to_local(self) -> Any:
        """Return scikit-learn's own estimator, fitted.

        Returns
        -------
        estimator
            It needs no cluster and none of daskps; a copy, which changes no more.

        Raises
        ------
        NotFittedError
            Before the first fit.
        """
        check_is_fitted(self)
        local = self._form()
        vars(local).update(copy.deepcopy(learned(self)))
        return local

    def _each(self, method: str, X: Any) -> Any:
        local = self.to_local()
        if not is_dask_collection(X):
            return getattr(local, method)(X)
        _check_columns(self, X, reset=False)
        how: dict[str, Any] = {"local": local, "method": method}
        how["meta"] = meta = _of_block(np.empty((0, local.n_features_in_)), **how)
        if _is_table(X):
            return X.map_partitions(_of_block, **how)
        X = X.rechunk({1: -1})
        to = {"chunks": (X.chunks[0], meta.shape[1:])} if meta.ndim == 2 else {}
        return X.map_blocks(_of_block, drop_axis=[] if to else 1, **to, **how)


def _of_block(block: Any, *, local: Any, method: str) -> Any:
    if block.shape[0]:
        return getattr(local, method)(block)
    # scikit-learn refuses to predict nothing; a filter leaves empty blocks.
    nameless = copy.copy(local)
    vars(nameless).pop("feature_names_in_", None)
    return getattr(nameless, method)(np.zeros((1, local.n_features_in_)))[:0]
