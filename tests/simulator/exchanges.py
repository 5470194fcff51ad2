"""Syncs of replicas in a simulation, learning rates that are scaled, and what they come to."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import optim
from daskps.errors import IllegalStateError
from tests.simulator.following import awaited, opened
from tests.simulator.ground import CHANCE
from tests.simulator.loop import PROCESS
from tests.simulator.oracles import EXPECTED, SECONDS

if TYPE_CHECKING:
    from distributed import Client

    from daskps.typing import Array
    from tests.simulator.loop import Process
    from tests.simulator.oracles import Watch

#: Deadline of syncs: those that are given up are sent again by the next.
SYNC_SECONDS = 0.5
#: By what the learning rates are multiplied: primes, whose product tells how often each was.
FACTORS = (2, 3, 5, 7, 11, 13)
#: How often each replica is synced.
N_SYNCS = 5


@dataclass(eq=False)
class Exchanges:
    """Replicas of one store, and learning rates of it that are scaled meanwhile.

    What a replica does before a sync has an element of its own in every shard, and each
    factor is a prime: whatever counts once, twice or in part can be seen at the end.
    """

    watch: Watch
    n_shards: int
    n_replicas: int
    name: str = "shared"
    #: Factors that somebody has begun to multiply by, and those that were acknowledged.
    began: list[int] = field(default_factory=list)
    scaled: list[int] = field(default_factory=list)
    #: By number the replicas, and the processes they are in.
    replicas: dict[int, tuple[Process, Any]] = field(default_factory=dict)

    def params(self) -> dict[str, Array]:
        """Return the parameters of the store: of the replicas, and of the rates."""
        n = self.n_shards * self.n_replicas * N_SYNCS
        return {"r": np.zeros(n), "w": np.zeros(self.n_shards)}

    def optimizer(self) -> Any:
        """Return the rule of the store."""
        return optim.SGD(lr=1.0)

    async def scale(self, client: Client) -> None:
        """Multiply the learning rates by one factor after the other."""
        store = await opened(self.name, client)
        for factor in FACTORS:
            await asyncio.sleep(CHANCE.uniform(0.0, 0.8))
            self.began.append(factor)
            work = store.scale_lr(factor, timeout=SECONDS)
            try:
                await self.watch.call(f"a factor of {factor}", awaited(work), SECONDS)
            except EXPECTED:
                continue
            self.scaled.append(factor)

    async def sync(self, client: Client, number: int) -> None:
        """Change a replica and sync it, again and again; what fails the next one sends."""
        store, process = await opened(self.name, client), PROCESS.get()
        if process is None:
            raise IllegalStateError("a replica is in no process")
        try:
            work = store.replica(timeout=SECONDS)
            replica = await self.watch.call("a replica", awaited(work), SECONDS)
        except EXPECTED:
            return
        self.replicas[number] = process, replica
        for at in range(N_SYNCS):
            await asyncio.sleep(CHANCE.uniform(0.0, 0.8))
            # The replica's own array, with another shape.
            self._by_shard(replica.params["r"])[:, number, at] += 1.0
            try:
                await self.sync_once(replica, SYNC_SECONDS)
            except EXPECTED:
                continue
            self._once(replica.params["r"], f"replica {number} after sync {at}")

    async def sync_once(self, replica: Any, seconds: float = SECONDS) -> None:
        """Sync a replica."""
        work = replica.sync(timeout=seconds)
        await self.watch.call("a sync of a replica", awaited(work), seconds)

    async def use_rates(self, client: Client) -> None:
        """Push gradients of one when all is quiet, and look what comes of all of it."""
        store = await opened(self.name, client)
        before = await awaited(store.pull(timeout=SECONDS))
        await awaited(store.push({"w": np.ones(self.n_shards)}, timeout=SECONDS))
        after = await awaited(store.pull(timeout=SECONDS))
        for shard, factor in enumerate(before["w"] - after["w"]):
            self._check_factor(shard, factor)
        self._once(after["r"], "the end")
        for number, (_, replica) in self.replicas.items():
            own = self._by_shard(replica.params["r"])[:, number]
            if (self._by_shard(after["r"])[:, number] != own).any():
                self.watch.wrong(f"the end lacks changes of replica {number}")

    # -- what must hold --------------------------------------------------------

    def _by_shard(self, values: Array) -> Array:
        return values.reshape(self.n_shards, self.n_replicas, N_SYNCS)

    def _once(self, values: Array, what: str) -> None:
        """Find changes of replicas that are there twice."""
        found = self._by_shard(values)
        wrong = np.argwhere((found != 0) & (found != 1))
        if wrong.size:
            shard, number, at = wrong[0].tolist()
            self.watch.wrong(
                f"{what}: change {at} of replica {number} counts "
                f"{found[shard, number, at]:g} in shard {shard}"
            )

    def _check_factor(self, shard: int, factor: float) -> None:
        """Find factors that count twice, or not though that was acknowledged."""
        lacks = [by for by in self.scaled if factor % by]
        rest = factor
        for by in self.began:
            rest = rest if rest % by else rest / by
        if lacks or rest != 1:
            self.watch.wrong(
                f"learning rates of shard {shard} are multiplied by {factor:g}, of "
                f"factors {self.began}, of which {self.scaled} were acknowledged"
            )
