"""Rounds of trainers that are all in this process, measured and counted."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import daskps
from tests.benchmarks import counting
from tests.benchmarks.counting import counters_of
from tests.benchmarks.model import PER_FRAMES_NBYTES
from tests.benchmarks.samples import seconds

if TYPE_CHECKING:
    from collections import Counter

    from distributed import Scheduler

    from daskps.typing import Array
    from tests.benchmarks.model import StoreShape

#: Steps before those that are measured; by sockets, which are opened meanwhile.
WARM, WARM_SOCKETS = 2, 30

#: The scheduler's counts: "now", and what rank 0 took "before" and "after" its steps.
_COUNTS: dict[str, Counter[Any]] = {}


def _loop(
    shape: StoreShape, steps: int, trainer: daskps.Trainer, part: Any
) -> tuple[tuple[float, float], Array]:
    """Return seconds and CPU seconds of a step of a trainer.

    And what the steps have added to the trainer's counters: messages, calls by sockets,
    bytes of their arrays.
    """
    counters = counters_of(trainer)

    def counted() -> Array:
        found = counters.messages, counters.socket_calls, counters.socket_nbytes
        return np.array(found)

    grads = {"w": np.full(shape.elements, 1e-3, np.float32)}
    pushpull = partial(trainer.pushpull, grads, out=trainer.pull())
    for _ in range(WARM_SOCKETS if shape.by_socket else WARM):
        pushpull()
    before = counted()
    if trainer.rank == 0:
        _COUNTS["before"] = _COUNTS["now"].copy()
    used = time.process_time()
    took = seconds(pushpull, steps)
    used = time.process_time() - used
    if trainer.rank == 0:
        _COUNTS["after"] = _COUNTS["now"].copy()
    return (took, used / steps), counted() - before


@dataclass(frozen=True)
class Sample:
    """One run of resident trainers."""

    shape: StoreShape
    #: That were measured.
    steps: int
    #: Of one round: on the clock, and of all threads of this process.
    seconds: float
    cpu: float
    #: Counted from the first pull to the last step; by sockets, of those measured.
    requests: int
    replies: int
    nbytes: int
    #: Messages to the directory during the measured steps, by method.
    asked: dict[str, int]
    #: What the scheduler heard of tasks meanwhile.
    events: int

    @property
    def is_exact(self) -> bool:
        """Whether all messages and bytes are those of the model."""
        clocks = [None, *range(WARM + self.steps)]
        if self.shape.by_socket:
            clocks = [*range(self.steps)]
        messages = self.shape.messages * len(clocks)
        expected = (messages, messages, self.shape.nbytes(clocks))
        return expected == (self.requests, self.replies, self.nbytes)


def resident(
    server: Scheduler, store: daskps.ParameterStore, shape: StoreShape, steps: int
) -> Sample:
    """Run so many steps of resident trainers, and count.

    The scheduler and its workers are in this process; the store has a shard on each
    host.
    """
    loop, ranks = partial(_loop, shape, steps), list(range(shape.trainers))
    with counting.wire() as wire, counting.scheduler(server) as counts:
        _COUNTS["now"] = counts
        found = daskps.run(store, loop, ranks, callbacks=())
    during = _COUNTS["after"] - _COUNTS["before"]
    took, cpu = np.array([times for times, _ in found]).max(axis=0).tolist()
    asked = {key[1]: n for key, n in during.items() if type(key) is tuple}
    sent = wire["requests"], wire["replies"], wire["nbytes"]
    if shape.by_socket:
        messages, calls, nbytes = np.sum(
            [counts for _, counts in found], axis=0
        ).tolist()
        sent = calls + messages, calls, calls * PER_FRAMES_NBYTES + nbytes
    return Sample(shape, steps, took, cpu, *sent, asked, during["events"])


@dataclass(frozen=True)
class Point:
    """The samples of one shape, and their medians."""

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
