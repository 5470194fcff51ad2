"""Softmax regression on the handwritten digits that come with scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from daskps.demo.options import DemoError
from daskps.typing import Array

Params = dict[str, Array]

N_CLASSES = 10
#: Rows that no trainer sees: a fifth of the 1,797 pictures.
N_HELD_OUT = 359


@dataclass(frozen=True)
class Digits:
    """Pictures of 64 pixels from 0 to 1, and the digits they show."""

    X: Array
    y: Array
    X_held_out: Array
    y_held_out: Array


def load(seed: int) -> Digits:
    """Return the digits that come with scikit-learn, some of them held out.

    Parameters
    ----------
    seed : int
        The seed of the choice of those that are held out.

    Returns
    -------
    Digits
        Training rows and held-out rows.

    Raises
    ------
    DemoError
        If scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise DemoError(
            f"the demo needs scikit-learn ({error}); "
            f'install it with: pip install "daskps[demo]"'
        ) from error
    X, y = load_digits(return_X_y=True)
    X = X / 16.0
    order = np.random.default_rng(seed).permutation(len(X))
    held, kept = order[:N_HELD_OUT], order[N_HELD_OUT:]
    return Digits(X[kept], y[kept], X[held], y[held])


def initial() -> Params:
    """Return the weights training begins with."""
    return {"weight": np.zeros((64, N_CLASSES)), "bias": np.zeros(N_CLASSES)}


def gradient(params: Params, X: Array, y: Array) -> tuple[float, Params]:
    """Return mean cross-entropy and mean gradients of a batch.

    Parameters
    ----------
    params : dict of str to ndarray
        "weight", shape (d, c), and "bias", shape (c,).
    X : ndarray, shape (n, d)
        Pictures.
    y : ndarray of int, shape (n,)
        Digits.

    Returns
    -------
    float, dict of str to ndarray
        The loss, and the gradients by the parameters' names.
    """
    scores = X @ params["weight"] + params["bias"]
    scores -= scores.max(axis=1, keepdims=True)
    chance = np.exp(scores)
    chance /= chance.sum(axis=1, keepdims=True)
    rows = np.arange(len(y))
    loss = -np.log(np.maximum(chance[rows, y], np.finfo(float).tiny)).mean()
    chance[rows, y] -= 1.0
    chance /= len(y)
    return float(loss), {"weight": X.T @ chance, "bias": chance.sum(axis=0)}


def accuracy(params: Params, digits: Digits) -> float:
    """Return the share of held-out pictures that are recognised."""
    scores = digits.X_held_out @ params["weight"] + params["bias"]
    return float((scores.argmax(axis=1) == digits.y_held_out).mean())


def difference(a: Params, b: Params) -> float:
    """Return the largest absolute difference of two sets of parameters."""
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)
