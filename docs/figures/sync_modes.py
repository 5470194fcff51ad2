"""Measure and draw the curves of docs/sync-modes.md: loss against seconds.

Run it from a checkout with ``python docs/figures/sync_modes.py``; it needs the extras
``demo`` and ``docs``, takes about two minutes, writes ``sync-modes.svg`` beside
itself and prints the table of that page.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from distributed import Client, LocalCluster, get_worker
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits

import daskps

N_TRAINERS = 3
SLOW_SECONDS = 0.05
STALL_SECONDS, STALL_SHARE = 0.2, 0.05
POLICIES = ["bsp", daskps.SSP(3), daskps.SSP(30), "asp"]
REPEATS = 5
GOAL = 0.7
COLOURS = {
    "bsp": "#1b6ca8",
    "SSP(3)": "#2a9d5c",
    "SSP(30)": "#d98e04",
    "asp": "#b3362f",
}
Params = dict[str, np.ndarray]


def chances(params: Params, X: np.ndarray) -> np.ndarray:
    """Return the probability of each digit for each row, shape (n, 10)."""
    scores = X @ params["weight"] + params["bias"]
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return scores / scores.sum(axis=1, keepdims=True)


def mean_loss(params: Params, X: np.ndarray, y: np.ndarray) -> float:
    """Return the mean cross-entropy over rows."""
    return float(-np.log(chances(params, X)[np.arange(len(y)), y]).mean())


def gradient(params: Params, X: np.ndarray, y: np.ndarray) -> Params:
    """Return the mean gradients of a batch."""
    error = (chances(params, X) - np.eye(10)[y]) / len(y)
    return {"weight": X.T @ error, "bias": error.sum(axis=0)}


def with_one_slow_trainer(params: Params, X: np.ndarray, y: np.ndarray) -> Params:
    """Return the gradients; worker 0 takes its time over each batch."""
    if get_worker().name == 0:
        time.sleep(SLOW_SECONDS)
    return gradient(params, X, y)


def with_stalls(params: Params, X: np.ndarray, y: np.ndarray) -> Params:
    """Return the gradients; any trainer may stop for a moment."""
    if random.random() < STALL_SHARE:
        time.sleep(STALL_SECONDS)
    return gradient(params, X, y)


class Curve:
    """A callback that notes seconds and loss over all rows, ten times a second."""

    def __init__(self, X: np.ndarray, y: np.ndarray) -> None:
        self.X, self.y = X, y
        self.seconds: list[float] = []
        self.loss: list[float] = []

    def on_start(self, run: Any) -> None:
        """Begin to count."""
        self.began = time.perf_counter()
        self.on_round(run)

    def on_round(self, run: Any) -> None:
        """Note where the run is."""
        self.seconds.append(time.perf_counter() - self.began)
        self.loss.append(mean_loss(run.store.pull(), self.X, self.y))

    on_stop = on_round

    def until(self, loss: float) -> float:
        """Return the seconds until the loss was first seen at or below a value."""
        return next(
            s for s, v in zip(self.seconds, self.loss, strict=True) if v <= loss
        )


def measure(slow: Any, sync: Any, X: np.ndarray, y: np.ndarray) -> tuple[Curve, int]:
    """Train once from zeros and return the curve and the largest staleness."""
    params = {"weight": np.zeros((64, 10)), "bias": np.zeros(10)}
    curve = Curve(X, y)
    with daskps.create(params, optimizer=daskps.optim.SGD(0.2)) as store:
        result = daskps.train(
            store,
            slow,
            X,
            y,
            sync=sync,
            # A round then moves the weights as far as one step of each trainer.
            reduce="sum",
            epochs=6,
            batch_size=64,
            callbacks=[curve],
        )
    return curve, max(epoch.staleness for epoch in result.history)


def main() -> None:
    """Measure, print the table and draw."""
    X, y = load_digits(return_X_y=True)
    X = X / 16.0
    cases = {
        "one slow trainer": with_one_slow_trainer,
        "stalls now and then": with_stalls,
    }
    runs = defaultdict(list)
    # In turn, so that a busy minute of the machine meets all of them.
    for _ in range(REPEATS):
        for (title, slow), sync in itertools.product(cases.items(), POLICIES):
            runs[title, str(sync)].append(measure(slow, sync, X, y))
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "daskps"})
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True, layout="tight")
    print(f"| trainers | sync | s to {GOAL} | s in all | last loss | staleness |")
    print("|---|---|---|---|---|---|")
    for (title, axis), sync in itertools.product(
        zip(cases, axes, strict=True), POLICIES
    ):
        tries = sorted(runs[title, str(sync)], key=lambda run: run[0].until(GOAL))
        curve, lag = tries[REPEATS // 2]
        name = sync if isinstance(sync, str) else f"SSP({sync.staleness})"
        axis.plot(curve.seconds, curve.loss, label=name, color=COLOURS[name])
        low, high = tries[0][0].until(GOAL), tries[-1][0].until(GOAL)
        print(
            f"| {title} | {name} | {curve.until(GOAL):.1f} ({low:.1f} to {high:.1f}) | "
            f"{curve.seconds[-1]:.1f} | {curve.loss[-1]:.3f} | {lag} |"
        )
        axis.set(title=title, xlabel="seconds", ylim=(0.4, 2.4))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("loss over all rows")
    axes[1].legend()
    path = Path(__file__).with_name("sync-modes.svg")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    with (
        LocalCluster(
            n_workers=N_TRAINERS,
            threads_per_worker=1,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
        ) as cluster,
        Client(cluster),
    ):
        main()
