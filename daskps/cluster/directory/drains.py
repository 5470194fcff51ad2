"""Shards that leave a worker which lives: one that is drained, or that closes.

Where another worker of its machine can map the memory, the worker lets go of a shard
and the other one adopts it. Else a copy is made on another worker, which becomes the
owner when it has all; see :mod:`daskps.cluster.host.moving`.

Dask removes a worker that it retires, or whose connection has ended, before the worker
closes: its process still answers, and says that it leaves. One that has died never says
so, and its shards are looked for as :mod:`daskps.cluster.directory.move` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distributed.comm.addressing import get_address_host
from distributed.core import Status

from daskps.cluster.directory.candidates import Candidates
from daskps.cluster.directory.entry import LeftBy, insist
from daskps.cluster.directory.machines import near_to
from daskps.cluster.directory.move import time_now
from daskps.cluster.directory.placement import eligible, find_room, greet, held_bytes
from daskps.cluster.protocol.handlers import DIRECTORY
from daskps.errors import (
    ConsistencyError,
    DaskPSError,
    LayoutError,
    NotEnoughWorkersError,
    ProtocolError,
    ShardBusyError,
)
from daskps.layout.arrays import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from distributed.scheduler import WorkerState

    from daskps.cluster.directory.copies import SecondCopies
    from daskps.cluster.directory.entry import StoreEntry
    from daskps.cluster.directory.move import ShardMoves
    from daskps.cluster.directory.store_registry import Stores

logger = logging.getLogger(__name__)
#: Between two tries to have a worker let go of shards, or take one back.
_PAUSE_SECONDS = 0.2
#: How often a shard is sent that could not be, to another worker maybe.
_MOST_TRIES = 3
#: How long a worker may take to own a shard, and how fast its last state comes at least.
_OWN_SECONDS, _NBYTES_A_SECOND = 10.0, 5e7
#: How long a worker that Dask has removed may take to say that it closes.
_SAY_SECONDS = 0.5
#: How long such a worker may take to answer, and waits for an answer before it asks again.
_ANSWER_SECONDS = 0.5
#: How long one that closes may send: a nanny kills it after 4 s.
_CLOSE_SECONDS = 2.5
#: The same of one that Dask has retired, and waits for; and how fast it sends at least.
_RETIRE_SECONDS, _RETIRE_NBYTES_A_SECOND = 10.0, 2e7


@dataclass(eq=False)
class _Departure:
    """A worker that has left or closes, and the shards that it is to send."""

    reason: str
    #: Those that nobody of its machine can have, the smallest first.
    shards: list[tuple[StoreEntry, int]]
    #: How long it may send.
    seconds: float
    #: Set when it is known to live.
    lives: asyncio.Event = field(default_factory=asyncio.Event)
    #: Done when all are sent, or others look for them.
    over: asyncio.Future[None] = field(init=False)


class Drains:
    """The drains under way, and the workers that close.

    Parameters
    ----------
    stores : Stores
        All stores.
    moves : ShardMoves
        Finds new owners on a machine.
    copies : SecondCopies
        Those that stay where they are.
    """

    def __init__(self, stores: Stores, moves: ShardMoves, copies: SecondCopies) -> None:
        self._scheduler, self._hosts = moves.scheduler, moves.hosts
        self._stores, self._moves, self._runs = stores, moves, moves.runs
        self._copies, copies.take_back = copies, self.take_back
        #: By store and worker those under way, also if their callers have given up.
        self.under_way: set[tuple[str, str]] = set()
        self._departures: dict[str, _Departure] = {}

    @DIRECTORY.handles("drain")
    async def on_drain(self, uid: str, worker: str) -> dict[str, Any]:
        """Move all shards of a store off a worker; return which, and where shards are."""
        entry = self._stores.entry(uid)
        if worker not in self._scheduler.workers:
            known = ", ".join(self._scheduler.workers) or "none"
            raise ValueError(
                f"worker {worker!r:.100} is none of the cluster; its workers are {known}"
            )
        if (uid, worker) in self.under_way:
            raise ShardBusyError(
                f"worker {worker} is being drained of store {entry.name!r} already; wait "
                f"for that call"
            )
        self.under_way.add((uid, worker))
        before = entry.drained & {worker}
        entry.drained.add(worker)
        try:
            shards = await self._drain(entry, worker)
        except BaseException:
            # Else no shard nor copy would come there any more.
            entry.drained -= {worker} - before
            raise
        finally:
            self.under_way.discard((uid, worker))
        return {"shards": shards, "where": entry.where()}

    async def _drain(self, entry: StoreEntry, worker: str) -> list[int]:
        # One that was silent may yet have a shard back.
        every = enumerate(entry.owners)
        await self._until_settled(entry, [i for i, w in every if w == worker])
        # Shards that have no owner are in no cut, and in no run that begins.
        async with entry.cutting:
            shards = _owned(self._stores.entry(entry.uid), worker)
            if shards and len(self._scheduler.workers) == 1:
                raise NotEnoughWorkersError(
                    f"worker {worker} is the only one of the cluster, so nobody can have "
                    f"its {counted(len(shards), 'shard')} of store {entry.name!r}; "
                    f"start another worker first"
                )
            if shards and entry.device:
                raise LayoutError(
                    f"store {entry.name!r} is on device {entry.device!r}, whose shards do "
                    f"not move; save it, and restore it with servers="
                )
            near = self._near(entry, worker, shards)
            # Before anything has moved: all of the others have a place.
            self._targets(entry, sorted(set(shards) - set(near)))
            if near:
                await self._let_go(entry, worker, near)
        await self._send_all(entry, worker)
        # A copy may have to take over what is away.
        copied = [i for i, copy in entry.copies.items() if copy.worker == worker]
        await self._until_settled(entry, [*shards, *copied])
        await self._copies.drained(self._stores.entry(entry.uid), worker)
        entry.check_found(shards)
        if shards:
            about = {"shards": shards, "worker": worker, "why": "drained"}
            self._hosts.tell("shards-moved", entry, **about)
        return shards

    # -- within a machine ----------------------------------------------------

    def _near(self, entry: StoreEntry, worker: str, shards: Sequence[int]) -> list[int]:
        """Return the shards that another worker of the machine may adopt."""
        shared = {row[0] for row in entry.segments} & set(shards)
        is_near = near_to(self._scheduler, entry, worker)
        if not (is_near and self._runs.survives(entry, sorted(shared))):
            return []
        candidates = Candidates(self._scheduler, self._stores, entry, worker)
        dealt = candidates.deal(sorted(shared), time_now(), lambda *_: None)
        machine = get_address_host(worker)
        return [
            shard
            for (question, by), given in dealt.items()
            if question == "adopt" and by != worker and get_address_host(by) == machine
            for shard in given
        ]

    async def _let_go(self, entry: StoreEntry, worker: str, shards: list[int]) -> None:
        """Have others of the machine adopt shards; some may stay where they are."""
        why = f"is drained of store {entry.name!r}"
        rows = [(shard, entry.generations[shard]) for shard in shards]
        about: dict[str, Any] = {"store": entry.uid, "shards": rows}
        entry.set_away(shards, why)
        # Before anybody is asked: who has them may be that worker again.
        await insist(self._hosts, worker, "let_go", _PAUSE_SECONDS, **about)
        left_by = LeftBy(worker, why, in_order=self._hosts.has_worker(worker))
        self._moves.begin(entry, shards, left_by).promote()
        await self._until_settled(entry, shards)

    async def _until_settled(self, entry: StoreEntry, shards: Sequence[int]) -> None:
        while entry.uid in self._stores and entry.away.keys() & set(shards):
            # That waits for others too, which may be away for long.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(entry.settled.wait(), _PAUSE_SECONDS)

    # -- workers that close --------------------------------------------------

    @DIRECTORY.handles("leaving")
    async def on_leaving(self, worker: str) -> dict[str, Any]:
        """Hear that a worker closes; return whether it waits, and asks again.

        Else its shards were sent, and others may have those of `stores`: it lets go of
        them when it knows, and frees what it has of other stores. A shard that it has
        adopted just now may have no owner yet, as far as the directory knows.
        """
        reason = "was closed"
        if (departure := self._departure(worker, reason)) is not None:
            departure.lives.set()
            done, _ = await asyncio.wait({departure.over}, timeout=_ANSWER_SECONDS)
            if not done:
                return {"waits": True, "stores": []}
        self._moves.worker_left(LeftBy(worker, reason, in_order=True))
        # Also what was given up is looked for: a worker may have hung for long.
        self._moves.worker_came()
        stores = [e.uid for e in self._stores.values() if e.without_owner]
        return {"waits": False, "stores": stores}

    def worker_left(
        self, worker: str, reason: str, *, is_retired: bool
    ) -> asyncio.Future[None] | None:
        """Hear that Dask has removed a worker; a future is done when it has sent all."""
        departure = self._departure(worker, reason)
        if departure is not None and is_retired:
            nbytes = sum(entry.sizes[i] for entry, i in departure.shards)
            departure.seconds = _RETIRE_SECONDS + nbytes / _RETIRE_NBYTES_A_SECOND
            departure.lives.set()
        self._moves.worker_left(LeftBy(worker, reason))
        return None if departure is None else departure.over

    def _departure(self, worker: str, reason: str) -> _Departure | None:
        """Return what a worker sends as it leaves, None where that is nothing."""
        if worker not in self._departures and (shards := self._alone(worker)):
            departure = _Departure(reason, shards, _CLOSE_SECONDS)
            self._departures[worker] = departure
            for entry, shard in shards:
                entry.sent_on.add((shard, worker))
            departure.over = self._hosts.spawn(self._depart(worker, departure))
        return self._departures.get(worker)

    def _alone(self, worker: str) -> list[tuple[StoreEntry, int]]:
        """Return the shards that nobody of its machine can have, the smallest first.

        Last those that it may own in a moment. None where nobody runs that they could be
        sent to: the cluster ends.
        """
        workers = self._scheduler.workers
        others = {w: ws.status for w, ws in workers.items() if w != worker}
        is_over = self._scheduler.status != Status.running
        if is_over or Status.running not in others.values():
            return []
        found: list[tuple[StoreEntry, int]] = []
        owns = self._copies.about_to_own
        last = [(e, i) for e in self._stores.values() for i in owns(e, worker)]
        for entry in self._stores.values():
            if entry.ready and not entry.device:
                is_near = near_to(self._scheduler, entry, worker)
                mapped = {row[0] for row in entry.segments if is_near}
                # A copy takes over at once, but not one that is being made.
                counted = [i for i, copy in entry.copies.items() if copy.counts]
                mapped |= {i for i in counted if self._copies.serves(entry, i)}
                # A drain or a reshard may have stopped one, and may give it back.
                mine = _owned(entry, worker) + _handed_over(entry, worker)
                found += [(entry, i) for i in mine if i not in mapped]
        return sorted(found, key=lambda of: of[0].sizes[of[1]]) + last

    async def _depart(self, worker: str, departure: _Departure) -> None:
        """Have a worker send its shards, if it lives; others look for the rest."""
        lives, why = departure.lives, f"{departure.reason}; it may yet send them"
        try:
            if not lives.is_set():
                waits = [(e, i) for e, i in departure.shards if i not in e.away]
                for entry, shard in waits:
                    entry.set_away([shard], why)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(lives.wait(), _SAY_SECONDS)
                # Others may look for one by now, or have found it to be lost.
                for entry, shard in [(e, i) for e, i in waits if e.away.get(i) == why]:
                    entry.settle([shard])
            if lives.is_set():
                sending = self._hosts.spawn(self._send_on(departure.shards, worker))
                await asyncio.wait({sending}, timeout=departure.seconds)
                # To undo a move may take longer, where somebody is stopped.
                sending.cancel()
        finally:
            del self._departures[worker]
            for entry, shard in departure.shards:
                entry.sent_on.discard((shard, worker))
            left_by = LeftBy(worker, departure.reason, in_order=lives.is_set())
            self._moves.worker_left(left_by)

    async def _send_on(
        self, shards: Sequence[tuple[StoreEntry, int]], worker: str
    ) -> None:
        """Send shards, each to a worker that has room and answers; else it stays."""
        failed = {*self._hosts.foreign}
        self._have_ready(shards)
        for entry, shard in shards:
            await self._until_settled(entry, [shard])
            if shard not in _owned(entry, worker):
                continue
            for _ in range(_MOST_TRIES):
                target = ""
                try:
                    (target,) = self._targets(entry, [shard], last=failed).values()
                    soon = {"seconds": _ANSWER_SECONDS}
                    await self.send(entry, shard, worker, target, **soon)
                except Exception as error:  # noqa: BLE001 - also of a user's rule
                    failed.add(target)
                    logger.info("%s could not send a shard: %r", worker, error)
                else:
                    about = {"shards": [shard], "worker": worker, "why": "left"}
                    self._hosts.tell("shards-moved", entry, **about)
                    break
        # Also those that it has come to own meanwhile, as of a store that was resharded.
        if more := [of for of in self._alone(worker) if of not in shards]:
            await self._send_on([*shards, *more], worker)

    def _have_ready(self, shards: Sequence[tuple[StoreEntry, int]]) -> None:
        """Have workers load the loops of shards to come; that takes new ones seconds."""
        for entry in {entry.uid: entry for entry, _ in shards}.values():
            with contextlib.suppress(LayoutError):
                found = self._targets(entry, [i for of, i in shards if of is entry])
                about: Any = {"layout": entry.layout, "rules": entry.rules}
                for target in dict.fromkeys(found.values()):
                    if target not in entry.owners:
                        self._hosts.spawn(self._hosts.control(target, "warm", **about))

    def may_close(self, workers: Sequence[WorkerState]) -> list[WorkerState]:
        """Return workers that Dask may close, all at once: others have room for shards.

        Those with most bytes stay.
        """
        held = held_bytes(self._stores.values())
        found, stay = [], dict[str, Any]()
        for ws in sorted(workers, key=lambda ws: held[ws.address], reverse=True):
            try:
                for entry in self._stores.values():
                    at = {} if entry.device else stay
                    find_room(entry, _owned(entry, ws.address), held, at)
            except LayoutError:
                stay[ws.address] = ws
            else:
                found.append(ws)
        return found

    # -- to another machine --------------------------------------------------

    async def _send_all(self, entry: StoreEntry, worker: str) -> None:
        """Send the shards that a worker still has, each to one that has room."""
        failed: Exception | None = None
        target, last = "", {*self._hosts.foreign}
        for _ in range(_MOST_TRIES):
            left = _owned(self._stores.entry(entry.uid), worker)
            try:
                for shard, target in self._targets(entry, left, last).items():
                    await self.send(entry, shard, worker, target)
            except (OSError, ConsistencyError, ProtocolError) as error:
                if isinstance(error, ProtocolError) and target in last:
                    raise  # nobody else has room
                last.add(target)
                # That worker has died, or more has changed than it could follow.
                logger.info("a shard stays on %s for now: %r", worker, error)
                failed = error
                await asyncio.sleep(_PAUSE_SECONDS)
            else:
                return
        raise ConsistencyError(
            f"shards of store {entry.name!r} stay on worker {worker}, after {_MOST_TRIES} "
            f"tries to move them: {failed}; drain it again"
        ) from failed

    def _targets(
        self, entry: StoreEntry, shards: Sequence[int], last: Collection[str] = ()
    ) -> dict[int, str]:
        """Return a worker that runs and has room for each shard, or refuse."""
        workers = self._scheduler.workers
        running = {w: ws for w, ws in workers.items() if ws.status == Status.running}
        for uid, worker in self.under_way:
            if uid == entry.uid:
                running.pop(worker, None)
        held = held_bytes(self._stores.values())
        servers = eligible(self._scheduler, entry.asked_servers)
        return find_room(entry, shards, held, running, servers=servers, last=last)

    async def send(
        self,
        entry: StoreEntry,
        shard: int,
        source: str,
        target: str,
        *,
        seconds: float = _OWN_SECONDS,
    ) -> None:
        """Have a copy made of a shard, and make its worker the owner; once only.

        Nothing changes where the target does not answer in time, or has another daskps.
        """
        # A drain may send the same shards as a worker that closes.
        async with self._moves.turn(entry, source):
            await greet(self._hosts, target, seconds)
            if shard in _owned(self._stores.entry(entry.uid), source):
                # The target may be where it is; and it follows this owner alone.
                await asyncio.wait({self._copies.strike(entry, shard, "moves")})
                await self._copy(entry, shard, source, target)

    async def _copy(
        self, entry: StoreEntry, shard: int, source: str, target: str
    ) -> None:
        move = uuid.uuid4().hex
        of: dict[str, Any] = {"store": entry.uid, "shard": shard, "move": move}
        need = entry.sizes[shard]
        # They are told when the store ends, whoever owns the shard then.
        entry.strays |= {source, target}
        entry.charge(target, need)
        about: dict[str, Any] = {"about": entry.described, "source": source}
        try:
            await self._moves.have_filled(target, **of, **about)
            async with entry.cutting:
                await self._hand_over(entry, of, source, target)
        except BaseException:
            undoing = self._hosts.spawn(self._undo(entry, of, source, target))
            await asyncio.wait({undoing})
            raise
        finally:
            entry.charge(target, -need)
        # Its own memory is freed once it knows that another worker owns the shard.
        await asyncio.wait({self._copies.depose(entry, shard, source, move=move)})

    async def _hand_over(
        self, entry: StoreEntry, of: dict[str, Any], source: str, target: str
    ) -> None:
        shard = of["shard"]
        is_there = shard in _owned(self._stores.entry(entry.uid), source)
        if not is_there or (entry.uid, target) in self.under_way:
            raise ConsistencyError(
                f"shard {shard} has left {source}, or {target} is drained"
            )
        about = {**of, "generation": entry.generations[shard] + 1}
        about |= {"runs": self._runs.for_owner(entry)}
        entry.set_away([shard], handing(source, target))
        # One that is stopped keeps nobody waiting for longer.
        seconds = _OWN_SECONDS + entry.sizes[shard] / _NBYTES_A_SECOND
        own = self._hosts.control(target, "move_own", **about)
        row = await asyncio.wait_for(own, seconds)
        self._stores.entry(entry.uid)
        if not self._hosts.has_worker(target):
            raise ConsistencyError(f"worker {target} has left with shard {shard}")
        self._moves.install(entry, target, [row])

    async def _undo(
        self, entry: StoreEntry, of: dict[str, Any], source: str, target: str
    ) -> None:
        """Have the owner of a shard go on, where it has not come to another one."""
        shard = of["shard"]
        if entry.uid not in self._stores:
            return
        if is_handed_over := entry.away.get(shard) == handing(source, target):
            await self.take_back(entry, shard, of["move"])
        about = {"pause": _PAUSE_SECONDS, **of}
        dropping = self._hosts.spawn(insist(self._hosts, target, "move_drop", **about))
        if not is_handed_over:
            generation = entry.generations[shard] + 1
            await self._taken_back(entry, source, {**of, "generation": generation})
        await asyncio.wait({dropping}, timeout=_ANSWER_SECONDS)

    async def take_back(self, entry: StoreEntry, shard: int, move: str) -> None:
        """Have a worker that has stopped a shard go on; or others look for it."""
        if entry.uid not in self._stores:
            return
        source, about = entry.owners[shard], {"store": entry.uid, "shard": shard}
        # Another worker may have become the owner, and could not say so.
        entry.raise_generation(shard)
        about |= {"move": move, "generation": entry.generations[shard] + 1}
        if (row := await self._taken_back(entry, source, about)) is not None:
            self._moves.install(entry, source, [row])
        # Dask may have removed it meanwhile, and tells of no worker twice.
        if entry.uid in self._stores and not (row and self._hosts.has_worker(source)):
            entry.settle([shard])
            self._moves.left(entry, LeftBy(source, "died as it handed over a shard"))

    async def _taken_back(
        self, entry: StoreEntry, source: str, about: dict[str, Any]
    ) -> Any:
        """Have a worker own a shard again; return its row, None if it has left."""
        while entry.uid in self._stores and (
            self._hosts.has_worker(source) or source in self._departures
        ):
            try:
                back = self._hosts.control(source, "move_back", **about)
                return await asyncio.wait_for(back, _OWN_SECONDS)
            except (OSError, DaskPSError) as error:
                # Another process may have locked it.
                logger.info("%s has yet to take a shard back: %r", source, error)
                await asyncio.sleep(_PAUSE_SECONDS)
        return None


def handing(source: str, target: str) -> str:
    """Return why a shard is away for a moment."""
    return f"{source} hands it over to {target}"


def _handed_over(entry: StoreEntry, worker: str) -> list[int]:
    """Return the shards that a worker hands over just now: it may have them back."""
    return [i for i, why in entry.away.items() if why.startswith(handing(worker, ""))]


def _owned(entry: StoreEntry, worker: str) -> list[int]:
    """Return the shards that a worker owns."""
    without = entry.without_owner
    return [i for i, w in enumerate(entry.owners) if w == worker and i not in without]
