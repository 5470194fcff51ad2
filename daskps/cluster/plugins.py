"""The hooks through which a scheduler gets its directory, and each worker its host.

The docstring of :mod:`daskps.cluster` has the words, and the path of a push.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin, WorkerPlugin

from daskps.cluster import upstream
from daskps.cluster.directory.directory import Directory
from daskps.cluster.host import (
    adoption,
    copies,
    cuts,
    installation,
    moving,
    owner_steps,
    questions,
    reductions,
    runs,
    saving,
    sockets,
    store_messages,
)
from daskps.cluster.host.host import ShardHost
from daskps.cluster.host.node import HOSTS, WorkerNode
from daskps.cluster.keys import OURS, is_ours, place_of_gradient
from daskps.cluster.machine import accounting
from daskps.cluster.machine.membership import HERE, Machine, memory_id
from daskps.cluster.protocol.handlers import HOST
from daskps.cluster.protocol.reports import MEMORY_METRIC
from daskps.cluster.seeing import prometheus
from daskps.cluster.seeing.numbers import HostReport
from daskps.cluster.seeing.overview import EXTENSION
from daskps.cluster.seeing.page import add_pages

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from distributed import Scheduler, Worker
    from distributed.scheduler import WorkerState


#: Modules that serve messages of a host: each registers its handlers with `HOST`.
SERVING = (
    adoption,
    copies,
    owner_steps,
    store_messages,
    cuts,
    installation,
    moving,
    questions,
    reductions,
    runs,
    saving,
)
#: How Dask begins to name the removals of workers that it retires.
_RETIRED = "retire-workers", "worker-close-gracefully"
_UNFINISHED = (Status.closing, Status.closed, Status.failed)


def _log_from_info_on(worker: Worker) -> None:
    """Let `client.forward_logging("daskps")` have more than warnings.

    Dask cannot forward records that no logger of a worker lets through. A level that
    somebody has set stays; so does the level in a process of the user's own.
    """
    ours = logging.getLogger("daskps")
    if ours.level == logging.NOTSET and not worker.address.startswith("inproc"):
        ours.setLevel(logging.INFO)


class HostPlugin(WorkerPlugin):
    """Gives a worker its host. Registering it again changes nothing.

    `cluster` is the scheduler's id, "" where that is not known where it is registered.
    `machine` is where the host shares memory with others.
    """

    name = "daskps-host"
    idempotent = True

    def __init__(self, cluster: str = "", machine: Machine = HERE) -> None:
        self._cluster, self._machine = cluster, machine
        self._report: HostReport | None = None

    def setup(self, worker: Worker) -> None:
        """Create the host unless this worker has one."""
        host = HOSTS.get(worker.address)
        if host is None or host.worker.server is not worker:
            host = ShardHost(WorkerNode(worker), HOST, self._machine)
            sockets.give_sockets(host)
            self._report = report = HostReport(host)
            upstream.add_metric(worker, "daskps", lambda _: report())
            prometheus.WORKERS.add(report)
            HOSTS[worker.address] = host
            accounting.begin_accounting(worker)
            upstream.add_metric(worker, MEMORY_METRIC, lambda _: memory_id())
            _log_from_info_on(worker)
            upstream.shorten_failures(OURS)
            quicken(worker)
        # Now, and not with its first shard: with its last member goes what is there,
        # also memory of a worker that has died and that this one could adopt.
        host.members(self._cluster)

    async def teardown(self, worker: Worker) -> None:
        """Close the host when the worker closes.

        Dask also tears a plugin down when one of the same name is added again, as
        happens after a preload; the shards must survive that.
        """
        host = HOSTS.get(worker.address)
        if host is None or worker.status not in _UNFINISHED:
            return
        try:
            await adoption.leave(host, "was closed")
        finally:
            del HOSTS[worker.address]
            if self._report is not None:
                prometheus.WORKERS.discard(self._report)


class DirectoryPlugin(SchedulerPlugin):
    """Gives a scheduler its directory. Registering it again changes nothing."""

    name = "daskps-directory"
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        """Make the directory, then give every worker, also later ones, its host."""
        if EXTENSION not in scheduler.extensions:
            keep = partial(HERE.keep, scheduler.id)
            scheduler.extensions[EXTENSION] = Directory(scheduler, keep)
            add_pages(scheduler)
            prometheus.SCHEDULERS.add(scheduler)
        self._directory: Directory = scheduler.extensions[EXTENSION]
        self._scheduler = scheduler
        await scheduler.register_worker_plugin(
            None,
            upstream.dumps(HostPlugin(scheduler.id)),
            name=HostPlugin.name,
            idempotent=True,
        )

    async def close(self) -> None:
        """Stop with the scheduler."""
        self._directory.close()
        prometheus.SCHEDULERS.discard(self._scheduler)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Hear of a worker that came."""
        self._directory.worker_came(worker)

    def remove_worker(
        self, scheduler: Scheduler, worker: str, *, stimulus_id: str = "", **kwargs: Any
    ) -> Awaitable[None] | None:
        """Hear of a worker that left.

        Dask waits for one that it retires until it has sent its shards to others.
        """
        upstream.let_run_anywhere(
            scheduler, filter(is_ours, upstream.unrunnable(scheduler))
        )
        is_retired = stimulus_id.startswith(_RETIRED)
        left = self._directory.worker_left
        sent = left(worker, "died or was removed", is_retired=is_retired)
        return asyncio.shield(sent) if is_retired and sent else None

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Hear of a client that left."""
        self._directory.client_left(client)

    def transition(
        self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any
    ) -> None:
        """Hear of a task that is forgotten or has no worker, and where gradients are."""
        if finish == "no-worker" and is_ours(key):
            upstream.let_run_anywhere(self._scheduler, [key])
        elif finish == "forgotten":
            self._directory.task_forgotten(key)
        elif (
            finish == "memory"
            and "worker" in kwargs
            and (place := place_of_gradient(key))
        ):
            self._directory.trainers.note_contribution(place[0], kwargs["worker"])

    def restart(self, scheduler: Scheduler) -> None:
        """Hear of `client.restart`."""
        self._directory.restarted()

    def valid_workers_downscaling(
        self, scheduler: Scheduler, workers: list[WorkerState]
    ) -> list[WorkerState]:
        """Have Dask close workers only where others have room for their shards."""
        return self._directory.drains.may_close(workers)


def quicken(worker: Worker) -> None:
    """End this process quickly, if it is a worker's own.

    The interpreter ends by looking for cycles among all objects, several times over.
    With the compiler of the update loops loaded that takes twice as long as without, in
    all processes of the machine at once when a cluster is closed; Dask's nannies give
    them 4 s and then kill them, which it says in red.

    Parameters
    ----------
    worker : Worker
        It has a nanny where a process was made for it alone.
    """
    if worker.nanny:
        atexit.unregister(settle)
        atexit.register(settle)


def settle() -> None:
    """Look for cycles once more, and from here on leave alone what is in use.

    Python finalizes objects that nobody holds as ever, and those held without cycles.
    """
    gc.collect()
    gc.freeze()
