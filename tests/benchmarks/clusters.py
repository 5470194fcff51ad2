"""The clusters that are measured, and the settings they are measured with.

The one place where benchmarks change Dask's configuration.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import dask.config
from distributed import Client, LocalCluster

import daskps

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from contextlib import AbstractContextManager

#: Ways that the configuration can close: all but messages.
CARRIERS = ("process", "machine", "socket")


def closed(carriers: Collection[str]) -> AbstractContextManager[object]:
    """Close some of `CARRIERS` for a while, here and in workers started meanwhile."""
    return configured(
        {f"daskps.carriers.{way}": way not in carriers for way in CARRIERS}
    )


def configured(settings: dict[str, object]) -> AbstractContextManager[object]:
    """Change Dask's configuration for a while."""
    setting: AbstractContextManager[object] = dask.config.set(settings)
    return setting


def configure(settings: dict[str, object]) -> None:
    """Change Dask's configuration for good, in a worker that is measured."""
    configured(settings)


def started(workers: int, **options: Any) -> LocalCluster:
    """Start worker processes on loopback, of one thread and without a memory limit.

    Updates take one thread there, as those of other systems do.
    """
    return LocalCluster(
        n_workers=workers,
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
        **{"threads_per_worker": 1, "memory_limit": 0} | options,
    )


@contextmanager
def local(
    workers: int, *, close: Collection[str] = (), **options: Any
) -> Iterator[Client]:
    """Start such workers with some ways closed; give a client."""
    with (
        closed(close),
        started(workers, **options) as cluster,
        Client(cluster) as client,
    ):
        yield client


@contextmanager
def inside(workers: int, *, by_socket: bool = False) -> Iterator[LocalCluster]:
    """Start workers in this process that talk over TCP, as those of many machines do.

    All ways but messages are closed, or all but sockets and messages. So is Dask's
    profiler, which looks at all threads of the process a hundred times a second for
    each of its workers.
    """
    with (
        closed([way for way in CARRIERS if not (by_socket and way == "socket")]),
        configured({"distributed.worker.profile.enabled": False}),
        started(workers, processes=False, protocol="tcp") as cluster,
    ):
        yield cluster


def places(client: Client, trainers: int, servers: int) -> tuple[list[str], list[str]]:
    """Return the workers that train and those that hold the model.

    Trainers come first, as `daskps.run` places them; they are different workers where
    there are enough.
    """
    workers = list(client.nthreads())
    chosen = [workers[i % len(workers)] for i in range(trainers + servers)]
    return chosen[:trainers], chosen[trainers:]


def at(client: Client, worker: str, work: Callable[..., Any], *args: Any) -> Any:
    """Return what a task on a worker returns."""
    return client.submit(work, *args, workers=[worker], pure=False).result()


def at_once(
    client: Client, workers: Sequence[str], work: Callable[..., Any], *args: Any
) -> list[Any]:
    """Return what tasks return that run together, given their ranks last."""
    tasks = [
        client.submit(work, *args, rank, workers=[worker], pure=False)
        for rank, worker in enumerate(workers)
    ]
    found: list[Any] = client.gather(tasks)
    return found


def vector(n: int) -> dict[str, daskps.ArraySpec]:
    """Return the parameters of a model of so many float32."""
    return {"w": daskps.ArraySpec((n,), "float32")}
