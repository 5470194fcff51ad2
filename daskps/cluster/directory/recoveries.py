"""Stores that have lost a shard, and who restores them from their last checkpoint.

The directory sees no files: it gives one of those who ask the turn to restore the store
under another uid, and the others wait. The restored store takes the place of the lost one
in one act, when it is complete (:meth:`Stores.on_commit`); from then on whoever names the
lost one hears what has become of it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from daskps.cluster.wire.handlers import DIRECTORY
from daskps.errors import ConsistencyError

if TYPE_CHECKING:
    from daskps.cluster.directory.entry import Hosts, StoreEntry
    from daskps.cluster.directory.stores import Stores

logger = logging.getLogger(__name__)


class Recoveries:
    """The turns to restore stores.

    Parameters
    ----------
    hosts : Hosts
        Tells events.
    stores : Stores
        All stores.
    """

    def __init__(self, hosts: Hosts, stores: Stores) -> None:
        self._hosts, self._stores = hosts, stores

    @DIRECTORY.handles("recover")
    async def on_recover(
        self, uid: str, owner: tuple[str, str], wait_seconds: float, tried: int = 0
    ) -> dict[str, Any]:
        """Say what is done about a store that has lost a shard.

        Returns "state": "whole", nothing was lost, or nobody is to restore it; "yours",
        the asker restores it; "failed", and "why"; "under way", after `wait_seconds`.
        The "token" of the turn that is waited for is what was `tried` the next time.

        Raises
        ------
        StoreRestoredError
            Once another store has its place.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + wait_seconds
        while True:
            entry, now = self._stores.entry(uid), clock()
            if not (entry.ready and entry.lost and entry.recover_from):
                return {"state": "whole"}
            lease = entry.lease
            if why := lease.failure(now, tried):
                return {"state": "failed", "why": why}
            if not self._is_there(*owner):
                # Its turn has just ended with it: this question of its is of no use.
                raise ConsistencyError(f"{owner[1]} has left")
            if lease.is_free(now):
                return self._give(entry, (owner[0], owner[1]), now)
            tried = tried or lease.token
            if now >= deadline:
                return {"state": "under way", "token": tried}
            await lease.wait(now, deadline - now)

    def _is_there(self, kind: str, name: str) -> bool:
        hosts = self._hosts
        return hosts.has_worker(name) if kind == "worker" else hosts.has_client(name)

    def _give(
        self, entry: StoreEntry, owner: tuple[str, str], now: float
    ) -> dict[str, Any]:
        """Give somebody the turn; what the one before has made is undone."""
        self._undo(entry)
        token, by = entry.lease.take(owner, now), owner[1]
        self._hosts.tell("store-recovering", entry, by=by, shards=sorted(entry.lost))
        logger.warning(
            "daskps: store %r has lost a shard; %s restores it", entry.name, by
        )
        return {
            "state": "yours",
            "token": token,
            "store": entry.to_wire(),
            "shards": entry.asked_shards,
            "servers": self._servers(entry),
            "hosts": entry.hosts,
            "where": entry.recover_from,
        }

    def _servers(self, entry: StoreEntry) -> Any:
        """Return what servers a store was asked to have; of those named, who is there.

        An address that is gone does not come back: where all are, any worker is taken.
        """
        asked = entry.asked_servers
        if isinstance(asked, str):
            return asked
        return [worker for worker in asked if self._hosts.has_worker(worker)] or "auto"

    @DIRECTORY.handles("recovering")
    def on_recovering(self, uid: str, token: int) -> None:
        """Hear that whoever restores a store is at it."""
        now = asyncio.get_running_loop().time()
        self._stores.entry(uid).lease.renew(token, now)

    @DIRECTORY.handles("recovery_failed")
    def on_recovery_failed(self, uid: str, token: int, why: str) -> None:
        """Hear that whoever restores a store has given up."""
        entry = self._stores.entry(uid)
        entry.lease.check(token)
        self._undo(entry)
        entry.lease.fail(why, asyncio.get_running_loop().time())
        self._hosts.tell("recovery-failed", entry, reason=why)
        logger.warning("daskps: store %r was not restored: %s", entry.name, why)

    # -- what the cluster tells us -------------------------------------------

    def left(self, kind: str, name: str) -> None:
        """Give the turns of a client or worker that left to others."""
        for entry in list(self._stores.values()):
            if entry.lease.holder == (kind, name):
                self._undo(entry)
                entry.lease.end()

    def store_gone(self, entry: StoreEntry) -> None:
        """Stop restoring a store that has ended, or is restored."""
        self._undo(entry)
        entry.lease.end()

    def _undo(self, entry: StoreEntry) -> None:
        """Free what somebody has begun to make in the place of a store."""
        made, entry.lease.made = entry.lease.made, ""
        if made:
            self._stores.free(made, "was undone: another one restores it")
