"""Which peers are there, and each job against each of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from tests.benchmarks import sides
from tests.benchmarks.pairs import Comparison, alternate, steps_in
from tests.benchmarks.peers import (
    Peer,
    PeerError,
    actors,
    allreduce,
    dask,
    limit,
    mpi,
    ray,
    redis,
    torch_rpc,
)

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Collection, Iterator, Sequence

    from distributed import Client

    from tests.benchmarks.jobs import Measure, StepJob
    from tests.benchmarks.pairs import Samples

#: By name, in the order of reports.
PEERS = {
    "limit": limit.PEER,
    "mpi": mpi.PEER,
    "mpi_allreduce": allreduce.MPI,
    "gloo": allreduce.GLOO,
    "torch_rpc": torch_rpc.PEER,
    "redis": redis.PEER,
    "ray": ray.PEER,
    "actors": actors.PEER,
    "dask": dask.PEER,
}
#: Those that run on the cluster itself, so also on a user's.
ON_DASK = ("actors", "dask")


@dataclass
class Field:
    """The peers of one run, and why others are not among them."""

    peers: dict[str, Peer] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def compare(
        self, client: Client, jobs: Sequence[StepJob], options: Namespace
    ) -> Iterator[Comparison]:
        """Set ours against every peer, one peer at a time; a peer that fails is missing."""
        shapes = dict.fromkeys((job.trainers, job.servers) for job in jobs)
        for shape in shapes:
            these = [job for job in jobs if (job.trainers, job.servers) == shape]
            for name, peer in list(self.peers.items()):
                covered = [job for job in these if peer.covers(job)]
                if not covered:
                    continue
                try:
                    with peer.opened(*shape, client) as measure:
                        for job in covered:
                            found, ways = _alternated(client, job, measure, options)
                            rate = job.kind == "train"
                            yield Comparison(job.title, peer.title, *found, ways, rate)
                except PeerError as error:
                    self.missing[name] = str(error)
                    del self.peers[name]


def _alternated(
    client: Client, job: StepJob, measure: Measure, options: Namespace
) -> tuple[Samples, tuple[str, ...]]:
    """Return `options.pairs` samples of about so many seconds, and our ways."""
    with sides.opened(client, job) as ours:
        our_steps = steps_in(options.seconds, ours.measure)
        their_steps = steps_in(options.seconds, lambda n: measure(job, n))
        found = alternate(
            partial(ours.measure, our_steps),
            partial(measure, job, their_steps),
            options.pairs,
        )
        return found, ours.ways()


def chosen(names: Collection[str] | None, *, on_dask: bool = False) -> Field:
    """Return the peers that can be measured here, of those named or of all.

    On a cluster of the user's these are those that run on it only.
    """
    found = Field()
    for name in ON_DASK if on_dask else PEERS:
        if names is not None and name not in names:
            continue
        if reason := PEERS[name].missing():
            found.missing[name] = reason
        else:
            found.peers[name] = PEERS[name]
    return found
