"""torch.distributed with gloo: an allreduce over TCP on loopback, without servers.

A round is the allreduce alone; in training each process then applies the mean.
"""

from __future__ import annotations

import importlib.util
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from daskps.bench.peers import gang
from daskps.bench.peers.allreduce import Everyone, covers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from daskps.bench.jobs import Measure
    from daskps.typing import Array

__all__ = ["TITLE", "available", "covers", "joined", "opened"]

TITLE = "torch gloo allreduce"


def available() -> str | None:
    """Return why torch cannot be used here."""
    missing = importlib.util.find_spec("torch") is None
    return "torch is not installed" if missing else None


def opened(trainers: int, servers: int, client: Any) -> AbstractContextManager[Measure]:
    """Start the trainers."""
    return gang.started("gloo", trainers, environment={"GLOO_SOCKET_IFNAME": "lo"})


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
        yield Everyone(place.rank, place.trainers, sum_up).run
    finally:
        distributed.destroy_process_group()
