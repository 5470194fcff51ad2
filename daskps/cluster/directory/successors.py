"""Stores in the place of others that have lost a shard: room for them, and who knows."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from daskps.cluster.directory.entry import Hosts, StoreEntry, remember
from daskps.cluster.directory.placement import StoreRequest, held_bytes, reserve
from daskps.cluster.wire.wellformed import check
from daskps.errors import LayoutError, StoreRestoredError
from daskps.layout.placement import place

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distributed import Scheduler


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The checkpoint that a store was restored from, for those who used it."""

    #: Its URL, without what may be secret, and when it was written, in seconds.
    checkpoint: str
    saved: int
    version: int
    #: How many versions came after it at least.
    lost: int


class Successors:
    """The stores that others have the place of, and what became of each."""

    def __init__(self) -> None:
        self._known: dict[str, StoreRestoredError] = {}

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
            *(lost.name, shard, worker, reason),
            checkpoint=of.checkpoint,
            saved=of.saved,
            version=of.version,
            lost=of.lost,
            uid=entry.uid,
        )
        remember(self._known, lost.uid, error)
        return of

    def latest(self, uid: str) -> str:
        """Return the uid of what has the place of a store now, or its own."""
        while uid in self._known:
            uid = self._known[uid].uid
        return uid

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
    try:
        entry = reserve(scheduler, wanted, workers, held)
    except LayoutError:
        held.subtract(lost.nbytes)
        entry = reserve(scheduler, wanted, workers, held)
        lost.nbytes.clear()
    entry.origin = lost.origin or lost.uid
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
