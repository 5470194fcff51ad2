"""The hook through which a scheduler gets its directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed.diagnostics.plugin import SchedulerPlugin

from daskps.cluster.directory import Directory
from daskps.cluster.entry import is_gradient
from daskps.cluster.host import HostPlugin
from daskps.cluster.upstream import dumps

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import WorkerState

EXTENSION = "daskps-directory"


class DirectoryPlugin(SchedulerPlugin):
    """Gives a scheduler its directory. Registering it again changes nothing."""

    name = "daskps-directory"
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        """Make the directory, then give every worker, also later ones, its host."""
        if EXTENSION not in scheduler.extensions:
            scheduler.extensions[EXTENSION] = Directory(scheduler)
        self._directory: Directory = scheduler.extensions[EXTENSION]
        await scheduler.register_worker_plugin(
            None,
            dumps(HostPlugin(scheduler.id)),
            name=HostPlugin.name,
            idempotent=True,
        )

    async def close(self) -> None:
        """Stop with the scheduler."""
        self._directory.hosts.close()

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Hear of a worker that came."""
        self._directory.adoptions.came()
        self._directory.readiness.came(worker)
        self._directory.litter.came(worker)
        self._directory.cores.changed(worker)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Hear of a worker that left."""
        self._directory.worker_left(worker, "died or was removed")

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Hear of a client that left."""
        self._directory.client_left(client)

    def transition(
        self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any
    ) -> None:
        """Hear of a task that is forgotten, and where gradients are computed."""
        if finish == "forgotten":
            self._directory.task_forgotten(key)
        elif finish == "memory" and is_gradient(key) and "worker" in kwargs:
            self._directory.runs.contributed(key[1], kwargs["worker"])

    def restart(self, scheduler: Scheduler) -> None:
        """Hear of `client.restart`."""
        self._directory.restarted()

    def valid_workers_downscaling(
        self, scheduler: Scheduler, workers: list[WorkerState]
    ) -> list[WorkerState]:
        """Keep workers that hold shards: until shards can move, they must stay."""
        busy = self._directory.busy_workers()
        return [ws for ws in workers if ws.address not in busy]
