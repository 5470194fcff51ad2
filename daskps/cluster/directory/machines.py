"""Work of workers for the stores of their machine: loops made ready, memory removed.

A worker that never ran the rules of a store takes seconds to load their loops, which
callers of an adopted shard would wait for. So the directory asks workers beforehand:
those of the owners' machines when a store is made, and each that comes later.

Memory that workers left when they died is adopted for the most part, or goes with its
store. But a worker may be killed before it hears that its shards are freed, and no
owner of a shard knows of them then.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from distributed.comm.addressing import get_address_host
from distributed.core import Status

from daskps.cluster.directory.entry import insist
from daskps.cluster.protocol.reports import MEMORY_METRIC
from daskps.errors import DaskPSError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distributed import Scheduler

    from daskps.cluster.directory.entry import Hosts, StoreEntry

logger = logging.getLogger(__name__)
#: The workers that adopt shards of their machine.
SERVING = Status.running, Status.paused
#: Between two tries to remove memory.
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
                local = self._local(machine)
                if not local or machine not in self._due:
                    return
                # A worker that leaves from here on is looked for once more.
                self._due.discard(machine)
                if not await self._clean(local[turn % len(local)]):
                    self._due.add(machine)
                    await asyncio.sleep(PAUSE_SECONDS)
        finally:
            self._looking.discard(machine)

    def _local(self, machine: str) -> list[str]:
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


#: A worker that has just come gets its host in a moment: how often it is asked, and
#: the time in between.
_MOST_QUESTIONS = 20
WARM_SECONDS = 0.25


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
        about |= {"on": ProtocolError, "tries": _MOST_QUESTIONS}
        try:
            await insist(self._hosts, worker, "warm", WARM_SECONDS, **about)
        except (DaskPSError, OSError, ValueError, TypeError) as error:
            # It would be told again by the error of its adoption.
            logger.debug("daskps: %s is not made ready: %r", worker, error)


def _machines(entry: StoreEntry) -> set[str]:
    """Return the machines whose workers can have shards of a store."""
    return set(map(get_address_host, {entry.owners[row[0]] for row in entry.segments}))


def near_to(scheduler: Scheduler, entry: StoreEntry, worker: str) -> set[str]:
    """Return the other workers that serve and seem to have the memory of an owner.

    Those of its address, unless that is of containers with another memory each.
    """
    machine, memory = get_address_host(worker), entry.memories.get(worker)
    found = set()
    for other, state in scheduler.workers.items():
        serves = other != worker and state.status in SERVING
        if serves and get_address_host(other) == machine:
            of = memory_of(scheduler, other)
            if not (of and memory) or of == memory:
                found.add(other)
    return found


def memory_of(scheduler: Scheduler, worker: str) -> str:
    """Return which shared memory a worker has; "" before it has said so."""
    known = scheduler.workers.get(worker)
    return "" if known is None else str(known.metrics.get(MEMORY_METRIC, ""))
