"""daskps' side of each job, through its public interface."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import daskps
from daskps import optim
from daskps.bench.clusters import places
from daskps.bench.jobs import LEARNING_RATE, StepJob, started, step, timed

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


@dataclass(frozen=True)
class _Loop:
    """What each trainer runs; returns seconds of a step."""

    job: StepJob
    steps: int

    def __call__(self, trainer: daskps.Trainer, part: Any) -> float:
        act = step(self.job, _Side(trainer, self.job), trainer.rank)
        return timed(act, self.steps)


@dataclass(frozen=True)
class _Ways:
    """Returns the ways from a trainer's process to the shards."""

    store: daskps.ParameterStore

    def __call__(self, trainer: daskps.Trainer, part: Any) -> list[str]:
        self.store.pull()
        return sorted(set(self.store.stats()["handle"]["ways"].values()))


@dataclass(frozen=True)
class Ours:
    """A store for one job, with a shard on each server."""

    store: daskps.ParameterStore
    job: StepJob

    def measure(self, steps: int) -> float:
        """Run so many steps in all trainers; return the seconds of one."""
        return float(max(self._run(_Loop(self.job, steps))))

    def ways(self) -> tuple[str, ...]:
        """Return the ways that trainers take to the shards."""
        found = self._run(_Ways(self.store))
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
