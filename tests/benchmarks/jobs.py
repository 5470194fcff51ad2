"""One step of a trainer, the same for daskps and for what is set beside it.

A system gives each trainer its copy of the weights, its gradient, and `pull`, `push` and
`round`. A job says which of them make a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

import daskps
from tests.benchmarks.samples import timed

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.typing import Array

Kind: TypeAlias = Literal["get", "pullpush", "round", "train"]

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

    def step(self, side: Any, rank: int) -> Callable[[], object]:
        """Return one step of the trainer of a rank, with `pull`, `push` and `round`."""
        if self.kind == "get":
            return side.pull
        if self.kind == "round":
            return side.round
        gradient = Gradient(rank, self.elements) if self.kind == "train" else None

        def both() -> None:
            side.pull()
            side.push()

        def learn() -> None:
            assert gradient is not None
            gradient(side.weights, side.gradient)
            side.round()

        return both if gradient is None else learn


def _size(job: StepJob) -> str:
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if job.nbytes >= unit:
            return f"{job.nbytes / unit:g} {name}"
    return f"{job.nbytes} B"


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


@dataclass(frozen=True)
class Trainers:
    """Ours: the trainers of runs on a store with a shard on each server."""

    store: daskps.ParameterStore
    job: StepJob

    def measure(self, steps: int) -> float:
        """Run so many steps in all trainers; return the seconds of one."""
        is_bsp = self.job.kind in ("round", "train")
        loop = partial(_loop, self.job, steps)
        found: list[float] = daskps.run(
            self.store,
            loop,
            list(range(self.job.trainers)),
            sync="bsp" if is_bsp else "asp",
            reduce="mean",
            callbacks=(),
        )
        return max(found)


class _Ours:
    """One of them."""

    def __init__(self, trainer: daskps.Trainer, job: StepJob) -> None:
        self._trainer, self._learns = trainer, job.kind == "train"
        self.weights, self.gradient = started(job.elements), started(job.elements)
        self._out, self._grads = {"w": self.weights}, {"w": self.gradient}

    def pull(self) -> None:
        self._trainer.pull(out=self._out)

    def push(self) -> None:
        self._trainer.push(self._grads)

    def round(self) -> None:
        if self._learns:  # as the loop of `daskps.train`
            self._trainer.pushpull(self._grads, out=self._out)
        else:
            self.push()
            self.pull()


def _loop(job: StepJob, steps: int, trainer: daskps.Trainer, part: int) -> float:
    return timed(job.step(_Ours(trainer, job), trainer.rank), steps)


def cuts(elements: int, pieces: int) -> list[slice]:
    """Return the slices of a vector that is cut into pieces, as `np.array_split`."""
    ends = np.cumsum([len(part) for part in np.array_split(np.empty(elements), pieces)])
    return [slice(int(a), int(b)) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def started(elements: int) -> Array:
    """Return weights or a gradient to begin with, all pages touched."""
    return np.full(elements, 1e-3, np.float32)
