"""Measure and draw what docs/sync-modes.md shows of old gradients: loss by steps.

Run it from a checkout with ``python docs/figures/old_gradients.py``; it needs the extras
``demo`` and ``docs``, takes one to two minutes, writes ``old-gradients.svg`` beside
itself and prints the table of that page.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from distributed import Client, LocalCluster
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits

import daskps

N_TRAINERS, REPEATS = 3, 5
#: Trainer 0 is ten times slower and makes a tenth of the steps: all end together.
SECONDS, STEPS = (0.03, 0.003, 0.003), (30, 300, 300)
BATCH, EVERY = 16, 10
#: A rate at which old gradients do no harm, and one at which they do.
RATES = {
    "SGD(0.5)": (0.5, 0.0),
    "SGD(1, momentum=0.9)": (1.0, 0.9),
}
#: By name a policy, the part of the rate, and a colour.
POLICIES: dict[str, tuple[Any, float, str]] = {
    "asp": ("asp", 1.0, "#b3362f"),
    "asp, a third of the rate": ("asp", 1 / 3, "#d98e04"),
    "ASP(max_staleness=8)": (daskps.ASP(max_staleness=8), 1.0, "#1b6ca8"),
    "ASP(damping=1)": (daskps.ASP(damping=1.0), 1.0, "#2a9d5c"),
}
Params = dict[str, np.ndarray]


def chances(params: Params, X: np.ndarray) -> np.ndarray:
    """Return the probability of each digit for each row, shape (n, 10)."""
    scores = X @ params["weight"] + params["bias"]
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return scores / scores.sum(axis=1, keepdims=True)


def mean_loss(params: Params, X: np.ndarray, y: np.ndarray) -> float:
    """Return the mean cross-entropy over rows."""
    of = chances(params, X)[np.arange(len(y)), y]
    return float(-np.log(np.maximum(of, 1e-12)).mean())


def loop(trainer: daskps.Trainer, part: Any) -> list[float]:
    """Train on random batches; return the loss over all rows every few steps."""
    X, y, seed = part
    rng, losses = np.random.default_rng((seed, trainer.rank)), []
    for step in range(STEPS[trainer.rank]):
        params = trainer.pull()
        if trainer.rank == 1 and step % EVERY == 0:
            losses.append(mean_loss(params, X, y))
        batch = rng.integers(len(y), size=BATCH)
        error = (chances(params, X[batch]) - np.eye(10)[y[batch]]) / BATCH
        # Meanwhile the others go on: what was read grows old.
        time.sleep(SECONDS[trainer.rank])
        trainer.push({"weight": X[batch].T @ error, "bias": error.sum(axis=0)})
    return losses


def measure(
    sync: Any, rule: daskps.optim.SGD, part: tuple[Any, Any, int]
) -> tuple[list[float], dict[str, Any]]:
    """Train once from zeros; return the losses, and what the shard has counted."""
    params = {"weight": np.zeros((64, 10)), "bias": np.zeros(10)}
    with daskps.create(params, optimizer=rule, shards=1) as store:
        losses = daskps.run(store, loop, [part] * N_TRAINERS, sync=sync)[1]
        (shard,) = store.stats()["shards"]
        return [*losses, mean_loss(store.pull(), *part[:2])], shard


def spread(values: list[float], digits: int) -> str:
    """Return median and range as the table has them."""
    low, middle, high = np.quantile(values, [0.0, 0.5, 1.0])
    if low == high:
        return f"{middle:.{digits}f}"
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def main() -> None:
    """Measure, print the table and draw."""
    X, y = load_digits(return_X_y=True)
    runs = defaultdict(list)
    # In turn, so that a busy minute of the machine meets all of them.
    for seed, (title, (rate, momentum)), (name, (sync, part, _)) in itertools.product(
        range(REPEATS), RATES.items(), POLICIES.items()
    ):
        rule = daskps.optim.SGD(rate * part, momentum=momentum)
        runs[title, name].append(measure(sync, rule, (X / 16.0, y, seed)))
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "daskps"})
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), layout="tight")
    print("| optimizer | sync | highest loss | last loss | dropped |")
    print("|---|---|---|---|---|")
    for (title, axis), name in itertools.product(
        zip(RATES, axes, strict=True), POLICIES
    ):
        tries = sorted(runs[title, name], key=lambda run: run[0][-1])
        losses, _ = tries[REPEATS // 2]
        steps = EVERY * np.arange(len(losses))
        axis.plot(steps, losses, label=name, color=POLICIES[name][2])
        # In the beginning all are high.
        highest = spread([max(run[0][len(losses) // 5 :]) for run in tries], 2)
        last = spread([run[0][-1] for run in tries], 3)
        dropped = spread([run[1]["dropped"] for run in tries], 0)
        print(f"| {title} | {name} | {highest} | {last} | {dropped} |")
        axis.set(title=title, xlabel="steps of a fast trainer", ylim=(0, 2))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("loss over all rows")
    axes[0].legend()
    print("delays with damping:", runs["SGD(0.5)", "ASP(damping=1)"][0][1]["delays"])
    path = Path(__file__).with_name("old-gradients.svg")
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
