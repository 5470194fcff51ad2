"""The part of daskps inside the scheduler: which host holds which shard.

It knows stores, shards, producers and runs, and never sees an array. All its state
changes run on the scheduler's event loop without yielding in between, so no locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING, Any, Protocol

from daskps.cluster import upstream
from daskps.cluster.directory.copies import SecondCopies
from daskps.cluster.directory.cuts import Cuts
from daskps.cluster.directory.drains import Drains
from daskps.cluster.directory.entry import Hosts, StoreEntry
from daskps.cluster.directory.machines import Orphans, Readiness
from daskps.cluster.directory.move import ShardMoves
from daskps.cluster.directory.rebalance import Rebalance
from daskps.cluster.directory.resharding import Reshards
from daskps.cluster.directory.runs import Runs
from daskps.cluster.directory.store_registry import Stores
from daskps.cluster.directory.trainers import TrainerMessages
from daskps.cluster.keys import place_of_gradient
from daskps.cluster.protocol.handlers import DIRECTORY
from daskps.cluster.protocol.messages import check_protocol, identity
from daskps.errors import (
    ConsistencyError,
    ProtocolError,
    RunCancelledError,
    StoreClosedError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distributed import Scheduler


class _Keeping(Protocol):
    """Keeps shared memory on the scheduler's machine until it is left."""

    def leave(self) -> Any:
        """Keep it no more."""


class Directory:
    """Stores, producers and runs of one cluster.

    Parameters
    ----------
    scheduler : Scheduler
        Knows the workers and the tasks.
    keep : callable
        Keeps the cluster's memory on this machine, also while no worker lives; returns
        None where there is none. Nothing is kept by default.
    """

    def __init__(
        self, scheduler: Scheduler, keep: Callable[[], _Keeping | None] = lambda: None
    ) -> None:
        self._keep = keep
        #: By store.
        self._kept: dict[str, _Keeping] = {}
        self.hosts = Hosts(scheduler)
        self.producers = Producers(scheduler)
        self.stores = Stores(
            scheduler, self.hosts, made=self._store_made, gone=self._store_gone
        )
        self.runs = Runs(self.hosts, self.stores.current, self.producers.new)
        self.trainers = TrainerMessages(self.hosts, self.runs)
        self.cuts = Cuts(self.hosts, self.stores.entry, self.producers.on_ended)
        self.moves = ShardMoves(scheduler, self.hosts, self.runs, self.stores)
        self.copies = SecondCopies(self.moves)
        self.drains = Drains(self.stores, self.moves, self.copies)
        self.reshards = Reshards(self.stores, self.moves, self.cuts, self.drains)
        self.rebalance = Rebalance(self.moves, self.drains.send)
        self.recoveries = self.stores.recoveries
        self.readiness = Readiness(scheduler, self.hosts, self.stores)
        self.orphans = Orphans(scheduler, self.hosts, self._named)
        # Any part may serve messages: those with a method that `DIRECTORY.handles` marks
        # are looked for among the attributes of this object, as they are now.
        self._owners = DIRECTORY.owners(self, *vars(self).values())
        upstream.add_handlers(scheduler, {"daskps_directory": self.handle})

    def close(self) -> None:
        """Stop with the scheduler."""
        self.hosts.close()
        for kept in self._kept.values():
            kept.leave()
        self._kept.clear()

    async def handle(self, method: str, **kwargs: Any) -> dict[str, Any]:
        """Serve one message."""
        return await DIRECTORY.serve(method, kwargs, self._owners.__getitem__)

    @DIRECTORY.handles("hello")
    def on_hello(self, protocol: int, version: str) -> dict[str, Any]:
        """Compare protocols with a client."""
        check_protocol(protocol, version, "the client")
        return identity()

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
        entry = self.stores.entry(uid)
        if wait_seconds and entry.away:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(entry.settled.wait(), wait_seconds)
            entry = self.stores.entry(uid)
        if run and (error := self.runs.why_over(run)):
            raise RunCancelledError(f"run {run} is over: {error}")
        about = self.runs.open.get(run)
        lost = [(shard, *why) for shard, why in entry.lost.items()]
        return {
            **entry.where(),
            "name": entry.name,
            "lost": lost,
            "away": list(entry.away.items()),
            "mailboxes": about.mailboxes_at if about else [],
        }

    # -- what the cluster tells us -------------------------------------------

    def _store_made(self, entry: StoreEntry) -> None:
        """Keep the memory of a new store; have workers ready that may adopt shards."""
        if entry.segments and (kept := self._keep()):
            self._kept[entry.uid] = kept
        self.readiness.store_made(entry)
        self.copies.look(entry)

    def _store_gone(self, entry: StoreEntry, why: str) -> None:
        """End what goes on with a store that is gone; look for what nobody can free."""
        if kept := self._kept.pop(entry.uid, None):
            kept.leave()
        self.runs.store_gone(entry, StoreClosedError(f"store {entry.name!r} {why}"))
        self.cuts.store_gone(entry)
        self.moves.store_gone(entry)
        self.recoveries.store_gone(entry)
        for worker in {entry.owners[i] for i in entry.without_owner}:
            self.orphans.worker_left(worker)

    def worker_came(self, worker: str) -> None:
        """Ask a new worker what it can do for shards; it may come to have some."""
        self.moves.worker_came()
        self.copies.worker_came()
        self.readiness.worker_came(worker)
        self.orphans.worker_came(worker)
        self.rebalance.worker_came(worker)

    def worker_left(
        self, worker: str, reason: str, *, is_retired: bool = False
    ) -> asyncio.Future[None] | None:
        """Look for new owners of what a worker held, or mark it as lost.

        Parameters
        ----------
        worker, reason : str
            Its address, and why it left.
        is_retired : bool
            Whether it lives, and waits for what follows.

        Returns
        -------
        asyncio.Future or None
            Done when it has sent shards to others, where it is to send some.
        """
        for entry in self.stores.values():
            entry.viewers.pop(worker, None)
        self.hosts.foreign.discard(worker)
        self.copies.worker_left(worker)
        sent = self.drains.worker_left(worker, reason, is_retired=is_retired)
        self.orphans.worker_left(worker)
        self.runs.worker_left(worker)
        # First: the turn to reshard a store ends with its cut.
        self.recoveries.left("worker", worker)
        self.cuts.left("worker", worker)
        self.producers.forget("worker", worker)
        return sent

    def _named(self) -> tuple[set[str], list[Any]] | None:
        """Return what memory is in use; see :class:`Orphans`."""
        names, keep = set[str](), list[Any]()
        for entry in self.stores.values():
            if not entry.ready:
                return None
            rounds = self.runs.rounds_of(entry) or {"rows": []}
            rows = [*entry.segments, *rounds["rows"]]
            names.update(row[1] for row in rows)
            if entry.without_owner:
                keep += rows
        return names, keep

    def client_left(self, client: str) -> None:
        """End the runs of a client and free its session stores."""
        self.runs.client_left(client)
        self.recoveries.left("client", client)
        self.cuts.left("client", client)
        self.producers.forget("client", client)
        for entry in list(self.stores.values()):
            if entry.client == client and (entry.session or not entry.ready):
                self.stores.free(entry.uid, "went with the client that made it")

    def task_forgotten(self, key: Any) -> None:
        """Forget a task's producer; free what nobody wants: contributions, a store."""
        self.producers.forget_task(key)
        if place := place_of_gradient(key):
            self.trainers.free_contributions(*place)
        entry = self.stores.anchored_by(key)
        if entry is not None and entry.ready:
            # Later: this is called in the middle of the scheduler's transitions.
            loop = asyncio.get_running_loop()
            loop.call_soon(self.stores.free, entry.uid, "lost its last reference")

    def restarted(self) -> None:
        """Forget every store: `client.restart` killed all workers."""
        for uid in list(self.stores):
            self.stores.free(uid, "was lost in client.restart()")


