"""The ways from this process to the shards of one store, the nearest first.

The first way is in the process, if the host lives here. The second is on the machine,
if this process can map the shard's memory, and if Dask would charge no worker of this
process for it: the proof is to open the memory and to find there the bytes that its
owner has written, not the name of a machine. All other shards get frames over a socket
(`socket_carrier`) or, at last, a message, which `remote` sends.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from daskps import config
from daskps.cluster.caller.mapped import MappedShards
from daskps.cluster.host.node import HOSTS
from daskps.cluster.machine import accounting
from daskps.cluster.machine.folder import CarrierClosed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskps.cluster.caller.link import Link
    from daskps.cluster.caller.shard_map import RunMembership, StoreMap
    from daskps.cluster.host.hosted import HostedShard, ReachableShards

logger = logging.getLogger(__name__)


class Carriers:
    """How one process reaches the hosts of a store.

    Parameters
    ----------
    link : Link
        The way to the cluster.
    meta : StoreMap
        The store.
    joined : RunMembership, optional
        The run whose trainer calls.
    rank : int
        Its number in the run.
    bsp : bool
        Whether the run has rounds.
    """

    def __init__(
        self,
        link: Link,
        meta: StoreMap,
        joined: RunMembership | None,
        *,
        rank: int = -1,
        bsp: bool = False,
    ) -> None:
        settings = config.load()
        self.rank, self.bsp = rank, bsp
        self._link, self._meta, self._joined = link, meta, joined
        self._in_process = settings.process_carrier and meta.copies == 1
        self._on_machine = settings.machine_carrier and meta.copies == 1
        self._mapped: dict[str, MappedShards | None] = {}
        #: By worker the reason why its shards cannot be mapped.
        self._closed: dict[str, str] = {}
        #: Where the shards were when these were mapped.
        self._where = meta.where
        self._lock = threading.Lock()

    @property
    def run(self) -> int:
        """The run whose trainer calls, 0 for none."""
        return 0 if self._joined is None else self._joined.run

    def moved(self, located: Mapping[str, Any]) -> None:
        """Take over the directory's word where the shards and the mailboxes are now."""
        with self._lock:
            # First: shards are mapped anew with the shards' new owners.
            if self._joined is not None:
                self._joined = self._joined.at(located["mailboxes"])
            self._meta.update(located)

    def is_local(self, worker: str) -> bool:
        """Return whether a host lives in this process and may be called."""
        return self._in_process and worker in HOSTS

    def serving(self, worker: str, *, by_owner: bool = False) -> ReachableShards | None:
        """Return the object that serves a worker's shards in this process, if any.

        With `by_owner` only their owner counts.
        """
        if self.is_local(worker):
            host: ReachableShards = HOSTS[worker]
            return host
        return None if by_owner else self._mapped_of(worker)

    def find_shard(
        self, shard: int, *, by_owner: bool = False
    ) -> tuple[ReachableShards, HostedShard] | None:
        """Return a shard and the object that serves it in this process, if any."""
        serving = self.serving(self._meta.owners[shard], by_owner=by_owner)
        hosted = serving and serving.shards.get((self._meta.uid, shard))
        return (serving, hosted) if serving and hosted else None

    def is_gone(self, worker: str) -> bool:
        """Return whether a worker of this machine is known to be dead."""
        mapped = self._mapped.get(worker)
        return mapped is not None and not mapped.is_live()

    def names(self, on_loop: bool) -> dict[str, str]:
        """Return how calls reach each host: "process", "machine" or "message".

        On an event loop only hosts on the same loop are called directly.
        """
        return {worker: self._name(worker, on_loop) for worker in self._meta.hosts}

    def _name(self, worker: str, on_loop: bool) -> str:
        if self.is_local(worker):
            same = HOSTS[worker].worker.loop is self._link.loop
            return "process" if same or not on_loop else "message"
        return "message" if on_loop or self._mapped_of(worker) is None else "machine"

    def reasons(self, on_loop: bool) -> dict[str, str]:
        """Return by worker why messages, or sockets, are the way to its host."""
        names = self.names(on_loop)
        remote = [worker for worker, name in names.items() if name == "message"]
        return {worker: self._reason(worker, on_loop) for worker in remote}

    def _reason(self, worker: str, on_loop: bool) -> str:
        if on_loop:
            return "calls come from an event loop, which must not wait for locks"
        if self._meta.copies > 1:
            return "a store with two copies is read and changed by its owners alone"
        if not self._on_machine:
            return "daskps.carriers.machine is false"
        charge = accounting.charged()
        if charge is not None:
            return f"Dask would count its memory as this worker's own: {charge.why}"
        return self._closed.get(worker, "its memory was not mapped yet")

    def close(self) -> None:
        """Let go of other workers' memory; another call would map it again."""
        with self._lock:
            for mapped in self._mapped.values():
                if mapped is not None:
                    mapped.close()
            self._mapped.clear()

    def _mapped_of(self, worker: str) -> MappedShards | None:
        if not self._on_machine:
            return None
        # Asked without the lock, which the event loop that brings a nanny's answer may
        # want. Asked again with each call: a nanny that was late may have answered.
        if worker not in self._mapped and not accounting.may_map():
            return None
        with self._lock:
            if self._where is not self._meta.where:
                # Owners have changed, and the names of their memory with them.
                self._where = self._meta.where
                self._mapped.clear()
            if worker not in self._mapped:
                self._mapped[worker] = self._open(worker)
            mapped = self._mapped[worker]
            if mapped is not None and mapped.is_closed:
                # Its shards were freed or have moved; a mapping would keep the memory.
                mapped = self._mapped[worker] = None
                self._closed[worker] = "its shards were freed, or have moved"
        return mapped

    def _open(self, worker: str) -> MappedShards | None:
        try:
            return MappedShards(
                self._meta, worker, self._joined, machine=self._link.machine
            )
        except CarrierClosed as reason:
            self._closed[worker] = str(reason)
            logger.debug(
                "store %r: no way on the machine to %s: %s",
                self._meta.name,
                worker,
                reason,
            )
            return None
