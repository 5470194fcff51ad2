"""One simulation: a cluster, work, faults, and what must hold in the end."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import daskps
from daskps.errors import ShardLostError
from tests.simulator.checkpoints import SimCheckpoints
from tests.simulator.draining import Draining
from tests.simulator.exchanges import Exchanges
from tests.simulator.faults import Faults
from tests.simulator.ground import CHANCE, CLOCK
from tests.simulator.named_ids import ANY
from tests.simulator.oracles import EXPECTED, FoundError, Watch
from tests.simulator.promoting import Promotions
from tests.simulator.pushing import OneHotPushes
from tests.simulator.training import NOT_BEGUN, Training
from tests.simulator.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distributed import Client

    from daskps.layout.arrays import Layout
    from tests.simulator.checkpoints import SimJob
    from tests.simulator.loop import Process

#: Machines of the workers at the beginning.
MACHINES = ("m0", "m0", "m1", "m1")
N_SHARDS = 4
N_PUSHES = 25
#: Copies of each shard of the stores that are pushed to, and of the one that is trained:
#: one after the other for each seed.
N_COPIES = (2, 2), (1, 2), (1, 1)
N_CLIENTS = 2
#: Which pushes are whose: one is made when all is quiet, some others by workers.
N_OF_CLIENTS, LAST = 20, N_PUSHES - 1
OWN = [*range(0, N_OF_CLIENTS, 2), LAST], [*range(1, N_OF_CLIENTS, 2)]
#: How long after its last call a cluster may take to come to rest.
SETTLE_SECONDS = 2.0
#: How long it may take until a worker is asked whether it finds a shard that is lost.
BACK_SECONDS = 12.0
#: Deadline of the last pull.
LAST_SECONDS = 10.0
#: How long it may take to tell of shards that were freed.
LOST_SECONDS = 1.0
#: Nothing takes longer, or it never ends.
MOST_SECONDS = 120.0


@dataclass(frozen=True)
class SeedReport:
    """What came of one seed."""

    seed: int
    finding: str
    trace: str
    seconds: float
    n_sent: int
    n_lost: int
    n_restored: int = 0
    n_moved: int = 0
    #: Copies that have taken over, and runs that went on then to their end.
    n_promoted: int = 0
    n_gone_on: int = 0
    happened: list[str] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


async def simulate(seed: int) -> SeedReport:
    """Run one simulation to its end, or to its first finding."""
    scenario = _Scenario(*N_COPIES[seed % len(N_COPIES)])
    watch, network = scenario.watch, scenario.world.network
    work = asyncio.ensure_future(scenario.run())
    found = asyncio.ensure_future(watch.until_found())
    await asyncio.wait(
        {work, found}, timeout=MOST_SECONDS, return_when=asyncio.FIRST_COMPLETED
    )
    if not work.done():
        watch.wrong(f"nothing came to an end within {MOST_SECONDS:g} s")
    elif (error := work.exception()) and not isinstance(error, FoundError):
        watch.wrong(f"the simulation itself failed: {error!r}")
    return SeedReport(
        seed,
        watch.finding,
        network.trace,
        round(CLOCK.elapsed, 6),
        network.n_sent,
        network.n_lost,
        scenario.n_restored,
        scenario.n_moved,
        scenario.promotions.n_promoted,
        scenario.promotions.n_gone_on,
        scenario.happened,
        dict(sorted(watch.outcomes.items())),
    )


class _Scenario:
    def __init__(self, *n_copies: int) -> None:
        #: Of each shard of the store that is pushed to, and of the one that is trained.
        self.n_copies = n_copies
        self.world, self.watch = World(), Watch()
        self.world.network.after = self.watch.look
        self.watch.follow_publications()
        self.watch.follow_calls()
        self.happened: list[str] = []
        self.n_restored = self.n_moved = 0
        self.promotions = Promotions(self.world, self.watch)
        self.promotions.follow()
        self.users: list[tuple[Process, Client]] = []

    async def run(self) -> None:
        """Begin, disturb, wait for the end of all calls, and compare."""
        world, watch = self.world, self.watch
        await world.start_scheduler()
        for machine in MACHINES:
            await world.start_worker(machine)
        process, client = await world.start_client()
        self.users = [await world.start_client() for _ in range(N_CLIENTS)]
        pushes = OneHotPushes(watch, N_SHARDS, N_PUSHES)
        training = Training(world, watch, N_SHARDS)
        exchanges = Exchanges(watch, N_SHARDS, N_CLIENTS)
        jobs: tuple[SimJob, ...] = pushes, training
        for job, copies in zip(jobs, self.n_copies, strict=True):
            made = _create(job, client, copies)
            job.named.know(await world.within(process, made))
        await world.within(process, _create(exchanges, client, self.n_copies[0]))
        faults = Faults(world, watch, self.n_copies, training.has_begun)
        link = world.link(client)
        checkpoints = SimCheckpoints(
            world, watch, (pushes, training), others={exchanges.name}
        )
        draining = Draining(world, watch)
        self.happened = faults.happened
        await asyncio.gather(
            # In no process: it would be stopped with that.
            faults.run(),
            checkpoints.run(),
            *(
                world.within(user, work)
                for number, ((user, its_client), own) in enumerate(
                    zip(self.users, OWN, strict=True)
                )
                for work in (
                    pushes.push_all(its_client, [i for i in own if i != LAST]),
                    pushes.follow(its_client, own),
                    exchanges.sync(its_client, number),
                    draining.run(its_client),
                )
            ),
            world.within(process, exchanges.scale(client)),
            pushes.push_by_tasks(world, range(N_OF_CLIENTS, LAST)),
            world.within(process, pushes.follow(client, ())),
            world.within(process, training.follow(client)),
            world.within(process, pushes.snapshots(link, CHANCE.choice((0, 2, 4)))),
            world.within(process, training.run(link)),
        )
        await asyncio.gather(*faults.coming)
        self.happened.append(f"the {training.policy} run {training.outcome}")
        self._look_at_run(training)
        # A host that was silent is told of the end of a run when it wakes.
        await asyncio.sleep(SETTLE_SECONDS)
        await self._until_none_is_away()
        watch.look_for_runs(world.live)
        watch.look_for_copies(world.live)
        await draining.check()
        self.promotions.check()
        for job in (pushes, training):
            with self._quiet(job):
                await world.within(process, draining.drain_last(job.name, client))
            await world.within(process, self._compare(job, client))
            await world.within(process, self._save_last(checkpoints, job, client))
        await self._end(exchanges, process, client)
        await world.within(process, checkpoints.check(client))
        # A copy that is where its owner has come goes a little later.
        await asyncio.sleep(SETTLE_SECONDS)
        await draining.check()
        self.n_restored, self.n_moved = checkpoints.n_restored, draining.n_moved

    def _look_at_run(self, training: Training) -> None:
        """Find a run in rounds that has ended with the owner of a shard, despite copies.

        But for one that not all shards have begun.
        """
        had_begun = not training.why.startswith(NOT_BEGUN)
        if self.n_copies[1] > 1 and "open round" in training.why and had_begun:
            self.watch.wrong(f"the run {training.outcome}")

    async def _until_none_is_away(self) -> None:
        """Wait until each shard has an owner or is lost: so long runs of it are held.

        And for drains that nobody waits for any more, one of whose workers has gone; and
        for workers that were retired, until their time to send shards is over.
        """
        directory = self.world.scheduler.extensions["daskps-directory"]
        stores, drains = directory.stores, directory.drains
        for _ in range(int(MOST_SECONDS / SETTLE_SECONDS)):
            is_open = any(e.away or e.sent_on for e in stores.values())
            if not (is_open or drains.under_way):
                break
            await asyncio.sleep(SETTLE_SECONDS)
        if any(entry.lost for entry in stores.values()):
            # Who has come since then to their machine finds them, and brings them back.
            await asyncio.sleep(BACK_SECONDS)

    async def _compare(self, job: OneHotPushes | Training, client: Client) -> None:
        with self._quiet(job):
            if isinstance(job, OneHotPushes):
                user, its_client = self.users[0]
                await self.world.within(user, job.push_last(its_client))
            for follower in job.followers:
                await self.world.within(follower.process, follower.ask(LAST_SECONDS))
            work = _pull(job, client)
            job.check(await self.watch.call("the last pull", work, LAST_SECONDS))

    async def _end(
        self, exchanges: Exchanges, process: Process, client: Client
    ) -> None:
        with self._quiet(exchanges):
            for its_process, replica in exchanges.replicas.values():
                await self.world.within(its_process, exchanges.sync_once(replica))
            work = self.world.within(process, exchanges.use_rates(client))
            await self.watch.call("the last push", work, LAST_SECONDS)

    @contextmanager
    def _quiet(self, job: OneHotPushes | Training | Exchanges) -> Iterator[None]:
        """Find errors of a store when all is quiet, but for what its machine has kept."""
        began = CLOCK.now
        try:
            yield
        except EXPECTED as error:
            took = CLOCK.now - began
            if self._freed() and took > LOST_SECONDS:
                self.watch.wrong(f"{job.name} was freed, told after {took:.1f} s")
            if not self._may_be_lost(error):
                self.watch.wrong(f"{job.name} cannot be used at the end: {error!r}")

    async def _save_last(
        self, checkpoints: SimCheckpoints, job: SimJob, client: Client
    ) -> None:
        """Save once more when all is quiet: that must go well."""
        try:
            await checkpoints.save(job, client)
        except EXPECTED as error:
            if not self._may_be_lost(error):
                self.watch.wrong(f"{job.name} cannot be saved at the end: {error!r}")

    def _may_be_lost(self, error: Exception) -> bool:
        """Whether a call may end with an error when all is quiet: with its machine."""
        return isinstance(error, ShardLostError) and bool(
            self._without() | self._freed() | self._ended()
        )

    def _without(self) -> set[str]:
        """Return the machines that have no worker."""
        return set(MACHINES) - {process.machine for process in self.world.live}

    def _ended(self) -> set[str]:
        """Return the machines that have ended with their memory."""
        return {m.name for m in self.world.machines.values() if m.has_ended}

    def _freed(self) -> set[str]:
        """Return the machines whose last worker has left in order."""
        return {m.name for m in self.world.machines.values() if m.is_freed}


async def _create(
    job: OneHotPushes | Training | Exchanges, client: Client, copies: int = 1
) -> Layout:
    store = await daskps.aio.create(
        job.params(),
        name=job.name,
        shards=N_SHARDS,
        optimizer=job.optimizer(),
        client=client,
        copies=copies,
    )
    layout: Layout = store.layout
    return layout


async def _pull(job: OneHotPushes | Training, client: Client) -> Any:
    store = await daskps.aio.open(job.name, client=client)
    values = await store.pull(rows=job.asked(), timeout=LAST_SECONDS)
    ids, stats = await store[ANY].ids(timeout=LAST_SECONDS), await store.stats()
    return {**values, "ids": ids, "shards": stats["shards"]}
