"""Plain Dask: weights in futures, gradients and updates submitted as tasks.

Each step is made from the client for all trainers: for a trainer a task that takes
the weights and computes a gradient and, with several shards, a task that cuts it for
each; for a shard a task that applies the gradients. The client waits for these.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import wait

from tests.benchmarks.clusters import places
from tests.benchmarks.jobs import LEARNING_RATE, Gradient, cuts, started, timed_loop
from tests.benchmarks.peers import Peer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distributed import Client

    from daskps.typing import Array
    from tests.benchmarks.jobs import Measure, StepJob


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
        self._train_at, self._serve_at = places(client, job.trainers, job.servers)
        self._cuts = cuts(job.elements, job.servers)
        self._weights = [
            client.submit(started, c.stop - c.start, workers=[worker], pure=False)
            for c, worker in zip(self._cuts, self._serve_at, strict=True)
        ]
        self._learn: list[Any] = [None] * job.trainers
        if job.kind == "train":
            self._learn = [
                client.submit(Gradient, rank, job.elements, workers=[worker])
                for rank, worker in enumerate(self._train_at)
            ]

    def steps(self, steps: int) -> None:
        act = self._get if self._job.kind == "get" else self._step
        for _ in range(steps):
            act()

    def _get(self) -> None:
        first = self._weights[0]
        self._client.gather([self._submit(_first, first, at=w) for w in self._train_at])

    def _step(self) -> None:
        """Make one step of all trainers."""
        gradients = [
            self._submit(_gradient, learn, *self._weights, at=worker)
            for learn, worker in zip(self._learn, self._train_at, strict=True)
        ]
        self._weights = [
            self._submit(
                _updated,
                self._weights[shard],
                *(self._submit(_cut, g, cut) for g in gradients),
                at=self._serve_at[shard],
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
    loop = lru_cache(maxsize=1)(partial(_Loop, client))
    yield lambda job, steps: timed_loop(loop(job).steps, steps)
    loop.cache_clear()


PEER = Peer("plain Dask", opened)
