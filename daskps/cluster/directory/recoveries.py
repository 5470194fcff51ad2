"""Stores that have lost a shard: the turn to restore each from its last checkpoint.

No roll back: that of an update that was cut off is :mod:`daskps.shards.memory.undo`.

The directory sees no files: it gives one of those who ask the turn to restore the store
under another uid, by a lease, and the others wait. The restored store takes the place
of the lost one in one act, when it is complete (:meth:`Stores.on_commit`); from then on
whoever names the lost one hears what has become of it.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from daskps.cluster.directory.entry import Hosts, StoreEntry, remember
from daskps.cluster.directory.placement import StoreRequest, held_bytes, reserve
from daskps.cluster.protocol.handlers import DIRECTORY
from daskps.cluster.protocol.wellformed import check
from daskps.errors import ConsistencyError, LayoutError, StoreRestoredError
from daskps.layout.placement import place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from distributed import Scheduler

    from daskps.backend.stream import DeviceInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The checkpoint that a store was restored from, for those who used it."""

    #: Its URL, without what may be secret, and when it was written, in seconds.
    checkpoint: str
    saved: int
    version: int
    #: How many versions came after it at least.
    lost: int


class Recoveries:
    """The turns to restore stores, and the stores that others have the place of.

    Parameters
    ----------
    hosts : Hosts
        Tells events.
    stores : mapping of str to StoreEntry
        All stores.
    entry, free : callable
        Return a store by its uid, and free it for a reason.
    """

    def __init__(
        self,
        hosts: Hosts,
        stores: Mapping[str, StoreEntry],
        entry: Callable[[str], StoreEntry],
        free: Callable[[str, str], object],
    ) -> None:
        self._hosts, self._stores = hosts, stores
        self._entry, self._free = entry, free
        self._known: dict[str, StoreRestoredError] = {}
        #: By uid of a store that was resharded the uid of what it is now.
        self._relaid: dict[str, str] = {}

    # -- turns ---------------------------------------------------------------

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
            entry, now = self._entry(uid), clock()
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
            "servers": self.servers(entry),
            "hosts": entry.hosts,
            "where": entry.recover_from,
        }

    def servers(self, entry: StoreEntry) -> Any:
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
        self._entry(uid).lease.renew(token, now)

    @DIRECTORY.handles("recovery_failed")
    def on_recovery_failed(self, uid: str, token: int, why: str) -> None:
        """Hear that whoever restores a store has given up."""
        entry = self._entry(uid)
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
            self._free(made, "was undone: another one restores it")

    # -- what has the place of others -----------------------------------------

    def note(
        self, lost: StoreEntry, entry: StoreEntry, said: Mapping[str, Any] | None
    ) -> _Loaded:
        """Note that a store takes the place of another one, and what it was loaded from.

        Raises
        ------
        ProtocolError
            For what says that of no store.
        """
        check(_Loaded, said or {}, "what a store was restored from")
        of = _Loaded(**(said or {}))
        shard = min(lost.lost)
        worker, reason = lost.lost[shard]
        error = StoreRestoredError(
            *(lost.name, shard, worker, reason), **asdict(of), uid=entry.uid
        )
        remember(self._known, lost.uid, error)
        return of

    def relay(self, old: StoreEntry, entry: StoreEntry) -> None:
        """Note that a store is another one now, with other shards of the same state."""
        remember(self._relaid, old.uid, entry.uid)

    def relaid(self, uid: str) -> str:
        """Return the uid of what a store is now that was resharded, or its own."""
        while uid in self._relaid:
            uid = self._relaid[uid]
        return uid

    def latest(self, uid: str) -> str:
        """Return the uid of what has the place of a store now, or its own."""
        while (now := self.relaid(uid)) in self._known:
            uid = self._known[now].uid
        return now

    def error(self, uid: str) -> StoreRestoredError:
        """Return what to say of a store that others have the place of: the last one."""
        error = self._known[uid]
        while error.uid in self._known:
            error = self._known[error.uid]
        return StoreRestoredError(*error.args)


def reserve_again(
    scheduler: Scheduler,
    wanted: StoreRequest,
    workers: list[str],
    devices: Mapping[str, DeviceInfo],
    *,
    lost: StoreEntry,
    stores: Iterable[StoreEntry],
) -> StoreEntry:
    """Reserve what takes the place of a store that has lost a shard.

    Where there is no room for it beside what is left of that store, the caller has to
    :func:`drop_rest` first: then its `nbytes` are empty.
    """
    owners = place(wanted.shards or len(workers), workers)
    wanted = replace(
        wanted,
        placement=_placement(lost, owners),
        name=lost.name,
        session=lost.session,
        memory_share=lost.memory_share,
        machine=bool(lost.cluster),
        recover_from=lost.recover_from,
    )
    held = held_bytes(stores)
    relays = bool(lost.lease.cut)
    try:
        entry = reserve(scheduler, wanted, workers, held, devices=devices)
    except LayoutError:
        if relays:
            raise
        held.subtract(lost.nbytes)
        entry = reserve(scheduler, wanted, workers, held, devices=devices)
        lost.nbytes.clear()
    entry.origin = lost.origin or lost.uid
    if relays:
        entry.epoch, entry.known_as = lost.epoch + 1, lost.known_as
    else:
        # As they were asked for once: those may be back that are gone now.
        entry.asked_servers = lost.asked_servers
    entry.asked_placement = lost.asked_placement
    lost.lease.made = entry.uid
    return entry


def _placement(
    lost: StoreEntry, owners: Sequence[str]
) -> list[tuple[list[str], Sequence[int]]]:
    """Return what is placed on which of the owners: where none is left, on all."""
    rows = (
        ([worker for worker in on if worker in owners], indices)
        for on, indices in lost.asked_placement
    )
    return [row for row in rows if row[0]]


async def drop_rest(hosts: Hosts, lost: StoreEntry) -> None:
    """Free what is left of a store that another one takes the place of."""
    why = "made room to restore the store from its last checkpoint"
    having, rest = lost.hosts, set(range(len(lost.owners))) - lost.without_owner
    lost.lost |= {shard: (lost.owners[shard], why) for shard in rest}
    dropping = (hosts.control(w, "drop", store=lost.uid) for w in having)
    # One that dies meanwhile has freed it too.
    await asyncio.gather(*dropping, return_exceptions=True)
