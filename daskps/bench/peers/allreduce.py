"""What systems without servers share: all sum up, then each applies the mean.

A round is the allreduce alone; in training each process then applies the mean.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from daskps.bench.jobs import started
from daskps.bench.peers import PeerError, gang
from daskps.bench.peers.limit import sgd

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.bench.jobs import Measure, StepJob
    from daskps.typing import Array


def covers(job: StepJob) -> bool:
    """Tell whether it does a job: rounds of two and more."""
    return job.kind in ("round", "train") and job.trainers > 1


def everyone(rank: int, size: int, sum_up: Callable[[Array], object]) -> Measure:
    """Return what one process of so many runs; `sum_up` makes a gradient the sum of all."""

    def run(job: StepJob, steps: int) -> float:
        side = _Side(job, size, sum_up)
        return gang.measured(
            job, side, rank, steps, barrier=partial(sum_up, started(1))
        )

    return run


class _Side:
    def __init__(
        self, job: StepJob, size: int, sum_up: Callable[[Array], object]
    ) -> None:
        self._sum_up, self._learns = sum_up, job.kind == "train"
        self._apply = sgd(1 / size)
        self.weights, self.gradient = started(job.elements), started(job.elements)

    def pull(self) -> None:
        # `covers` names no job that pulls or pushes.
        raise PeerError("in an allreduce nobody holds the weights for others")

    push = pull

    def round(self) -> None:
        if not self._learns:
            self.gradient[0] = 1e-3  # else the sums of sums overflow
        self._sum_up(self.gradient)
        if self._learns:
            self._apply(self.weights, self.gradient)
