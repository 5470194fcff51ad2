"""MPI through mpi4py: an allreduce of the gradients, without servers."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from daskps.bench.peers import Peer, mpi
from daskps.bench.peers.allreduce import covers, everyone

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from daskps.bench.jobs import Measure
    from daskps.bench.peers import gang
    from daskps.typing import Array


def opened(trainers: int, servers: int, client: Any) -> AbstractContextManager[Measure]:
    """Start the trainers."""
    return mpi.launched("mpi_allreduce", trainers)


PEER = Peer("MPI allreduce", opened, mpi.missing, covers)


@contextmanager
def joined(place: gang.Place) -> Iterator[Measure]:
    """Do the jobs of one rank."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def sum_up(gradient: Array) -> None:
        world.Allreduce(MPI.IN_PLACE, gradient)

    yield everyone(world.Get_rank(), place.trainers, sum_up)
