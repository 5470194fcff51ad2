"""Drains: shards of a store leave a worker that goes on, as somebody asks for it.

Where another worker of its machine can map the memory, the worker lets go of a shard
and the other one adopts it, as where a worker closes. Else a copy is made on another
worker, which becomes the owner when it has all; see :mod:`daskps.cluster.host.moving`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from typing import TYPE_CHECKING, Any

from distributed.comm.addressing import get_address_host
from distributed.core import Status

from daskps.cluster.directory.candidates import Candidates
from daskps.cluster.directory.entry import insist
from daskps.cluster.directory.move import time_now
from daskps.cluster.directory.placement import held_bytes
from daskps.cluster.protocol.handlers import DIRECTORY
from daskps.errors import (
    ConsistencyError,
    DaskPSError,
    LayoutError,
    NotEnoughWorkersError,
    ShardBusyError,
)
from daskps.layout.placement import check_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distributed import Scheduler

    from daskps.cluster.directory.entry import Hosts, StoreEntry
    from daskps.cluster.directory.move import ShardMoves
    from daskps.cluster.directory.store_registry import Stores

logger = logging.getLogger(__name__)
#: Between two tries to have a worker let go of shards, or take one back.
_PAUSE_SECONDS = 0.2
#: How often a shard is sent that could not be, to another worker maybe.
_MOST_TRIES = 3
#: How long a worker may take to own a shard, and how fast its last state comes at least.
_OWN_SECONDS, _NBYTES_A_SECOND = 10.0, 5e7


class Drains:
    """The drains under way.

    Parameters
    ----------
    scheduler : Scheduler
        Knows the workers.
    hosts : Hosts
        The way to them.
    stores : Stores
        All stores.
    moves : ShardMoves
        Finds new owners on a machine.
    """

    def __init__(
        self, scheduler: Scheduler, hosts: Hosts, stores: Stores, moves: ShardMoves
    ) -> None:
        self._scheduler, self._hosts, self._runs = scheduler, hosts, moves.runs
        self._stores, self._moves = stores, moves
        self._under_way: set[tuple[str, str]] = set()

    @DIRECTORY.handles("drain")
    async def on_drain(self, uid: str, worker: str) -> dict[str, Any]:
        """Move all shards of a store off a worker; return which, and where shards are."""
        entry = self._stores.entry(uid)
        if worker not in self._scheduler.workers:
            known = ", ".join(self._scheduler.workers) or "none"
            raise ValueError(
                f"worker {worker!r:.100} is none of the cluster; its workers are {known}"
            )
        if (uid, worker) in self._under_way:
            raise ShardBusyError(
                f"worker {worker} is being drained of store {entry.name!r} already; wait "
                f"for that call"
            )
        self._under_way.add((uid, worker))
        try:
            shards = await self._drain(entry, worker)
        finally:
            self._under_way.discard((uid, worker))
        return {"shards": shards, "where": entry.where()}

    async def _drain(self, entry: StoreEntry, worker: str) -> list[int]:
        # Shards that have no owner are in no cut, and in no run that begins.
        async with entry.cutting:
            shards = _owned(self._stores.entry(entry.uid), worker)
            if shards and len(self._scheduler.workers) == 1:
                raise NotEnoughWorkersError(
                    f"worker {worker} is the only one of the cluster, so nobody can have "
                    f"its {len(shards)} shards of store {entry.name!r}; start another "
                    f"worker first"
                )
            near = self._near(entry, worker, shards)
            # Before anything has moved: all of the others have a place.
            self._targets(entry, sorted(set(shards) - set(near)))
            if near:
                await self._let_go(entry, worker, near)
        await self._send_all(entry, worker)
        await self._until_settled(entry, shards)
        self._stores.entry(entry.uid).check_found(shards)
        if shards:
            about = {"shards": shards, "worker": worker, "why": "drained"}
            self._hosts.tell("shards-moved", entry, **about)
        return shards

    # -- within a machine ----------------------------------------------------

    def _near(self, entry: StoreEntry, worker: str, shards: Sequence[int]) -> list[int]:
        """Return the shards that another worker of the machine may adopt."""
        shared = {row[0] for row in entry.segments} & set(shards)
        if not self._runs.survives(entry, sorted(shared)):
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
        in_order = self._hosts.has_worker(worker)
        move = self._moves.begin(entry, (worker, why), shards, in_order=in_order)
        move.look_now()
        await self._until_settled(entry, shards)

    async def _until_settled(self, entry: StoreEntry, shards: Sequence[int]) -> None:
        while entry.uid in self._stores and entry.away.keys() & set(shards):
            await entry.settled.wait()

    # -- to another machine --------------------------------------------------

    async def _send_all(self, entry: StoreEntry, worker: str) -> None:
        """Send the shards that a worker still has, each to one that has room."""
        failed: Exception | None = None
        for _ in range(_MOST_TRIES):
            left = _owned(self._stores.entry(entry.uid), worker)
            try:
                for shard, target in self._targets(entry, left).items():
                    await self._send(entry, shard, worker, target)
            except (OSError, ConsistencyError) as error:
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

    def _targets(self, entry: StoreEntry, shards: Sequence[int]) -> dict[int, str]:
        """Return a worker for each shard that has room for a copy of it.

        Raises
        ------
        LayoutError
            Where there is none.
        """
        held, found = held_bytes(self._stores.values()), dict[int, str]()
        running = {
            w: ws.memory_limit
            for w, ws in self._scheduler.workers.items()
            if (entry.uid, w) not in self._under_way and ws.status == Status.running
        }
        for shard in shards:
            need, why = entry.sizes[shard], "no other worker runs"
            for target in sorted(running, key=held.__getitem__):
                try:
                    limits = {target: running[target]}
                    check_memory({target: need}, held, limits, entry.memory_share)
                except LayoutError as error:
                    why = str(error)
                    continue
                found[shard] = target
                held[target] += need
                break
            else:
                raise LayoutError(
                    f"no other worker can have shard {shard} of store {entry.name!r}, "
                    f"{need:,} bytes: {why}"
                )
        return found

    async def _send(
        self, entry: StoreEntry, shard: int, source: str, target: str
    ) -> None:
        """Have a copy made of a shard, and make its worker the owner."""
        move = uuid.uuid4().hex
        of: dict[str, Any] = {"store": entry.uid, "shard": shard, "move": move}
        need = entry.sizes[shard]
        # They are told when the store ends, whoever owns the shard then.
        entry.strays |= {source, target}
        entry.charge(target, need)
        try:
            about = {
                "name": entry.name,
                "layout": entry.layout,
                "rules": entry.rules,
                "cluster": entry.cluster,
            }
            about = {"about": about, "source": source}
            try:
                await self._hosts.control(target, "move_fill", **of, **about)
                async with entry.cutting:
                    await self._hand_over(entry, of, source, target)
            except BaseException:
                undoing = self._hosts.spawn(self._undo(entry, of, source, target))
                await asyncio.wait({undoing})
                raise
        finally:
            entry.charge(target, -need)
        await insist(self._hosts, source, "move_done", _PAUSE_SECONDS, **of)

    async def _hand_over(
        self, entry: StoreEntry, of: dict[str, Any], source: str, target: str
    ) -> None:
        shard = of["shard"]
        is_there = shard in _owned(self._stores.entry(entry.uid), source)
        if not is_there or (entry.uid, target) in self._under_way:
            raise ConsistencyError(
                f"shard {shard} has left {source}, or {target} is drained"
            )
        about = {**of, "generation": entry.generations[shard] + 1}
        about |= {"rounds": self._runs.rounds_of(entry)}
        about |= {"codecs": self._runs.codecs_of(entry)}
        entry.set_away([shard], f"{source} hands it over to {target}")
        # One that is stopped keeps nobody waiting for longer.
        seconds = _OWN_SECONDS + entry.sizes[shard] / _NBYTES_A_SECOND
        own = self._hosts.control(target, "move_own", **about)
        row = await asyncio.wait_for(own, seconds)
        self._stores.entry(entry.uid)
        if not self._hosts.has_worker(target):
            raise ConsistencyError(f"worker {target} has left with shard {shard}")
        entry.install(target, [row])
        self._runs.mailbox_moved(entry, row)

    async def _undo(
        self, entry: StoreEntry, of: dict[str, Any], source: str, target: str
    ) -> None:
        """Have the owner of a shard go on, where it has not come to another one."""
        shard = of["shard"]
        if entry.uid not in self._stores:
            return
        generation = entry.generations[shard] + 1
        if shard in entry.away and entry.owners[shard] == source:
            # The other worker may have become the owner, and could not say so.
            entry.raise_generation(shard)
            about = {**of, "generation": generation + 1}
            if (row := await self._taken_back(entry, source, about)) is not None:
                entry.install(source, [row])
            elif entry.uid in self._stores:
                entry.settle([shard])
                self._moves.left(entry, source, "died as it handed over a shard")
        else:
            await self._taken_back(entry, source, {**of, "generation": generation})
        with contextlib.suppress(DaskPSError):
            await insist(self._hosts, target, "move_drop", _PAUSE_SECONDS, **of)

    async def _taken_back(
        self, entry: StoreEntry, source: str, about: dict[str, Any]
    ) -> Any:
        """Have a worker own a shard again; return its row, None if it has left."""
        while self._hosts.has_worker(source) and entry.uid in self._stores:
            try:
                return await self._hosts.control(source, "move_back", **about)
            except (OSError, DaskPSError) as error:
                # Another process may have locked it.
                logger.info("%s has yet to take a shard back: %r", source, error)
                await asyncio.sleep(_PAUSE_SECONDS)
        return None


def _owned(entry: StoreEntry, worker: str) -> list[int]:
    """Return the shards that a worker owns."""
    without = entry.without_owner
    every = enumerate(entry.owners)
    return [i for i, owner in every if owner == worker and i not in without]
