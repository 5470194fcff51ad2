"""What systems without servers share: all sum up, then each applies the mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from daskps.bench.jobs import started, step, timed
from daskps.bench.peers import PeerError
from daskps.bench.peers.limit import sgd

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.bench.jobs import StepJob
    from daskps.typing import Array


def covers(job: StepJob) -> bool:
    """Tell whether it does a job: rounds of two and more."""
    return job.kind in ("round", "train") and job.trainers > 1


@dataclass(frozen=True)
class Everyone:
    """One of the processes.

    Parameters
    ----------
    rank, size : int
        Which of how many.
    sum_up : callable
        Replaces a gradient by the sum of all.
    """

    rank: int
    size: int
    sum_up: Callable[[Array], object]

    def run(self, job: StepJob, steps: int) -> float:
        """Run so many steps; return the seconds of one."""
        side = _Side(job, self)
        act = step(job, side, self.rank)
        self.sum_up(started(1))  # all are ready
        return timed(act, steps)


class _Side:
    def __init__(self, job: StepJob, everyone: Everyone) -> None:
        self._sum_up, self._learns = everyone.sum_up, job.kind == "train"
        self._apply = sgd(1 / everyone.size)
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
