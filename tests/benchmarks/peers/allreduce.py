"""Systems without servers: all processes sum up, by MPI or by torch's gloo.

A round is the allreduce of the gradients alone; in training each process then applies
the mean. Both go over loopback: gloo by TCP, MPI through shared memory.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.benchmarks.jobs import started
from tests.benchmarks.peers import Peer, PeerError, gang, lacking, mpi
from tests.benchmarks.peers.limit import sgd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from daskps.typing import Array
    from tests.benchmarks.jobs import Measure, StepJob


def covers(job: StepJob) -> bool:
    """Tell whether it does a job: rounds of two and more."""
    return job.kind in ("round", "train") and job.trainers > 1


def _gloo(trainers: int, *_: Any) -> AbstractContextManager[Measure]:
    environment = {"GLOO_SOCKET_IFNAME": "lo"}
    return gang.launched("allreduce:by_gloo", trainers, environment=environment)


GLOO = Peer("torch gloo allreduce", _gloo, partial(lacking, "torch"), covers)
MPI = Peer(
    "MPI allreduce",
    lambda n, *_: mpi.launched("allreduce:by_mpi", n),
    mpi.missing,
    covers,
)
MPI_TCP = Peer(
    "MPI allreduce, TCP",
    lambda n, *_: mpi.launched("allreduce:by_mpi", n, tcp=True),
    mpi.missing,
    covers,
)


@contextmanager
def by_mpi(place: gang.Place) -> Iterator[Measure]:
    """Do the jobs of one rank."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def sum_up(gradient: Array) -> None:
        world.Allreduce(MPI.IN_PLACE, gradient)

    yield partial(_run, replace(place, rank=world.Get_rank()), sum_up)


@contextmanager
def by_gloo(place: gang.Place) -> Iterator[Measure]:
    """Do the jobs of one process."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=(place.folder / "gloo").as_uri(),
        rank=place.rank,
        world_size=place.trainers,
    )

    def sum_up(gradient: Array) -> None:
        distributed.all_reduce(torch.from_numpy(gradient))

    try:
        yield partial(_run, place, sum_up)
    finally:
        distributed.destroy_process_group()


def _run(
    place: gang.Place, sum_up: Callable[[Array], object], job: StepJob, steps: int
) -> float:
    side, ready = _Side(job, place.trainers, sum_up), partial(sum_up, started(1))
    return gang.measured(job, side, place.rank, steps, barrier=ready)


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
