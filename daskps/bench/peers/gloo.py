"""torch.distributed with gloo: an allreduce over TCP on loopback, without servers."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from daskps.bench.peers import Peer, gang, lacking
from daskps.bench.peers.allreduce import covers, everyone

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from daskps.bench.jobs import Measure
    from daskps.typing import Array


def opened(trainers: int, servers: int, client: Any) -> AbstractContextManager[Measure]:
    """Start the trainers."""
    return gang.launched("gloo", trainers, environment={"GLOO_SOCKET_IFNAME": "lo"})


PEER = Peer("torch gloo allreduce", opened, partial(lacking, "torch"), covers)


@contextmanager
def joined(place: gang.Place) -> Iterator[Measure]:
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
        yield everyone(place.rank, place.trainers, sum_up)
    finally:
        distributed.destroy_process_group()
