"""What clients push in a simulation, and what must have come of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

import daskps
from daskps.cluster.caller import snapshots
from daskps.cluster.caller.client import ShardClient
from daskps.cluster.caller.shard_map import StoreMap
from daskps.cluster.wire.deadline import Deadline
from daskps.testing.ground import CHANCE
from daskps.testing.oracles import EXPECTED

if TYPE_CHECKING:
    from distributed import Client

    from daskps.cluster.caller.link import Link
    from daskps.testing.oracles import Watch

#: Deadline of calls outside runs.
SECONDS = 8.0


@dataclass(eq=False)
class OneHotPushes:
    """One-hot pushes of several clients to one store, and snapshots of it.

    Each push has an element of its own in every shard, and a row of a table: whatever is
    applied once, twice or in part can be seen at the end, whoever did it.
    """

    watch: Watch
    n_shards: int
    n_pushes: int
    name: str = "plain"
    began: set[int] = field(default_factory=set)
    acknowledged: set[int] = field(default_factory=set)

    def params(self) -> Any:
        """Return the parameters of the store."""
        n = self.n_shards * self.n_pushes
        return {"w": np.zeros(n), "t": daskps.TableSpec(n, 1, "float64")}

    def asked(self) -> Any:
        """Return the rows that a pull of all reads besides the arrays."""
        return {"t": np.arange(self.n_shards * self.n_pushes)}

    def rows(self, values: Any) -> Any:
        """Return what was counted, by shard and push: of the array, then of the table.

        Both have the same of all pushes; else what is there is no number of times.
        """
        shape = self.n_shards, self.n_pushes
        found, of_table = (np.abs(values[n].reshape(shape)) for n in ("w", "t"))
        return np.where(found == of_table, found, np.nan)

    def _one_hot(self, push: int) -> Any:
        values = np.zeros((self.n_shards, self.n_pushes))
        values[:, push] = 1.0
        # A row of each shard, which is named twice.
        ids = np.arange(push, values.size, self.n_pushes)
        halves = np.full((2, len(ids), 1), 0.5)
        return {"w": values.reshape(-1), "t": daskps.RowGrad([ids, ids], halves)}

    async def push_all(self, client: Client, first: int, step: int) -> None:
        """Push every so many, one after the other or several at once."""
        store = await self._open(client)
        at_once = CHANCE.choice((1, 1, 3))
        mine = list(range(first, self.n_pushes, step))
        for at in range(0, len(mine), at_once):
            some = mine[at : at + at_once]
            await asyncio.gather(*(self._push(store, i) for i in some))
            await asyncio.sleep(CHANCE.uniform(0.0, 0.3))

    async def _open(self, client: Client) -> Any:
        while True:
            try:
                return await daskps.open(self.name, client=client)
            except EXPECTED:
                await asyncio.sleep(0.1)

    async def _push(self, store: Any, push: int) -> None:
        verb = store.add if push % 2 else store.push
        self.began.add(push)
        try:
            work = verb(self._one_hot(push), timeout=SECONDS)
            version = await self.watch.call(f"push {push}", _awaited(work), SECONDS)
            self.acknowledged.add(push)
            if CHANCE.random() < 0.3:
                asked = self.asked()
                work = store.pull(rows=asked, min_version=version, timeout=SECONDS)
                values = await self.watch.call("a pull", _awaited(work), SECONDS)
                self._compare(values, {push}, f"a pull after push {push}")
        except EXPECTED:
            return

    def _compare(self, values: Any, expected: set[int], what: str) -> Any:
        """Find pushes that are there twice, and expected ones that are not."""
        rows = self.rows(values)
        if (wrong := np.argwhere((rows != 0) & (rows != 1))).size:
            shard, push = wrong[0]
            self.watch.wrong(
                f"{what}: push {push} counts {rows[shard, push]:g} in shard {shard}"
            )
        for push in sorted(expected):
            if not rows[:, push].all():
                lacking = np.flatnonzero(rows[:, push] == 0).tolist()
                self.watch.wrong(f"{what} lacks push {push} in shards {lacking}")
        return rows

    async def snapshots(self, link: Link, n: int) -> None:
        """Take snapshots: each has all of a push or nothing of it."""
        for _ in range(n):
            await asyncio.sleep(CHANCE.uniform(0.0, 0.7))
            before = set(self.acknowledged)
            work = self._snapshot(link)
            try:
                values = await self.watch.call("a snapshot", work, SECONDS)
            except EXPECTED:
                continue
            rows = self._compare(values, before, "a snapshot")
            # A push that was given up may be there in part.
            whole = [i for i in self.acknowledged if (rows[:, i] != rows[0, i]).any()]
            if whole:
                self.watch.wrong(f"a snapshot has a part of push {whole[0]}")

    async def _snapshot(self, link: Link) -> Any:
        meta = StoreMap(await link.directory("find", name=self.name))
        shards, deadline = ShardClient(link, meta), Deadline(SECONDS, "a snapshot")
        taken = await snapshots.take_snapshot(shards, None, deadline)
        found = snapshots.values(taken, tables=True)
        within = asyncio.wait_for(found, deadline.left())
        return await within

    def check(self, values: Any) -> None:
        """Compare at the end what was acknowledged with what is there."""
        rows = self._compare(values, self.acknowledged, "the end")
        strange = set(np.flatnonzero(rows.any(axis=0)).tolist()) - self.began
        if strange:
            self.watch.wrong(f"pushes {sorted(strange)} that nobody made")


async def _awaited(work: Any) -> Any:
    return await work
