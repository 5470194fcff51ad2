"""daskps' side of each job, through its public interface."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import daskps
from daskps import optim
from tests.benchmarks.clusters import places
from tests.benchmarks.jobs import LEARNING_RATE, StepJob, started, step, timed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distributed import Client


class _Side:
    """A trainer of a run."""

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


def _loop(job: StepJob, steps: int, trainer: daskps.Trainer, part: Any) -> float:
    """Run so many steps of a trainer; return the seconds of one."""
    return timed(step(job, _Side(trainer, job), trainer.rank), steps)


def ways_of(store: daskps.ParameterStore) -> list[str]:
    """Return the ways from this process to the shards."""
    store.pull()
    return sorted(set(store.stats()["handle"]["ways"].values()))


def _ways(store: daskps.ParameterStore, trainer: Any, part: Any) -> list[str]:
    return ways_of(store)


@dataclass(frozen=True)
class Ours:
    """A store for one job, with a shard on each server."""

    store: daskps.ParameterStore
    job: StepJob

    def measure(self, steps: int) -> float:
        """Run so many steps in all trainers; return the seconds of one."""
        return float(max(self._run(partial(_loop, self.job, steps))))

    def ways(self) -> tuple[str, ...]:
        """Return the ways that trainers take to the shards."""
        found = self._run(partial(_ways, self.store))
        return tuple(sorted({way for ways in found for way in ways}))

    def _run(self, loop: Callable[[daskps.Trainer, Any], Any]) -> list[Any]:
        sync = "bsp" if self.job.kind in ("round", "train") else "asp"
        ranks = list(range(self.job.trainers))
        found: list[Any] = daskps.run(
            self.store, loop, ranks, sync=sync, reduce="mean", callbacks=()
        )
        return found


@contextmanager
def opened(client: Client, job: StepJob) -> Iterator[Ours]:
    """Make a store for a job, which is closed afterwards."""
    store = daskps.create(
        {"w": daskps.ArraySpec((job.elements,), "float32")},
        client=client,
        optimizer=optim.SGD(LEARNING_RATE),
        shards=job.servers,
        servers=places(client, job.trainers, job.servers)[1],
    )
    try:
        yield Ours(store, job)
    finally:
        store.close()