class Producers:
    """Ids of runs and of the producers outside runs."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._ids = itertools.count(1)
        #: Producers by task key and number within the task; what each belongs to.
        self._tasks: dict[Any, dict[int, int]] = {}
        self._owners: dict[int, tuple[str, Any]] = {}

    def new(self) -> int:
        """Return an id no run or producer has had."""
        return next(self._ids)

    @DIRECTORY.handles("producer")
    def on_producer(self, kind: str, owner: Any, nth: int = 0) -> int:
        """Issue the identity of a pusher outside runs.

        The n-th of a task gets the same number each time it runs until the scheduler
        forgets it, so what a re-run pushes again is told from what is new.
        """
        if kind not in ("task", "client", "worker"):
            raise ProtocolError(f"a producer that is a {kind!r:.60}")
        if kind != "task":
            number = self.new()
        else:
            ts = self._scheduler.tasks.get(owner)
            if ts is None or ts.state != "processing":
                raise ConsistencyError(
                    f"task {owner!r} is no longer the scheduler's to run, so its push "
                    f"was refused; nothing was applied"
                )
            numbers = self._tasks.setdefault(owner, {})
            number = numbers.get(nth) or self.new()
            numbers[nth] = number
        self._owners[number] = (kind, owner)
        return number

    @DIRECTORY.handles("ended")
    def on_ended(self, producers: Sequence[int]) -> list[int]:
        """Return those of the producers that will not push again."""
        return [p for p in producers if not self._is_open(p)]

    def _is_open(self, producer: int) -> bool:
        kind, owner = self._owners.get(producer, ("", None))
        if kind == "task":
            ts = self._scheduler.tasks.get(owner)
            return ts is not None and ts.state == "processing"
        if kind == "client":
            return owner in self._scheduler.clients
        return kind == "worker" and owner in self._scheduler.workers

    def forget_task(self, key: Any) -> None:
        """Forget the producer of a task the scheduler has forgotten."""
        for number in self._tasks.pop(key, {}).values():
            self._owners.pop(number, None)

    def forget(self, kind: str, owner: str) -> None:
        """Forget the producers of a client or worker that left."""
        for producer in [p for p, of in self._owners.items() if of == (kind, owner)]:
            del self._owners[producer]
