"""Update loops ready in time, where a shard may be adopted: on its machine.

A worker that never ran the rules of a store takes seconds to load their loops, which
callers of an adopted shard would wait for. So the directory asks workers beforehand:
those of the owners' machines when a store is made, and each that comes later.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from distributed.comm.addressing import get_address_host

from daskps.cluster.directory.entry import insist
from daskps.errors import DaskPSError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distributed import Scheduler

    from daskps.cluster.directory.entry import Hosts, StoreEntry

logger = logging.getLogger(__name__)
#: A worker that has just come gets its host in a moment: how often it is asked, and
#: the time in between.
_MOST_TRIES = 20
PAUSE_SECONDS = 0.25


class Readiness:
    """Asks workers to load the loops of shards that they may come to adopt.

    Parameters
    ----------
    scheduler : Scheduler
        Knows the workers.
    hosts : Hosts
        The way to them.
    stores : mapping of str to StoreEntry
        All stores.
    """

    def __init__(
        self, scheduler: Scheduler, hosts: Hosts, stores: Mapping[str, StoreEntry]
    ) -> None:
        self._scheduler, self._hosts, self._stores = scheduler, hosts, stores

    def store_made(self, entry: StoreEntry) -> None:
        """Ask the workers of a new store's machines that have no shard of it."""
        machines, owners = _machines(entry), set(entry.owners)
        for worker in self._scheduler.workers:
            if worker not in owners and get_address_host(worker) in machines:
                self._hosts.spawn(self._ask(worker, entry))

    def worker_came(self, worker: str) -> None:
        """Ask a worker that came, for all stores of its machine."""
        for entry in self._stores.values():
            if entry.ready and get_address_host(worker) in _machines(entry):
                self._hosts.spawn(self._ask(worker, entry))

    async def _ask(self, worker: str, entry: StoreEntry) -> None:
        if self._stores.get(entry.uid) is not entry:
            return
        about: Any = {"layout": entry.layout, "rules": entry.rules}
        about |= {"on": ProtocolError, "tries": _MOST_TRIES}
        try:
            await insist(self._hosts, worker, "warm", PAUSE_SECONDS, **about)
        except (DaskPSError, OSError, ValueError, TypeError) as error:
            # It would be told again by the error of its adoption.
            logger.debug("daskps: %s is not made ready: %r", worker, error)


def _machines(entry: StoreEntry) -> set[str]:
    """Return the machines whose workers can have shards of a store."""
    return set(map(get_address_host, {entry.owners[row[0]] for row in entry.segments}))
