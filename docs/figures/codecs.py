"""Measure and draw the curves of docs/codecs.md: loss against epochs, and bytes.

Run it from a checkout with ``python docs/figures/codecs.py``; it needs the extras
``demo`` and ``docs``, takes about half a minute, writes ``codecs.svg`` beside itself and
prints the table of that page. The rounds are synchronous: it has the same numbers each
time.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from distributed import Client, LocalCluster
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits

import daskps
from daskps.codecs import BFloat16, Codec, Float16, Int8, TopK, TwoBit

N_TRAINERS, EPOCHS = 3, 12
#: By name the codec, a colour and a line; those of one colour have one curve.
CODECS: dict[str, tuple[Codec | None, str, Any]] = {
    "none": (None, "#222222", "-"),
    "bf16": (BFloat16(), "#222222", "-"),
    "bf16, truncated": (BFloat16(truncate=True), "#222222", "-"),
    "fp16": (Float16(), "#222222", "-"),
    "int8": (Int8(), "#222222", "-"),
    "TopK(threshold=0.01)": (TopK(threshold=0.01), "#1b6ca8", (0, (5, 2))),
    "TwoBit(0.01)": (TwoBit(0.01), "#b3362f", (0, (1, 1))),
    "TopK(ratio=0.01)": (TopK(ratio=0.01), "#d98e04", (0, (6, 2, 1, 2))),
}
Params = dict[str, np.ndarray]


def chances(params: Params, X: np.ndarray) -> np.ndarray:
    """Return the probability of each digit for each row, shape (n, 10)."""
    scores = X @ params["weight"] + params["bias"]
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return scores / scores.sum(axis=1, keepdims=True)


def gradient(params: Params, X: np.ndarray, y: np.ndarray) -> Params:
    """Return the mean gradients of a batch."""
    error = (chances(params, X) - np.eye(10, dtype="f4")[y]) / np.float32(len(y))
    return {"weight": X.T @ error, "bias": error.sum(axis=0)}


def measure(
    codec: Codec | None, X: np.ndarray, y: np.ndarray
) -> tuple[list[float], int]:
    """Train from zeros; return the loss after each epoch, and the bytes of a trainer."""

    def validate(params: Params) -> dict[str, float]:
        return {"loss": -np.log(chances(params, X)[np.arange(len(y)), y]).mean()}

    params = {"weight": np.zeros((64, 10), "f4"), "bias": np.zeros(10, "f4")}
    with daskps.create(params, optimizer=daskps.optim.SGD(0.5)) as store:
        result = daskps.train(
            store,
            gradient,
            X,
            y,
            trainers=N_TRAINERS,
            epochs=EPOCHS,
            batch_size=64,
            codec=codec,
            validate=validate,
        )
    losses = [np.log(10), *(epoch.metrics["loss"] for epoch in result.history)]
    return losses, result.stats.ranks[0].sent_encoded_nbytes


def main() -> None:
    """Measure, print the table and draw."""
    X, y = load_digits(return_X_y=True)
    X = (X / 16.0).astype("f4")
    mpl.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "daskps", "font.size": 11}
    )
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.9), layout="tight")
    found = {name: measure(of, X, y) for name, (of, _, _) in CODECS.items()}
    _, plain = found["none"]
    print(f"| codec | bytes a trainer sends | of those without | loss after {EPOCHS} |")
    print("|---|---|---|---|")
    for name, (losses, nbytes) in found.items():
        print(f"| {name} | {nbytes:,} | {nbytes / plain:.3f} | {losses[-1]:.4f} |")
    by_colour = itertools.groupby(CODECS.items(), key=lambda item: item[1][1])
    for colour, group in by_colour:
        names = [name for name, _ in group]
        label = names[0] if len(names) == 1 else "none, 16 bits and int8"
        losses, line = found[names[0]][0], CODECS[names[0]][2]
        left.plot(losses, label=label, color=colour, linestyle=line, linewidth=2)
    left.set(xlabel="epochs", ylabel="loss over all rows", title="Convergence")
    left.grid(alpha=0.3)
    left.legend()
    names = [*found][::-1]
    sizes = [found[name][1] / 1000 for name in names]
    right.barh(names, sizes, color=[CODECS[name][1] for name in names])
    for row, size in enumerate(sizes):
        right.text(size * 1.1, row, f"{size:,.0f}", va="center")
    right.set(xscale="log", xlim=(3, max(sizes) * 3), title="What a trainer sends")
    right.set_xlabel("thousands of bytes")
    path = Path(__file__).with_name("codecs.svg")
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
