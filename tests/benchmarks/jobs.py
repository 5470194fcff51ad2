"""What is measured: one step of a trainer, the same for daskps and for its peers.

A side is what one system gives one trainer: its copy of the weights, its gradient,
and `pull`, `push` and `round`. A job says which of them make a step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import numpy as np

from tests.benchmarks.pairs import seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.typing import Array

Kind: TypeAlias = Literal["get", "pullpush", "round", "train"]
#: Runs so many steps of a job in all trainers at once; seconds of one step.
Measure: TypeAlias = "Callable[[StepJob, int], float]"

LEARNING_RATE = 1e-3
#: Shards with so many bytes of weights write them past the caches; so do peers that
#: run our kernel on another buffer.
PAST_NBYTES = 4 * 2**20
#: Logistic regression: rows of a batch, and weights.
BATCH = 64
WEIGHTS = 65_536

_WHAT = {
    "get": "get",
    "pullpush": "pull + push + apply",
    "round": "BSP round",
    "train": "BSP logistic regression",
}


@dataclass(frozen=True)
class StepJob:
    """One kind of step, on a model of float32 of so many bytes.

    "get" reads the weights; "pullpush" reads them, then delivers a gradient that is
    applied at once (SGD); "round" delivers a gradient, waits for all trainers and reads
    the new weights; "train" computes the gradient of a batch first. Trainers are
    processes that compute, servers those that hold a part of the model.
    """

    kind: Kind
    nbytes: int
    trainers: int
    servers: int

    @property
    def elements(self) -> int:
        """Number of weights."""
        return self.nbytes // 4

    @property
    def title(self) -> str:
        """The job in words, as reports name it."""
        size = f"{self.elements:,} weights" if self.kind == "train" else _size(self)
        return f"{_WHAT[self.kind]}, {size}, {self.trainers} + {self.servers}"


def _size(job: StepJob) -> str:
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if job.nbytes >= unit:
            return f"{job.nbytes / unit:g} {name}"
    return f"{job.nbytes} B"


class Side(Protocol):
    """What one system gives one trainer."""

    weights: Array
    gradient: Array

    def pull(self) -> object:
        """Read the model into `weights`."""

    def push(self) -> object:
        """Deliver `gradient`; return when it is applied."""

    def round(self) -> object:
        """Deliver `gradient`, wait for all trainers, read into `weights`."""


class Gradient:
    """Gradient of logistic regression on one batch, the same at every step."""

    def __init__(self, rank: int, elements: int) -> None:
        rng = np.random.default_rng(rank)
        self._X = rng.standard_normal((BATCH, elements), np.float32)
        self._y = rng.integers(0, 2, BATCH).astype(np.float32)

    def __call__(self, weights: Array, out: Array) -> None:
        """Write the mean gradient to `out`."""
        error = 1 / (1 + np.exp(-(self._X @ weights))) - self._y
        np.matmul(error / np.float32(BATCH), self._X, out=out)


def step(job: StepJob, side: Side, rank: int) -> Callable[[], object]:
    """Return one step of the trainer of a rank."""
    if job.kind == "get":
        return side.pull
    if job.kind == "round":
        return side.round
    if job.kind == "pullpush":

        def both() -> None:
            side.pull()
            side.push()

        return both
    if job.kind != "train":
        raise ValueError(f"no job {job.kind!r}")
    gradient = Gradient(rank, job.elements)

    def learn() -> None:
        gradient(side.weights, side.gradient)
        side.round()

    return learn


def timed(
    act: Callable[[], object],
    steps: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the seconds of one of `steps` steps, after a tenth as many to warm up."""
    for _ in range(max(2, steps // 10)):
        act()
    return seconds(act, steps, clock)


def timed_loop(loop: Callable[[int], object], steps: int) -> float:
    """As `timed`, for a loop that takes the number of steps."""
    loop(max(2, steps // 10))
    return seconds(lambda: loop(steps)) / steps


def cuts(elements: int, pieces: int) -> list[slice]:
    """Return the slices of a vector that is cut into pieces, as `np.array_split`."""
    ends = np.cumsum([len(part) for part in np.array_split(np.empty(elements), pieces)])
    return [slice(int(a), int(b)) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def started(elements: int) -> Array:
    """Return weights or a gradient to begin with, all pages touched."""
    return np.full(elements, 1e-3, np.float32)
