"""Drains of workers in a simulation: shards move while everything else goes on."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

from distributed.core import Status

import daskps
from daskps.cluster.directory import drains
from daskps.cluster.directory.candidates import Candidates
from daskps.cluster.host.hosted import HostedShard
from daskps.cluster.host.node import HOSTS
from daskps.errors import (
    ConsistencyError,
    DaskPSError,
    LayoutError,
    NotEnoughWorkersError,
    ShardLostError,
    StoreClosedError,
)
from daskps.shards.shard import Shard
from tests.simulator import network
from tests.simulator.following import opened
from tests.simulator.ground import CHANCE, put
from tests.simulator.loop import PROCESS
from tests.simulator.oracles import EXPECTED, SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Client

    from daskps.cluster.directory.entry import StoreEntry
    from daskps.cluster.host.host import ShardHost
    from tests.simulator.loop import Process
    from tests.simulator.oracles import Watch
    from tests.simulator.world import World

#: With what a drain may end where there are faults.
MAY_FAIL = (
    *(ConsistencyError, LayoutError, NotEnoughWorkersError),
    *(ShardLostError, StoreClosedError, TimeoutError, OSError),
)
#: How often nobody near can have a shard, so that a copy is made.
COPIED_SHARE = 0.5
#: How soon those die that are to die at a move.
DYING_SECONDS = 0.005
#: How long one move takes at most when all is quiet.
MOVE_SECONDS = 2.0


def prepare() -> None:
    """Have some shards copied that others of the machine might adopt; some die at it."""
    put(HostedShard, hand_over=_dying(HostedShard.hand_over))
    put(Shard, take_over=_dying(Shard.take_over))

    class SomeCandidates(Candidates):
        def deal(self, *args: Any) -> dict[tuple[str, str], list[int]]:
            return {} if CHANCE.random() < COPIED_SHARE else super().deal(*args)

    put(drains, Candidates=SomeCandidates)


def _dying(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        found, process = function(*args), PROCESS.get()
        if process is not None and process.dies_at_move:
            seconds = CHANCE.uniform(0.0, DYING_SECONDS)
            asyncio.get_running_loop().call_later(seconds, _die, process)
        return found

    return call


def _die(process: Process) -> None:
    if not process.is_dead:
        network.network().crash(process, 0.0)


class Draining:
    """Drains of random workers, and where the shards are in the end.

    Attributes
    ----------
    n_moved : int
        How many shards have moved.
    """

    def __init__(self, world: World, watch: Watch) -> None:
        self._world, self._watch = world, watch
        self.n_moved = 0

    async def run(self, client: Client) -> None:
        """Drain some workers of some stores, while there are faults."""
        for _ in range(CHANCE.choice((0, 2, 5))):
            await asyncio.sleep(CHANCE.uniform(0.0, 0.8))
            worker = f"sim://{CHANCE.choice(self._world.live).name}"
            try:
                name = CHANCE.choice([e.name for e in self._stores()])
                store = await daskps.aio.open(name, client=client)
            except EXPECTED:
                continue
            try:
                await self._drain(store, worker)
            except EXPECTED as error:
                if not isinstance(error, MAY_FAIL):
                    self._watch.wrong(f"a drain of {worker} ended with {error!r}")

    async def drain_last(self, name: str, client: Client) -> None:
        """Drain the owner of a shard when all is quiet: that must go well."""
        known = self._world.scheduler.workers
        running = [w for w, about in known.items() if about.status == Status.running]
        (entry,) = (e for e in self._stores() if e.name == name)
        owners = [w for w in running if w in entry.holders]
        if len(running) < 2 or not owners:
            return
        store = await opened(name, client)
        await self._drain(store, worker := CHANCE.choice(owners))
        if worker in entry.holders:
            self._watch.wrong(f"{worker} has shards of {name} after a drain")

    async def _drain(self, store: Any, worker: str) -> None:
        async def drain() -> int:
            try:
                return len(await store.drain(worker, timeout=SECONDS))
            except ValueError as error:
                if isinstance(error, DaskPSError):
                    raise
                raise OSError(f"{worker} has left") from error

        what = f"a drain of {worker} of {store.name}"
        self.n_moved += await self._watch.call(what, drain(), SECONDS)

    # -- what must hold --------------------------------------------------------

    def _stores(self) -> list[StoreEntry]:
        return [*self._world.scheduler.extensions["daskps-directory"].stores.values()]

    async def check(self) -> None:
        """Find shards without their one owner, what is left of moves, and wrong charges."""
        if stuck := self._on_their_way():
            # Copies go to a machine that has come one after the other, for seconds.
            await asyncio.sleep(MOVE_SECONDS)
            stuck &= self._on_their_way()
        for where, key, _ in sorted(stuck):
            self._watch.wrong(f"shard {key} is on its way for ever at {where}")
        hosts = self._hosts()
        for entry in self._stores():
            charges = Counter[str]()
            for shard, owner in enumerate(entry.owners):
                if shard not in entry.lost:
                    charges[owner] += entry.sizes[shard]
                    self._check_owner(entry, shard, hosts)
            for copy in entry.copies.values():
                charges[copy.worker] += copy.nbytes
            # A worker may just be asked to adopt lost shards, and has room for them then.
            lost = sum(entry.sizes[shard] for shard in entry.lost)
            more = Counter(entry.nbytes)
            more.subtract(charges)
            if not all(0 <= nbytes <= lost for nbytes in more.values()):
                self._watch.wrong(
                    f"{entry.name}: charges are {entry.nbytes}, shards take {charges}"
                )

    def _hosts(self) -> dict[str, ShardHost]:
        addresses = [f"sim://{process.name}" for process in self._world.live]
        return {where: HOSTS[where] for where in addresses if where in HOSTS}

    def _on_their_way(self) -> set[tuple[str, tuple[str, int], str]]:
        """Return where which shards move, and by which move, but for copies that stay."""
        stay = {c.move for entry in self._stores() for c in entry.copies.values()}
        return {
            (where, key, of.move)
            for where, host in self._hosts().items()
            for key, of in (*host.going.items(), *host.coming.items())
            if of.move not in stay
        }

    def _check_owner(
        self, entry: StoreEntry, shard: int, hosts: dict[str, ShardHost]
    ) -> None:
        what = f"shard {shard} of {entry.name}, of {entry.owners[shard]}"
        having = [w for w, host in hosts.items() if (entry.uid, shard) in host.shards]
        if having != [entry.owners[shard]]:
            self._watch.wrong(f"{what}, is at {having}")
            return
        hosted = hosts[having[0]].shards[entry.uid, shard]
        mine = hosted.shard.generation, entry.generations[shard]
        if hosted.is_released or mine[0] != mine[1]:
            self._watch.wrong(f"{what}, serves nobody: generations {mine}")
