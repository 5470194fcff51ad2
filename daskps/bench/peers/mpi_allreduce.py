"""MPI through mpi4py: an allreduce of the gradients, without servers.

A round is the allreduce alone; in training each process then applies the mean.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from daskps.bench.peers import mpi
from daskps.bench.peers.allreduce import Everyone, covers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from daskps.bench.jobs import Measure
    from daskps.bench.peers import gang
    from daskps.typing import Array

__all__ = ["TITLE", "available", "covers", "joined", "opened"]

TITLE = "MPI allreduce"
available = mpi.available


def opened(trainers: int, servers: int, client: Any) -> AbstractContextManager[Measure]:
    """Start the trainers."""
    return mpi.launched("mpi_allreduce", trainers)


@contextmanager
def joined(place: gang.Place) -> Iterator[Measure]:
    """Do the jobs of one rank."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def sum_up(gradient: Array) -> None:
        world.Allreduce(MPI.IN_PLACE, gradient)

    yield Everyone(world.Get_rank(), place.trainers, sum_up).run
