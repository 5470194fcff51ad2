"""Saves of the stores of a simulation, and other stores that are restored from them."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import daskps
from daskps.checkpoint import listing
from daskps.checkpoint.storage import Storage
from daskps.epochs import Epochs
from daskps.errors import CheckpointError
from tests.simulator.files import SCHEME
from tests.simulator.following import awaited, opened
from tests.simulator.ground import CHANCE
from tests.simulator.named_ids import ANY
from tests.simulator.oracles import EXPECTED, SECONDS, Restored
from tests.simulator.pushing import OneHotPushes
from tests.simulator.training import N_CLOCKS, Training

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine, Sequence

    from distributed import Client

    from tests.simulator.loop import Process
    from tests.simulator.oracles import Watch
    from tests.simulator.world import World

#: What has a store that is saved.
SimJob: TypeAlias = OneHotPushes | Training
#: How many shards a restored store has.
N_SHARDS = (1, 2, 3, 5)
#: The share of savers that die at it, by when and how late others hear of it.
DYING_SHARE = 0.3
DYING_SECONDS = 0.3
SILENCE_SECONDS = 1.0
#: The share of savers that remove older checkpoints, and how many stay.
RETAIN_SHARE, KEPT = 0.3, 1
#: How often a saver is looked for in a process that has died.
LOOK_SECONDS = 0.1


@dataclass(eq=False)
class SimCheckpoints:
    """Saves at random moments, by processes that may die; and restores.

    Attributes
    ----------
    n_restored : int
        How many stores were restored and compared.
    """

    world: World
    watch: Watch
    jobs: Sequence[SimJob]
    #: Names of stores that it has nothing to do with.
    others: Collection[str] = ()
    n_restored: int = 0
    #: By URL of a checkpoint what was known before it began to be saved.
    _known: dict[str, Any] = field(default_factory=dict)
    #: Restored stores that may be left, as nobody has heard that they were deleted.
    _left: set[str] = field(default_factory=set)
    _saver: tuple[Process, Client] | None = None

    async def run(self) -> None:
        """Save some, and restore some of what was saved, while there are faults."""
        for _ in range(CHANCE.choice((0, 1, 3, 5))):
            await asyncio.sleep(CHANCE.uniform(0.0, 1.0))
            process, client = await self._find_saver()
            job, dies = CHANCE.choice(self.jobs), CHANCE.random() < DYING_SHARE
            work = CHANCE.choice((self._try_save, self._try_save, self._try_restore))
            if dies and CHANCE.random() < 0.5:
                process.dies_at_file = True
            elif dies:
                seconds = CHANCE.uniform(0.0, DYING_SECONDS)
                asyncio.get_running_loop().call_later(seconds, self._end, process)
            await _within(process, work(job, client))
            process.dies_at_file = False

    async def _find_saver(self) -> tuple[Process, Client]:
        """Return a process that lives."""
        while self._saver is None or self._saver[0].is_dead:
            # Its first message may be lost.
            with contextlib.suppress(OSError):
                self._saver = await self.world.start_client()
        return self._saver

    def _end(self, process: Process) -> None:
        if not process.is_dead:
            self.world.network.crash(process, CHANCE.uniform(0.0, SILENCE_SECONDS))

    async def _try_save(self, job: SimJob, client: Client) -> None:
        try:
            info = await self.save(job, client)
            if CHANCE.random() < RETAIN_SHARE:
                storage = Storage(_url(job))
                retain = asyncio.to_thread(listing.retain, storage, info.lineage, KEPT)
                await self.watch.call("a retention", retain, SECONDS)
        except EXPECTED:
            return

    async def save(self, job: SimJob, client: Client) -> daskps.CheckpointInfo:
        """Save a store."""
        store, known = await opened(job.name, client), job.known()
        work = store.save(_url(job), timeout=SECONDS)
        info: daskps.CheckpointInfo = await self.watch.call(
            "a save", awaited(work), SECONDS
        )
        self._known[info.url] = known
        return info

    # -- restores --------------------------------------------------------------

    async def _try_restore(self, job: SimJob, client: Client) -> None:
        """Restore whatever there is, and compare it."""
        try:
            if whole := self._folders(job)[0]:
                await self._restore(job, client, CHANCE.choice(whole))
        except EXPECTED:
            return

    def _folders(self, job: SimJob) -> tuple[list[str], list[str]]:
        """Return the checkpoints of a store by URL: those that are whole, and others."""
        storage = Storage(_url(job))
        every = [f for f in storage.folders() if listing.number_of(f) >= 0]
        found = listing.entries(storage)
        whole = {entry.folder for entry in found if entry.manifest is not None}
        urls = {folder: f"{_url(job)}/{folder}" for folder in every}
        return (
            [url for folder, url in urls.items() if folder in whole],
            [url for folder, url in urls.items() if folder not in whole],
        )

    async def _restore(
        self, job: SimJob, client: Client, url: str, *, goes_on: bool = False
    ) -> None:
        """Make a store of a checkpoint, compare and delete it."""
        name, n_shards = f"again-{len(self._left)}", CHANCE.choice(N_SHARDS)
        about: Any = {"name": name, "client": client, "shards": n_shards}
        work = daskps.restore(url, **about, timeout=SECONDS)
        store = await self.watch.call("a restore", awaited(work), SECONDS)
        self._left.add(name)
        found = await self.watch.call("a read", self._read(job, client, store), SECONDS)
        job.check_restored(found, self._known.get(url), f"a restore of {url}")
        self.n_restored += 1
        if goes_on and isinstance(job, Training) and job.is_bsp:
            await self._go_on(job.going_on(name, found.epochs, n_shards), client, store)
        gone = awaited(store.delete(timeout=SECONDS))
        await self.watch.call("a delete", gone, SECONDS)

    async def _read(self, job: SimJob, client: Client, store: Any) -> Restored:
        values = await store.pull(rows=job.asked(), timeout=SECONDS)
        ids = await store[ANY].ids(timeout=SECONDS)
        link = self.world.link(client)
        epochs, _ = await link.directory("epochs", uid=store.uid)
        return Restored({**values, "ids": ids}, Epochs(*epochs))

    async def _go_on(self, rest: Training, client: Client, store: Any) -> None:
        """Do what is left of a run: it must lead to where it would have led at once."""
        await rest.run(self.world.link(client))
        found = await self._read(rest, client, store)
        rest.check(found.values)
        if not rest.is_complete or found.epochs.clock != N_CLOCKS:
            self.watch.wrong(f"a run that goes on {rest.outcome}, at {found.epochs}")

    async def check(self, client: Client) -> None:
        """When all is quiet: restore two of each store; what is not whole is refused."""
        for job in self.jobs:
            whole, others = self._folders(job)
            # The last one, and one of those that were made while there were faults.
            chosen = whole[-1:] + ([CHANCE.choice(whole[:-1])] if whole[1:] else [])
            for url in chosen:
                try:
                    await self._restore(job, client, url, goes_on=url == chosen[-1])
                except EXPECTED as error:
                    self.watch.wrong(f"{url} cannot be restored: {error!r}")
            for url in others:
                await self._refused(url, client)
        stores = self.world.scheduler.extensions["daskps-directory"].stores
        known = {job.name for job in self.jobs} | self._left | {*self.others}
        for entry in stores.values():
            if entry.name not in known:
                self.watch.wrong(f"store {entry.name} is left of a restore that failed")

    async def _refused(self, url: str, client: Client) -> None:
        """Restore what is no checkpoint."""
        try:
            await awaited(daskps.restore(url, name="none", client=client))
        except CheckpointError:
            return
        self.watch.wrong(f"{url} was restored, which is not whole")


def _url(job: SimJob) -> str:
    return f"{SCHEME}://{job.name}"


async def _within(process: Process, work: Coroutine[Any, Any, None]) -> None:
    """Wait for some work of a process, unless that dies."""
    task = process.spawn(work)
    if await process.sees_end(task, LOOK_SECONDS):
        task.result()
