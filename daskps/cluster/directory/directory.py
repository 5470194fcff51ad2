"""The part of daskps inside the scheduler: which host holds which shard.

It knows stores, shards, producers and runs, and never sees an array. All its state
changes run on the scheduler's event loop without yielding in between, so no locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from daskps.cluster import upstream
from daskps.cluster.directory.adoption import MoveContext
from daskps.cluster.directory.cuts import Cuts
from daskps.cluster.directory.entry import Hosts, StoreEntry, remember
from daskps.cluster.directory.moves import Moves
from daskps.cluster.directory.orphans import Orphans
from daskps.cluster.directory.placement import (
    Request,
    check_hosts,
    find_servers,
    held_bytes,
    reserve,
)
from daskps.cluster.directory.producers import Producers
from daskps.cluster.directory.readiness import Readiness
from daskps.cluster.directory.runs import Runs
from daskps.cluster.directory.trainers import Trainers
from daskps.cluster.keys import anchor_key, holder_of, is_gradient, store_of_anchor
from daskps.cluster.wire.handlers import DIRECTORY
from daskps.cluster.wire.messages import PROTOCOL, identity
from daskps.cluster.wire.wellformed import check
from daskps.errors import (
    ProtocolError,
    RunCancelledError,
    StoreClosedError,
    StoreExistsError,
    StoreNotFoundError,
)
from daskps.layout.arrays import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distributed import Scheduler

logger = logging.getLogger(__name__)
#: How long a client that closes a store waits for its hosts to free it.
FREE_SECONDS = 0.5

_check_request = partial(check, Request, what="a request for a store")


class Directory:
    """Stores, producers and runs of one cluster."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.hosts = Hosts(scheduler)
        self.producers = Producers(scheduler)
        self.stores: dict[str, StoreEntry] = {}
        self.names: dict[str, str] = {}
        self.runs = Runs(self.hosts, self.entry, self.producers.new)
        self.trainers = Trainers(self.hosts, self.runs)
        self.cuts = Cuts(self.hosts, self.entry, self.producers.on_ended)
        self.moves = Moves(MoveContext(scheduler, self.hosts, self.runs, self.stores))
        self.readiness = Readiness(scheduler, self.hosts, self.stores)
        self.orphans = Orphans(scheduler, self.hosts, self._named)
        self._freed: dict[str, str] = {}
        #: Futures of the clients that wait for a store of a name.
        self._awaited: dict[str, set[asyncio.Future[None]]] = {}
        parts = (
            self,
            self.runs,
            self.trainers,
            self.producers,
            self.cuts,
            self.moves,
        )
        self._owners = DIRECTORY.owners(*parts)
        upstream.add_handlers(scheduler, {"daskps_directory": self.handle})

    async def handle(self, method: str, **kwargs: Any) -> dict[str, Any]:
        """Serve one message."""
        return await DIRECTORY.serve(method, kwargs, self._owners.__getitem__)

    # -- stores --------------------------------------------------------------

    @DIRECTORY.handles("hello")
    def on_hello(self, protocol: int, version: str) -> dict[str, Any]:
        """Compare protocols with a client."""
        if protocol != PROTOCOL:
            mine = identity()
            raise ProtocolError(
                f"the client speaks protocol {protocol} (daskps {version}), the "
                f"scheduler {PROTOCOL} (daskps {mine['version']}); install the same "
                f"daskps everywhere"
            )
        return identity()

    @DIRECTORY.handles("create", checks={"request": _check_request})
    async def on_create(self, request: dict[str, Any]) -> dict[str, Any]:
        """Choose hosts for a new store and reserve it."""
        wanted = Request(**request)
        if wanted.uid in self.stores:
            raise StoreExistsError(f"there is a store {wanted.uid!r:.60} already")
        self._check_free(wanted.name, wanted.overwrite)
        workers = await find_servers(
            self.scheduler, wanted.servers, wanted.wait_seconds
        )
        if wanted.uid in self._freed:
            raise StoreClosedError(f"store {wanted.name!r} was undone by its creator")
        entry = reserve(
            self.scheduler, wanted, workers, held_bytes(self.stores.values())
        )
        self.stores[entry.uid] = entry
        try:
            await check_hosts(self.hosts, entry)
        except BaseException:
            self.free(entry.uid, "could not be created")
            raise
        return entry.to_wire()

    def _check_free(self, name: str, overwrite: bool) -> None:
        if name in self.names and not overwrite:
            raise StoreExistsError(
                f"a store named {name!r} exists on this cluster; open it with "
                f"daskps.open({name!r}), or pass overwrite=True to replace it"
            )

    @DIRECTORY.handles("commit")
    def on_commit(
        self,
        uid: str,
        anchors: Sequence[str],
        segments: Sequence[tuple[int, str, int, int]],
        overwrite: bool,
    ) -> None:
        """Make a store visible; it holds its initial values. Twice is fine."""
        entry = self.entry(uid)
        if entry.ready:
            return
        if list(anchors) != [anchor_key(uid, i) for i in range(len(entry.owners))]:
            raise ProtocolError(f"store {entry.name!r} with anchors of another one")
        entry.segments = segments
        if not entry.session:
            self._check_free(entry.name, overwrite)
            if entry.name in self.names:
                replaced = "was replaced by overwrite=True"
                self.free(self.names[entry.name], replaced, "store-deleted")
            self.names[entry.name] = uid
            for made in self._awaited.get(entry.name, ()):
                if not made.done():
                    made.set_result(None)
            # As published data is: the keys are wanted by a client of no person.
            self.scheduler.client_desires_keys(anchors, holder_of(uid))
        entry.ready = True
        self.readiness.store_made(entry)
        self.hosts.tell(
            "store-created",
            entry,
            session=entry.session,
            parameters=len(entry.layout["parameters"]),
            shards=len(entry.owners),
            workers=len(set(entry.owners)),
            nbytes=sum(entry.nbytes.values()),
        )

    @DIRECTORY.handles("await_store")
    async def on_await_store(self, name: str, wait_seconds: float) -> None:
        """Wait until a store has this name, or `wait_seconds` are over."""
        if name in self.names:
            return
        made: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._awaited.setdefault(name, set())
        waiting.add(made)
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(made, wait_seconds)
        finally:
            waiting.discard(made)
            if not waiting:
                self._awaited.pop(name, None)

    @DIRECTORY.handles("find")
    def on_find(
        self, name: str | None = None, uid: str | None = None
    ) -> dict[str, Any]:
        """Return what a handle needs to know of a store."""
        if uid is None:
            if name not in self.names:
                raise StoreNotFoundError(self._not_named(name))
            uid = self.names[name]
        return self.entry(uid).to_wire()

    def _not_named(self, name: str | None) -> str:
        """Return what to say where no named store has a name."""
        for entry in self.stores.values():
            if name not in (entry.name, entry.uid) or not entry.ready:
                continue
            if not entry.session:
                return f"{name!r} is the uid of store {entry.name!r}; open that name"
            return (
                f"{name!r} is a session store: it goes with the client that made it and "
                f"is not opened by name. Give its handle to the tasks that use it, or "
                f"create a store with a name of its own, daskps.create(..., name='...')"
            )
        return (
            f"no store named {name!r} on this cluster; there are "
            f"{sorted(self.names)[:8]}. Create it with daskps.create(..., "
            f"name={name!r})"
        )

    def entry(self, uid: str) -> StoreEntry:
        """Return a store, or say what became of it."""
        if uid in self.stores:
            return self.stores[uid]
        if uid in self._freed:
            raise StoreClosedError(f"{self._freed[uid]}; create it again")
        raise StoreNotFoundError(
            f"this cluster knows no store {uid}; its scheduler or workers were "
            f"restarted since it was made, create it again"
        )

    @DIRECTORY.handles("list")
    def on_list(self) -> list[dict[str, Any]]:
        """Return one row per store that is ready."""
        return [
            {
                "name": e.name,
                "uid": e.uid,
                "session": e.session,
                "parameters": len(e.layout["parameters"]),
                "shards": len(e.owners),
                "workers": len(set(e.owners)),
                "nbytes": Layout.from_wire(e.layout).nbytes,
            }
            for e in self.stores.values()
            if e.ready
        ]

    @DIRECTORY.handles("delete")
    async def on_delete(self, uid: str, wait_seconds: float = FREE_SECONDS) -> None:
        """Free a store on all its hosts."""
        self.entry(uid)
        freeing = self.free(uid, "was deleted", "store-deleted")
        await _settled(freeing, wait_seconds)

    @DIRECTORY.handles("close")
    async def on_close(
        self, uid: str, undo: bool = False, wait_seconds: float = FREE_SECONDS
    ) -> None:
        """Free a session store, or with `undo` any; closing it twice is fine."""
        entry = self.stores.get(uid)
        if entry is not None and (entry.session or undo):
            await _settled(self.free(uid, "was closed"), wait_seconds)
        elif entry is None and undo:
            # Not reserved yet: `on_create` still looks for workers.
            remember(self._freed, uid, "the store was undone")

    @DIRECTORY.handles("locate")
    async def on_locate(
        self, uid: str, run: int = 0, wait_seconds: float = 0.0
    ) -> dict[str, Any]:
        """Return where the shards are, which are being adopted or lost and why.

        Of a run in rounds also where its mailboxes are.

        Waits up to `wait_seconds` for those that are being adopted.

        Raises
        ------
        RunCancelledError
            If the run that asks is over.
        """
        entry = self.entry(uid)
        if wait_seconds and entry.adopting:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(entry.settled.wait(), wait_seconds)
            entry = self.entry(uid)
        if run and (error := self.runs.why_over(run)):
            raise RunCancelledError(f"run {run} is over: {error}")
        lost = [(shard, *why) for shard, why in entry.lost.items()]
        adopting = sorted(entry.adopting)
        about = {"lost": lost, "adopting": adopting, "name": entry.name}
        about["waits"] = list(entry.waits.items())
        return {**entry.where(), **about, "mailboxes": self.runs.mailboxes_at(run)}

    def free(
        self, uid: str, why: str, action: str = "store-freed"
    ) -> list[asyncio.Future[Any]]:
        """Forget a store at once and free its memory in the background.

        Returns what frees it; nobody has to wait for that.
        """
        entry = self.stores.pop(uid, None)
        if entry is None:
            return []
        remember(self._freed, uid, f"store {entry.name!r} {why}")
        if entry.ready:
            self.hosts.tell(action, entry, reason=why)
        if self.names.get(entry.name) == uid:
            del self.names[entry.name]
        self.runs.store_gone(entry, StoreClosedError(f"store {entry.name!r} {why}"))
        self.cuts.store_gone(entry)
        self._release_anchors(holder_of(uid))
        # Callers that wait for an adoption hear of it at once.
        entry.settled.set()
        self.moves.store_gone(entry)
        for worker in {entry.owners[i] for i in entry.adopting | entry.lost.keys()}:
            self.orphans.worker_left(worker)
        strays = entry.strays - set(entry.hosts)
        return [
            self.hosts.spawn(self.hosts.everywhere(entry, "drop")),
            *(
                self.hosts.spawn(self.hosts.control(w, "drop", store=uid))
                for w in strays
            ),
        ]

    def _release_anchors(self, holder: str) -> None:
        """Let go of the anchors of a named store, and of the client that held them."""
        if (held := self.scheduler.clients.get(holder)) is None:
            return
        self.scheduler.client_releases_keys(
            keys=[ts.key for ts in held.wants_what],
            client=holder,
            stimulus_id=f"{holder}-freed",
        )
        del self.scheduler.clients[holder]

    # -- what the cluster tells us -------------------------------------------

    def worker_came(self, worker: str) -> None:
        """Ask a new worker what it can do for shards that are away or may be."""
        self.moves.worker_came()
        self.readiness.worker_came(worker)
        self.orphans.worker_came(worker)

    def worker_left(self, worker: str, reason: str) -> None:
        """Look for new owners of what a worker held, or mark it as lost.

        Parameters
        ----------
        worker, reason : str
            Who left, and why.
        """
        self.moves.worker_left(worker, reason)
        self.orphans.worker_left(worker)
        self.runs.worker_left(worker)
        self.cuts.left("worker", worker)
        self.producers.forget("worker", worker)

    def _named(self) -> tuple[set[str], list[Any]] | None:
        """Return what memory is in use; see :class:`Orphans`."""
        names, keep = set[str](), list[Any]()
        for entry in self.stores.values():
            if not entry.ready:
                return None
            rounds = self.runs.rounds_of(entry) or {"rows": []}
            rows = [*entry.segments, *rounds["rows"]]
            names.update(row[1] for row in rows)
            if entry.adopting or entry.lost:
                keep += rows
        return names, keep

    def client_left(self, client: str) -> None:
        """End the runs of a client and free its session stores."""
        self.runs.client_left(client)
        self.cuts.left("client", client)
        self.producers.forget("client", client)
        for entry in list(self.stores.values()):
            if entry.client == client and (entry.session or not entry.ready):
                self.free(entry.uid, "went with the client that made it")

    def task_forgotten(self, key: Any) -> None:
        """Forget a task's producer; free what nobody wants: contributions, a store."""
        self.producers.forget_task(key)
        if is_gradient(key):
            self.trainers.free_contributions(*key[1:4])
        uid = store_of_anchor(key)
        if uid is not None and uid in self.stores and self.stores[uid].ready:
            # Later: this is called in the middle of the scheduler's transitions.
            loop = asyncio.get_running_loop()
            loop.call_soon(self.free, uid, "lost its last reference")

    def restarted(self) -> None:
        """Forget every store: `client.restart` killed all workers."""
        for uid in list(self.stores):
            self.free(uid, "was lost in client.restart()")

    def busy_workers(self) -> set[str]:
        """Return the workers that hold shards."""
        return {w for e in self.stores.values() for w in e.nbytes}


async def _settled(freeing: Sequence[asyncio.Future[Any]], seconds: float) -> None:
    """Wait until the hosts have freed a store, but not long for silent ones.

    A client that closes one store to make the next needs its memory.
    """
    if freeing:
        await asyncio.wait(freeing, timeout=min(seconds, FREE_SECONDS))
