"""The stores of the cluster: reserved, named, found, and freed."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from distributed.comm.addressing import get_address_host

from daskps.cluster.directory.entry import Hosts, StoreEntry, insist, remember
from daskps.cluster.directory.placement import (
    StoreRequest,
    check_hosts,
    find_devices,
    find_servers,
    held_bytes,
    reserve,
)
from daskps.cluster.directory.recoveries import Recoveries, drop_rest, reserve_again
from daskps.cluster.keys import anchor_key, holder_of, store_of_anchor
from daskps.cluster.protocol.handlers import DIRECTORY
from daskps.cluster.protocol.wellformed import check
from daskps.errors import (
    ConsistencyError,
    ProtocolError,
    StaleGenerationError,
    StoreClosedError,
    StoreExistsError,
    StoreNotFoundError,
)
from daskps.layout.arrays import Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distributed import Scheduler

#: How long a client that closes a store waits for its hosts to free it.
FREE_SECONDS = 0.5


class Stores(dict[str, StoreEntry]):
    """The stores by uid.

    Parameters
    ----------
    scheduler : Scheduler
        Knows the workers and the anchors.
    hosts : Hosts
        The way to them.
    made, gone : callable
        Take a store that has its shards now, and one that is no more with the reason.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        hosts: Hosts,
        *,
        made: Callable[[StoreEntry], None],
        gone: Callable[[StoreEntry, str], None],
    ) -> None:
        super().__init__()
        self._scheduler, self._hosts = scheduler, hosts
        self._tell_made, self._tell_gone = made, gone
        self._names: dict[str, str] = {}
        #: By what keys call them.
        self._labelled: dict[str | None, StoreEntry] = {}
        self._freed: dict[str, str] = {}
        #: The turns to restore those that have lost a shard.
        self.recoveries = Recoveries(hosts, self, self.current, self.free)
        #: Set when a store gets a name, and then replaced.
        self._named = asyncio.Event()

    @DIRECTORY.handles("create")
    async def on_create(self, request: dict[str, Any]) -> dict[str, Any]:
        """Choose hosts for a new store and reserve it."""
        check(StoreRequest, request, "a request for a store")
        wanted = StoreRequest(**request)
        if wanted.uid in self:
            raise StoreExistsError(f"there is a store {wanted.uid!r:.60} already")
        if wanted.replaces is None:
            self._check_free(wanted.name, wanted.overwrite)
        workers = await find_servers(
            self._scheduler, wanted.servers, wanted.wait_seconds
        )
        devices = await find_devices(self._hosts, wanted, workers)
        workers = [*devices] or workers
        if wanted.uid in self._freed:
            raise StoreClosedError(f"store {wanted.name!r} was undone by its creator")
        lost = None if wanted.replaces is None else self._lost(*wanted.replaces)
        if lost is None:
            about = self._scheduler, wanted, workers, held_bytes(self.values())
            entry = reserve(*about, devices=devices, sessions=self.values())
        else:
            of = self._scheduler, wanted, workers, devices
            entry = reserve_again(*of, lost=lost, stores=self.values())
        self[entry.uid] = self._labelled[entry.label] = entry
        try:
            if lost is not None and not lost.nbytes:
                await drop_rest(self._hosts, lost)
            await check_hosts(self._hosts, entry)
        except BaseException:
            self.free(entry.uid, "could not be created")
            raise
        return entry.to_wire()

    def _lost(self, uid: str, token: int) -> StoreEntry:
        """Return a store that somebody restores, or refuse where that is over."""
        entry = self.entry(uid)
        entry.lease.check(token)
        if not (entry.lost or entry.lease.cut):
            raise ConsistencyError(
                f"store {entry.name!r} is whole again: a worker has found what was lost"
            )
        return entry

    def _check_free(self, name: str, overwrite: bool) -> None:
        if name in self._names and not overwrite:
            raise StoreExistsError(
                f"a store named {name!r} exists on this cluster; open it with "
                f"daskps.open({name!r}), or pass overwrite=True to replace it"
            )

    @DIRECTORY.handles("commit")
    def on_commit(
        self,
        uid: str,
        anchors: Sequence[tuple[Any, ...]],
        segments: Sequence[tuple[int, str, int, int]],
        overwrite: bool,
        *,
        loaded: Mapping[str, Any] | None = None,
    ) -> None:
        """Make a store visible; it holds its initial values. Twice is fine.

        One that takes the place of another says what was `loaded` into it.
        """
        entry = self.entry(uid)
        if entry.ready:
            return
        shards = range(len(entry.owners))
        if [*map(tuple, anchors)] != [anchor_key(entry.label, i) for i in shards]:
            raise ProtocolError(f"store {entry.name!r} with anchors of another one")
        entry.segments = segments
        if entry.replaces is not None:
            self._take_place(entry, entry.replaces, loaded)
        elif not entry.session:
            self._check_free(entry.name, overwrite)
            if entry.name in self._names:
                replaced = "was replaced by overwrite=True"
                self.free(self._names[entry.name], replaced, "store-deleted")
        if not entry.session:
            self._names[entry.name] = uid
            self._named.set()
            self._named = asyncio.Event()
        if not entry.session or entry.replaces is not None:
            # As published data is: the keys are wanted by a client of no person.
            self._scheduler.client_desires_keys(anchors, holder_of(uid))
        entry.ready = True
        self._tell_made(entry)
        self._hosts.tell(
            "store-created",
            entry,
            nbytes=sum(entry.nbytes.values()),
            **entry.summary(),
        )

    def _take_place(
        self, entry: StoreEntry, replaces: tuple[str, int], said: Any
    ) -> None:
        """Have a restored store take the place of the one that has lost a shard.

        Raises
        ------
        ConsistencyError, StoreClosedError
            If its turn is over, or the other one is gone or whole again.
        """
        lost = self._lost(*replaces)
        entry.client, entry.saved = lost.client, lost.saved
        # Or it would be undone with that.
        lost.lease.made = ""
        if lost.lease.cut:
            self.recoveries.relay(lost, entry)
            # Its hosts have them, and are to free them.
            lost.settle([*lost.away])
            self.free(lost.uid, "was resharded", "store-resharded")
            return
        loaded = self.recoveries.note(lost, entry, said)
        self.free(lost.uid, f"was restored from {loaded.checkpoint}")
        self._hosts.tell("store-restored", entry, **asdict(loaded))

    @DIRECTORY.handles("grew")
    def on_grew(
        self, uid: str, worker: str, sizes: Sequence[tuple[int, int]]
    ) -> list[int]:
        """Note how many bytes shards take by now; return those that the worker has."""
        return self.entry(uid).note_sizes(worker, sizes)

    @DIRECTORY.handles("viewing")
    def on_viewing(
        self, uid: str, worker: str, *, nbytes: int = 0, name: str = ""
    ) -> str:
        """Note that a worker has a view of a store from now on; of a client nothing.

        Of one that it has made it says the bytes, and the `name` where all of its
        machine share it: older ones go then. Returns by what name the processes of a
        machine find each other.
        """
        viewers = self.entry(uid).viewers
        if worker:
            viewers[worker] = nbytes or viewers.get(worker, 0)
        for other in viewers if worker and name else ():
            if other != worker and get_address_host(other) == get_address_host(worker):
                viewers[other] = 0
        return str(self._scheduler.id)

    @DIRECTORY.handles("await_store")
    async def on_await_store(self, name: str, wait_seconds: float) -> None:
        """Wait until a store has this name, or `wait_seconds` are over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_seconds):
                while name not in self._names:
                    await self._named.wait()

    @DIRECTORY.handles("find")
    def on_find(
        self, name: str | None = None, uid: str | None = None
    ) -> dict[str, Any]:
        """Return what a handle needs to know of a store."""
        if uid is None:
            if name not in self._names:
                raise StoreNotFoundError(self._not_named(name))
            uid = self._names[name]
        return self.current(uid).to_wire()

    def _not_named(self, name: str | None) -> str:
        """Return what to say where no named store has a name."""
        for entry in self.values():
            if name not in (entry.name, entry.uid) or not entry.ready:
                continue
            if not entry.session:
                return f"{name!r} is the uid of store {entry.name!r}; open that name"
            return (
                f"{name!r} is a session store: it goes with its last handle and is not "
                f"opened by name. Give its handle to the tasks that use it, or "
                f"create a store with a name of its own, daskps.create(..., name='...')"
            )
        return (
            f"no store named {name!r} on this cluster; there are "
            f"{sorted(self._names)[:8]}. Create it with daskps.create(..., "
            f"name={name!r})"
        )

    def entry(self, uid: str) -> StoreEntry:
        """Return a store, or say what became of it."""
        if uid in self:
            return self[uid]
        if (now := self.recoveries.relaid(uid)) != uid:
            raise StaleGenerationError(
                f"store {self.entry(now).name!r} was resharded after this call was made for "
                f"its shards; ask the directory for its layout"
            )
        if (latest := self.recoveries.latest(uid)) != uid:
            if latest in self:
                raise self.recoveries.error(uid)
            uid = latest
        if uid in self._freed:
            raise StoreClosedError(f"{self._freed[uid]}; create it again")
        raise StoreNotFoundError(
            f"this cluster knows no store {uid}; its scheduler or workers were "
            f"restarted since it was made, create it again"
        )

    def current(self, uid: str) -> StoreEntry:
        """Return a store, also for who knows the uid that it had before a reshard."""
        return self.entry(self.recoveries.relaid(uid))

    def anchored_by(self, key: Any) -> StoreEntry | None:
        """Return the store that a key is an anchor of, if it is one."""
        return self._labelled.get(store_of_anchor(key))

    @DIRECTORY.handles("list")
    def on_list(self) -> list[dict[str, Any]]:
        """Return one row per store that is ready."""
        return [
            {
                "name": e.name,
                "uid": e.known_as,
                "nbytes": Layout.from_wire(e.layout).nbytes,
                "device": e.device,
                **e.summary(),
            }
            for e in self.values()
            if e.ready
        ]

    @DIRECTORY.handles("delete")
    async def on_delete(self, uid: str, wait_seconds: float = FREE_SECONDS) -> None:
        """Free a store on all its hosts."""
        uid = self.entry(self.recoveries.latest(uid)).uid
        freeing = self.free(uid, "was deleted", "store-deleted")
        await _settled(freeing, wait_seconds)

    @DIRECTORY.handles("close")
    async def on_close(
        self, uid: str, undo: bool = False, wait_seconds: float = FREE_SECONDS
    ) -> None:
        """Free a session store, or with `undo` any; closing it twice is fine."""
        uid = uid if undo else self.recoveries.latest(uid)
        entry = self.get(uid)
        if entry is not None and undo and entry.ready and entry.replaces is not None:
            return  # the answer to its commit was lost, and there is no other one
        if entry is not None and (entry.session or undo):
            await _settled(self.free(uid, "was closed"), wait_seconds)
        elif entry is None and undo:
            # Not reserved yet: `on_create` still looks for workers.
            remember(self._freed, uid, "the store was undone")

    def free(
        self, uid: str, why: str, action: str = "store-freed"
    ) -> list[asyncio.Future[Any]]:
        """Forget a store at once and free its memory in the background.

        Returns what frees it; nobody has to wait for that.
        """
        entry = self.pop(uid, None)
        if entry is None:
            return []
        self._labelled.pop(entry.label, None)
        remember(self._freed, uid, f"store {entry.name!r} {why}")
        if entry.ready:
            self._hosts.tell(action, entry, reason=why)
        if self._names.get(entry.name) == uid:
            del self._names[entry.name]
        self._release_anchors(holder_of(uid))
        # First: memory of shards without an owner is looked for.
        self._tell_gone(entry, why)
        hosts = self._hosts
        # Also owners of shards that are away: a reshard has stopped them, say.
        every = [*entry.owners, *entry.strays, *entry.viewers]
        workers = dict.fromkeys(filter(hosts.has_worker, every))
        # Callers that wait for an adoption hear of it at once.
        entry.settle([*entry.away])
        # Also one that cannot be reached now: else it keeps the memory for ever.
        drops = [insist(hosts, w, "drop", FREE_SECONDS, store=uid) for w in workers]
        return [*map(hosts.spawn, drops)]

    def _release_anchors(self, holder: str) -> None:
        """Let go of the anchors of a named store, and of the client that held them."""
        if (held := self._scheduler.clients.get(holder)) is None:
            return
        self._scheduler.client_releases_keys(
            keys=[ts.key for ts in held.wants_what],
            client=holder,
            stimulus_id=f"{holder}-freed",
        )
        del self._scheduler.clients[holder]


async def _settled(freeing: Sequence[asyncio.Future[Any]], seconds: float) -> None:
    """Wait until the hosts have freed a store, but not long for silent ones.

    A client that closes one store to make the next needs its memory.
    """
    if freeing:
        await asyncio.wait(freeing, timeout=min(seconds, FREE_SECONDS))
