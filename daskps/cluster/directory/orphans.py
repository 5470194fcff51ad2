"""Memory that workers left when they died and that no store names.

Most of it is adopted, or removed by who frees a store. But a worker may be killed
before it hears that its shards are freed, and no owner of a shard knows of them then.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from distributed.comm.addressing import get_address_host

from daskps.errors import DaskPSError

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Scheduler

    from daskps.cluster.directory.entry import Hosts

logger = logging.getLogger(__name__)
#: Between two tries.
PAUSE_SECONDS = 0.5
#: Tries until the next worker comes or goes.
_MOST_TRIES = 120
#: How long a worker may take to answer.
_ANSWER_SECONDS = 15.0


class Orphans:
    """Memory that dead workers left on their machines, until a worker there removes it.

    Parameters
    ----------
    scheduler : Scheduler
        Knows the workers.
    hosts : Hosts
        The way to them.
    named : callable
        Returns the names of all blocks that stores or runs still need, and rows of
        shard, name, bytes and nonce of those that may have got another name, as
        without an owner; None while some are not known, as those of a store that is
        being made.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        hosts: Hosts,
        named: Callable[[], tuple[set[str], list[Any]] | None],
    ) -> None:
        self._scheduler, self._hosts, self._named = scheduler, hosts, named
        #: Machines by address: those to look at, and those where somebody does.
        self._due: set[str] = set()
        self._looking: set[str] = set()

    def worker_left(self, worker: str) -> None:
        """Look at the machine of a worker that left."""
        self._due.add(get_address_host(worker))
        self.worker_came(worker)

    def worker_came(self, worker: str) -> None:
        """Look at the machine of a new worker, if nobody was there to do it."""
        machine = get_address_host(worker)
        if machine in self._due - self._looking:
            self._looking.add(machine)
            self._hosts.spawn(self._look(machine))

    async def _look(self, machine: str) -> None:
        try:
            for turn in range(_MOST_TRIES):
                near = self._near(machine)
                if not near or machine not in self._due:
                    return
                # A worker that leaves from here on is looked for once more.
                self._due.discard(machine)
                if not await self._clean(near[turn % len(near)]):
                    self._due.add(machine)
                    await asyncio.sleep(PAUSE_SECONDS)
        finally:
            self._looking.discard(machine)

    def _near(self, machine: str) -> list[str]:
        return [w for w in self._scheduler.workers if get_address_host(w) == machine]

    async def _clean(self, worker: str) -> bool:
        """Have a worker remove what nobody names; return whether it did."""
        cluster = self._scheduler.id
        try:
            # First what is there: what comes later is no orphan yet.
            asked = self._hosts.control(worker, "orphans", cluster=cluster)
            found = await asyncio.wait_for(asked, _ANSWER_SECONDS)
            if (known := self._named()) is None:
                return False
            named, keep = known
            if names := sorted(set(found) - named):
                asked = self._hosts.control(
                    worker, "sweep", cluster=cluster, names=names, keep=keep
                )
                await asyncio.wait_for(asked, _ANSWER_SECONDS)
        except (OSError, DaskPSError) as error:
            logger.debug("%s could not look for orphans: %r", worker, error)
            return False
        return True
