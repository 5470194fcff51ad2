"""Rounds of trainers that are all in this process, measured and counted."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import daskps
from daskps.bench import counting
from daskps.bench.pairs import seconds

if TYPE_CHECKING:
    from distributed import Scheduler

    from daskps.bench.model import StoreShape

#: Steps before those that are measured.
WARM = 2
#: Rounds of a run in the task graph.
GRAPH_ROUNDS = 32

#: The scheduler's counts, which rank 0 takes before and after its steps.
_COUNTS: dict[str, counting.SchedulerCounts] = {}


@dataclass(frozen=True)
class _Loop:
    """What each trainer runs; returns seconds and CPU seconds of a step."""

    elements: int
    steps: int

    def __call__(self, trainer: daskps.Trainer, part: Any) -> tuple[float, float]:
        grads = {"w": np.full(self.elements, 1e-3, np.float32)}
        out = trainer.pull()
        for _ in range(WARM):
            trainer.pushpull(grads, out=out)
        self._note(trainer, "before")
        began, used = time.perf_counter(), time.process_time()
        for _ in range(self.steps):
            trainer.pushpull(grads, out=out)
        used, took = time.process_time() - used, time.perf_counter() - began
        self._note(trainer, "after")
        return took / self.steps, used / self.steps

    def _note(self, trainer: daskps.Trainer, when: str) -> None:
        if trainer.rank == 0:
            _COUNTS[when] = _COUNTS["now"].since(counting.SchedulerCounts())


@dataclass(frozen=True)
class Sample:
    """One run of resident trainers."""

    shape: StoreShape
    #: That were measured.
    steps: int
    #: Of one round: on the clock, and of all threads of this process.
    seconds: float
    cpu: float
    #: Counted from the first pull to the last step.
    requests: int
    replies: int
    nbytes: int
    #: Messages to the directory during the measured steps, by method.
    asked: dict[str, int]
    #: What the scheduler heard of tasks meanwhile.
    events: int

    @property
    def expected(self) -> tuple[int, int, int]:
        """Requests, replies and bytes that the model gives."""
        clocks = [None, *range(WARM + self.steps)]
        messages = self.shape.messages * len(clocks)
        return messages, messages, self.shape.nbytes(clocks)

    @property
    def is_exact(self) -> bool:
        """Whether all messages and bytes are those of the model."""
        return self.expected == (self.requests, self.replies, self.nbytes)


def resident(
    server: Scheduler, store: daskps.ParameterStore, shape: StoreShape, steps: int
) -> Sample:
    """Run so many steps of resident trainers, and count.

    The scheduler and its workers are in this process; the store has a shard on each host.
    """
    loop, ranks = _Loop(shape.elements, steps), list(range(shape.trainers))
    with counting.wire() as wire, counting.scheduler(server) as counts:
        _COUNTS["now"] = counts
        times = daskps.run(store, loop, ranks, callbacks=())
    during = _COUNTS["after"].since(_COUNTS["before"])
    took, cpu = np.array(times).max(axis=0).tolist()
    return Sample(
        shape=shape,
        steps=steps,
        seconds=took,
        cpu=cpu,
        requests=wire.requests,
        replies=wire.replies,
        nbytes=wire.nbytes,
        asked=dict(during.directory),
        events=during.events,
    )


@dataclass(frozen=True)
class GraphSample:
    """One run of the task graph: seconds and the scheduler's work of a round."""

    shape: StoreShape
    seconds: float
    scheduler: float
    events: float
    tasks: float


def _ones(params: Any, X: Any, y: Any) -> Any:
    return {"w": np.full_like(params["w"], 1e-3)}


def graph(
    server: Scheduler, store: daskps.ParameterStore, shape: StoreShape
) -> GraphSample:
    """Run rounds in the task graph, and count what the scheduler does."""
    X = np.zeros((GRAPH_ROUNDS * shape.trainers, 1))
    options: dict[str, Any] = {
        "batch_size": 1,
        "trainers": shape.trainers,
        "execution": "graph",
        "callbacks": (),
    }
    daskps.train(store, _ones, X[: shape.trainers], **options)
    with counting.scheduler(server) as counts:
        took = seconds(lambda: daskps.train(store, _ones, X, **options))
    found = (
        np.array([took, counts.seconds, counts.events, counts.finished]) / GRAPH_ROUNDS
    )
    return GraphSample(shape, *map(float, found))


@dataclass(frozen=True)
class Point:
    """What was measured of one shape: medians of its samples."""

    shape: StoreShape
    samples: tuple[Sample, ...]

    @property
    def seconds(self) -> float:
        """Median seconds of a round."""
        return statistics.median(s.seconds for s in self.samples)

    @property
    def cpu(self) -> float:
        """Median CPU seconds of a round."""
        return statistics.median(s.cpu for s in self.samples)

    @property
    def is_exact(self) -> bool:
        """Whether every sample had the messages and bytes of the model."""
        return all(s.is_exact for s in self.samples)
