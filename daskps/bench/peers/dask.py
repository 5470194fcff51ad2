"""Plain Dask: weights in futures, gradients and updates submitted as tasks.

Each step is made from the client for all trainers: for a trainer a task that takes
the weights and computes a gradient and, with several shards, a task that cuts it for
each; for a shard a task that applies the gradients. The client waits for these.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import wait

from daskps.bench.clusters import places
from daskps.bench.jobs import (
    LEARNING_RATE,
    Gradient,
    StepJob,
    cuts,
    started,
    timed_loop,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distributed import Client

    from daskps.bench.jobs import Measure
    from daskps.typing import Array

TITLE = "plain Dask"


def available() -> str | None:
    """Return None: it needs nothing but Dask."""
    return None


def covers(job: StepJob) -> bool:
    """Tell whether it does a job: any."""
    return bool(job)


def _first(weights: Array) -> Array:
    return weights


def _gradient(learn: Gradient | None, *slices: Array) -> Array:
    weights = np.concatenate(slices)
    if learn is None:
        return weights
    gradient = np.empty_like(weights)
    learn(weights, gradient)
    return gradient


def _cut(gradient: Array, cut: slice) -> Array:
    return gradient[cut]


def _updated(weights: Array, *gradients: Array) -> Array:
    share = np.float32(LEARNING_RATE / len(gradients))
    updated: Array = weights - share * sum(gradients)
    return updated


class _Loop:
    """The client's loop of one job."""

    def __init__(self, client: Client, job: StepJob) -> None:
        self._client, self._job = client, job
        self._where = places(client, job.trainers, job.servers)
        self._cuts = cuts(job.elements, job.servers)
        self._weights = [
            client.submit(started, c.stop - c.start, workers=[worker], pure=False)
            for c, worker in zip(self._cuts, self._where.servers, strict=True)
        ]
        self._learn: list[Any] = [None] * job.trainers
        if job.kind == "train":
            self._learn = [
                client.submit(Gradient, rank, job.elements, workers=[worker])
                for rank, worker in enumerate(self._where.trainers)
            ]

    def steps(self, steps: int) -> None:
        for _ in range(steps):
            if self._job.kind == "get":
                self._get()
            else:
                self._step()

    def _get(self) -> None:
        get = [
            self._submit(_first, self._weights[0], at=worker)
            for worker in self._where.trainers
        ]
        self._client.gather(get)

    def _step(self) -> None:
        """Make one step of all trainers."""
        gradients = [
            self._submit(_gradient, learn, *self._weights, at=worker)
            for learn, worker in zip(self._learn, self._where.trainers, strict=True)
        ]
        self._weights = [
            self._submit(
                _updated,
                self._weights[shard],
                *(self._submit(_cut, g, cut) for g in gradients),
                at=self._where.servers[shard],
            )
            for shard, cut in enumerate(self._cuts)
        ]
        wait(self._weights)

    def _submit(self, function: Any, *args: Any, at: str | None = None) -> Any:
        workers = None if at is None else [at]
        return self._client.submit(function, *args, workers=workers, pure=False)


@contextmanager
def opened(trainers: int, servers: int, client: Client) -> Iterator[Measure]:
    """Use the workers that daskps uses."""
    held: dict[StepJob, _Loop] = {}

    def measure(job: StepJob, steps: int) -> float:
        if job not in held:
            held.clear()
            held[job] = _Loop(client, job)
        return timed_loop(held[job].steps, steps)

    yield measure
    held.clear()
