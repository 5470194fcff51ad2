"""The cluster that is measured: workers on loopback, or the user's own.

The one place where ways to a shard are closed.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distributed import Client, LocalCluster

from daskps import config

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

#: Ways that the configuration can close.
WAYS = ("process", "machine")


@contextmanager
def closed(ways: Collection[str]) -> Iterator[None]:
    """Close ways, here and in workers that are started meanwhile.

    Parameters
    ----------
    ways : collection of str
        Some of `WAYS`.

    Yields
    ------
    None
        The configuration is put back afterwards.
    """
    with config.open_ways(**{way: way not in ways for way in WAYS}):
        yield


@contextmanager
def local(
    workers: int, *, close: Collection[str] = (), threads: int = 1
) -> Iterator[Client]:
    """Start worker processes on loopback, without a memory limit.

    Updates take one thread there, as those of other systems do.

    Parameters
    ----------
    workers : int
        How many.
    close : collection of str
        Ways that are closed.
    threads : int
        Of each worker.

    Yields
    ------
    Client
        Closed with its cluster afterwards.
    """
    with (
        closed(close),
        LocalCluster(
            n_workers=workers,
            threads_per_worker=threads,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            memory_limit=0,
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


@contextmanager
def inside(workers: int) -> Iterator[LocalCluster]:
    """Start workers in this process that talk over TCP, as those of many machines do.

    All ways but messages are closed. So is Dask's profiler, which looks at all threads
    of the process a hundred times a second for each of its workers.

    Parameters
    ----------
    workers : int
        How many.

    Yields
    ------
    LocalCluster
        With its scheduler in this process, too; closed afterwards.
    """
    with (
        closed(WAYS),
        config.no_profiles(),
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=False,
            protocol="tcp",
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            memory_limit=0,
        ) as cluster,
    ):
        yield cluster


@contextmanager
def theirs(address: str) -> Iterator[Client]:
    """Connect to the user's own cluster.

    Parameters
    ----------
    address : str
        Of its scheduler.

    Yields
    ------
    Client
        Closed afterwards; the cluster stays.
    """
    with Client(address) as client:
        yield client


@dataclass(frozen=True)
class Places:
    """Addresses of the workers that train and of those that hold the model."""

    trainers: list[str]
    servers: list[str]


def places(client: Client, trainers: int, servers: int) -> Places:
    """Return who does what: trainers first, as `daskps.run` places them.

    Parameters
    ----------
    client : Client
        Of the cluster.
    trainers, servers : int
        How many.

    Returns
    -------
    Places
        Different workers where there are enough.
    """
    workers = list(client.nthreads())
    chosen = [workers[i % len(workers)] for i in range(trainers + servers)]
    return Places(chosen[:trainers], chosen[trainers:])
