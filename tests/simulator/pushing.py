"""What clients push in a simulation, and what must have come of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

import daskps
from daskps import optim
from daskps.cluster.caller import snapshots
from daskps.cluster.caller.client import ShardClient
from daskps.cluster.caller.row_routes import IdSplit, RowBatch
from daskps.cluster.caller.shard_map import StoreMap
from daskps.cluster.protocol.deadline import Deadline
from tests.simulator import steps
from tests.simulator.following import Follower, awaited, opened
from tests.simulator.ground import CHANCE
from tests.simulator.named_ids import ANY, NamedIds
from tests.simulator.oracles import EXPECTED, SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distributed import Client

    from daskps.cluster.caller.link import Link
    from tests.simulator.oracles import Restored, Watch
    from tests.simulator.world import World

#: How many ids a push has for itself: with the large ones rows, index and logs of a
#: shard get more memory.
SIZES = (4, 4, 60, 60, 600)
DIM = 16
#: And the last one: it needs more memory whoever has the shards by then.
LAST_SIZE = 2400
#: Of how many other pushes the rows are read after one, and the share of pushes whose
#: rows are removed again.
N_READ = 3
REMOVED_SHARE = 0.2
#: How often a push is looked for on a worker that has died.
LOOK_SECONDS = 0.2


@dataclass(eq=False)
class OneHotPushes:
    """One-hot pushes of several clients to one store, and snapshots of it.

    Each push has an element of its own in every shard, a row of a table, and ids of a
    table unbounded: whatever is applied once, twice or in part can be seen at the end,
    whoever did it.
    """

    watch: Watch
    n_shards: int
    n_pushes: int
    name: str = "plain"
    began: set[int] = field(default_factory=set)
    acknowledged: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        sizes = CHANCE.choices(SIZES, k=self.n_pushes - 1)
        self.named = NamedIds(self.watch, self.n_shards, [*sizes, LAST_SIZE], DIM)
        self.followers: list[Follower] = []

    def params(self) -> Any:
        """Return the parameters of the store."""
        n = self.n_shards * self.n_pushes
        table = daskps.TableSpec(n, 1, "float64")
        return {"w": np.zeros(n), "t": table, ANY: self.named.spec()}

    def optimizer(self) -> Any:
        """Return the rule of the store."""
        return optim.SGD(lr=1.0)

    def asked(self) -> Any:
        """Return the rows that a pull of all reads besides the arrays."""
        return {"t": np.arange(self.n_shards * self.n_pushes), ANY: self.named.ids}

    def rows(self, values: Any) -> Any:
        """Return what was counted, by shard and push: of the array, then of the table.

        Both have the same of all pushes; else what is there is no number of times.
        """
        shape = self.n_shards, self.n_pushes
        found, of_table = (np.abs(values[n].reshape(shape)) for n in ("w", "t"))
        return np.where(found == of_table, found, np.nan)

    def _counts(self, push: int) -> Any:
        counts = np.zeros((self.n_shards, self.n_pushes))
        counts[:, push] = 1.0
        return counts

    def _one_hot(self, push: int) -> Any:
        values = self._counts(push)
        # A row of each shard, which is named twice.
        ids = np.arange(push, values.size, self.n_pushes)
        halves = np.full((2, len(ids), 1), 0.5)
        rows = daskps.RowGrad([ids, ids], halves)
        # What is added, adds; a gradient is taken away.
        named = self.named.grad(push, 1.0 if push % 2 else -1.0)
        return {"w": values.reshape(-1), "t": rows, ANY: named}

    async def push_all(self, client: Client, mine: Sequence[int]) -> None:
        """Push some, one after the other or several at once."""
        store = await opened(self.name, client)
        at_once = CHANCE.choice((1, 1, 3))
        for at in range(0, len(mine), at_once):
            some = mine[at : at + at_once]
            await asyncio.gather(*(self._push(store, i) for i in some))
            await asyncio.sleep(CHANCE.uniform(0.0, 0.3))

    async def push_by_tasks(self, world: World, mine: Sequence[int]) -> None:
        """Push some from workers, any of which may die at it."""
        for push in mine:
            await asyncio.sleep(CHANCE.uniform(0.0, 0.5))
            process = CHANCE.choice(world.live)
            link = world.link(world.workers[process.name])
            work = process.spawn(self._push_from(link, push))
            await process.sees_end(work, LOOK_SECONDS)

    async def _push_from(self, link: Link, push: int) -> None:
        try:
            meta = StoreMap(await link.directory("find", name=self.name))
            self.began.add(push)
            counts = self._counts(push)
            rows = self._given(meta, push, counts)
            work = steps.push_from(link, meta, {0: counts.reshape(-1)}, rows)
            await self.watch.call(f"push {push} of a worker", work, SECONDS)
            self.acknowledged.add(push)
        except EXPECTED:
            return

    def _given(self, meta: StoreMap, push: int, counts: Any) -> list[RowBatch]:
        """Return the rows of a push as a worker sends them."""
        ids = np.flatnonzero(counts)
        table, unbounded = meta.layout.tables
        cut = IdSplit.of(table, ids, self.n_shards)
        named = self.named.given(unbounded, push, -1.0)
        return [RowBatch(cut, np.ones(len(ids))), named]

    async def follow(self, client: Client, own: Sequence[int]) -> None:
        """Keep a copy of a table in a process that makes some of the pushes."""
        name = f"the copy of client {len(self.followers)}"
        store = await opened(self.name, client)
        mine = Follower(self.watch, self.named, store, name, own)
        self.followers.append(mine)
        times = CHANCE.choice((0, 2, 4))
        await mine.follow(times, lambda: self.acknowledged, SECONDS)

    async def push_last(self, client: Client) -> None:
        """Push once more when all is quiet: that must go well."""
        store = await daskps.aio.open(self.name, client=client)
        await self._push_once(store, self.n_pushes - 1)

    async def _push_once(self, store: Any, push: int) -> Any:
        verb = store.add if push % 2 else store.push
        self.began.add(push)
        work = verb(self._one_hot(push), timeout=SECONDS)
        version = await self.watch.call(f"push {push}", awaited(work), SECONDS)
        self.acknowledged.add(push)
        return version

    async def _push(self, store: Any, push: int) -> None:
        try:
            version = await self._push_once(store, push)
            if CHANCE.random() < 0.3:
                await self._read(store, push, version)
            if CHANCE.random() < REMOVED_SHARE:
                await self._remove(store, push)
        except EXPECTED:
            return

    async def _read(self, store: Any, push: int, version: Any) -> None:
        """Read all arrays, and rows of this push and of some others."""
        others = CHANCE.sample(range(self.n_pushes), N_READ)
        asked, at = self.asked(), self.named.places([push, *others])
        asked[ANY], removed = self.named.ids[at], {*self.named.removed}
        work = store.pull(rows=asked, min_version=version, timeout=SECONDS)
        values = await self.watch.call("a pull", awaited(work), SECONDS)
        what = f"a pull after push {push}"
        counts = self._compare(values, {push}, what)
        wanted = self.named.expected(counts, removed)
        self.named.compare(what, wanted, at, values[ANY])

    async def _remove(self, store: Any, push: int) -> None:
        """Remove the rows that a push has made for itself."""
        self.named.removing.add(push)
        work = store[ANY].remove(self.named.own(push), timeout=SECONDS)
        await self.watch.call(f"a remove after push {push}", awaited(work), SECONDS)
        self.named.removed.add(push)

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
            before, removed = set(self.acknowledged), {*self.named.removed}
            work = self._snapshot(link)
            try:
                values = await self.watch.call("a snapshot", work, SECONDS)
            except EXPECTED:
                continue
            wanted = self._moment(values, before, removed, "a snapshot")
            self._compare_named("a snapshot", wanted, *values[ANY])

    def _moment(
        self, values: Any, before: set[int], removed: set[int], what: str
    ) -> Any:
        """Find pushes of which one moment has a part; return what ids must read then."""
        rows = self._compare(values, before, what)
        # A push that was given up may be there in part.
        whole = [i for i in self.acknowledged if (rows[:, i] != rows[0, i]).any()]
        if whole:
            self.watch.wrong(f"{what} has a part of push {whole[0]}")
        return self.named.expected(rows, removed)

    # -- checkpoints -----------------------------------------------------------

    def known(self) -> tuple[set[int], set[int]]:
        """Return what a checkpoint that begins now must have: pushes, and what is removed."""
        return {*self.acknowledged}, {*self.named.removed}

    def check_restored(self, found: Restored, known: Any, what: str) -> None:
        """Compare what was restored with one moment, and what was known before that."""
        before, removed = known or (set(), set())
        wanted = self._moment(found.values, before, removed, what)
        every = np.arange(len(wanted))
        self.named.compare(what, wanted, every, found.values[ANY])
        self.named.compare_ids(what, wanted, found.values["ids"])
        if found.epochs != (0, 0, 0):
            self.watch.wrong(f"{what} has the epochs {found.epochs} of no run")

    def _compare_named(self, what: str, wanted: Any, ids: Any, rows: Any) -> None:
        """Compare all unbounded rows, and which there are, with what they must be."""
        self.named.compare_ids(what, wanted, ids)
        self.named.compare(what, wanted, self.named.places_of(ids), rows)

    async def _snapshot(self, link: Link) -> Any:
        # First: the answer may wait for a process that is stopped.
        deadline = Deadline(SECONDS, "a snapshot")
        meta = StoreMap(await link.directory("find", name=self.name))
        shards = ShardClient(link, meta)
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
        wanted = self.named.expected(rows, self.named.removed)
        self.named.compare("the end", wanted, np.arange(len(wanted)), values[ANY])
        self.named.compare_ids("the end", wanted, values["ids"])
        for follower in self.followers:
            follower.compare(wanted, f"{follower.name}, at the end")
