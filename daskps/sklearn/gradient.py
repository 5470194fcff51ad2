"""Losses of linear models by scikit-learn's names, and the gradient that `train` is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.typing import Array

# Each returns the losses and their derivatives by the scores, element by element.


def _margin(gap: Array, y: Array) -> tuple[Array, Array]:
    return np.maximum(gap, 0), np.where(gap >= 0, -y, 0)


def _squared_hinge(scores: Array, y: Array, _: float) -> tuple[Array, Array]:
    gap = np.maximum(1 - y * scores, 0)
    return gap**2, -2 * y * gap


def _log_loss(scores: Array, y: Array, _: float) -> tuple[Array, Array]:
    margin = y * scores
    # 1 / (1 + exp(margin)), which overflows nowhere.
    return np.logaddexp(0, -margin), -y * np.exp(-np.logaddexp(0, margin))


def _modified_huber(scores: Array, y: Array, _: float) -> tuple[Array, Array]:
    margin = y * scores
    gap, is_far = np.maximum(1 - margin, 0), margin < -1
    return np.where(is_far, -4 * margin, gap**2), -2 * y * np.where(is_far, 2, gap)


def _huber(scores: Array, y: Array, epsilon: float) -> tuple[Array, Array]:
    error = scores - y
    slope = np.clip(error, -epsilon, epsilon)
    return slope * (error - slope / 2), slope


def _insensitive(scores: Array, y: Array, epsilon: float) -> tuple[Array, Array]:
    error = scores - y
    over = np.maximum(np.abs(error) - epsilon, 0)
    return over, np.sign(error) * (over > 0)


def _squared_over(scores: Array, y: Array, epsilon: float) -> tuple[Array, Array]:
    over, slope = _insensitive(scores, y, epsilon)
    return over**2, 2 * slope * over


LOSSES: dict[str, Callable[[Array, Array, float], tuple[Array, Array]]] = {
    "hinge": lambda scores, y, _: _margin(1 - y * scores, y),
    "log_loss": _log_loss,
    "modified_huber": _modified_huber,
    "squared_hinge": _squared_hinge,
    "perceptron": lambda scores, y, _: _margin(-y * scores, y),
    "squared_error": lambda scores, y, _: ((scores - y) ** 2 / 2, scores - y),
    "huber": _huber,
    "epsilon_insensitive": _insensitive,
    "squared_epsilon_insensitive": _squared_over,
}


@dataclass(frozen=True)
class Gradient:
    """The mean of a loss over a batch, and its gradient with that of the penalty."""

    loss: str
    epsilon: float
    l1: float
    l2: float
    #: 0 where `y` has numbers, else how many classes its places are of.
    n_classes: int

    def __call__(self, params: Any, X: Any, y: Array) -> tuple[float, dict[str, Array]]:
        """Return both, as `train` takes them."""
        coef = params["coef"]
        scores = X @ coef.T + params.get("intercept", 0)
        target = y[:, None]
        if self.n_classes:
            # One against all others; of two classes the second one.
            own = [1] if self.n_classes == 2 else np.arange(self.n_classes)
            target = np.where(target == own, 1, -1).astype(scores.dtype)
        loss, slope = LOSSES[self.loss](scores, target, self.epsilon)
        slope = slope / len(y)
        penalty = self.l2 * coef + self.l1 * np.sign(coef)
        grads = {"coef": slope.T @ X + penalty}
        if "intercept" in params:
            grads["intercept"] = slope.sum(axis=0)
        return float(loss.mean()), grads
