"""One simulation: a cluster, work, faults, and what must hold in the end."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import daskps
from daskps import optim
from daskps.errors import ShardLostError
from daskps.testing.faults import Faults
from daskps.testing.ground import CHANCE, CLOCK
from daskps.testing.oracles import EXPECTED, FoundError, Watch
from daskps.testing.pushing import Pushes
from daskps.testing.training import Training
from daskps.testing.world import World

if TYPE_CHECKING:
    from distributed import Client

    from daskps.testing.loop import Process

#: Machines of the workers at the beginning.
MACHINES = ("m0", "m0", "m1", "m1")
N_SHARDS = 4
N_PUSHES = 24
N_CLIENTS = 2
#: Nothing takes longer, or it never ends.
MOST_SECONDS = 120.0


@dataclass(frozen=True)
class Report:
    """What came of one seed."""

    seed: int
    finding: str
    trace: str
    seconds: float
    n_sent: int
    n_lost: int
    happened: list[str] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


async def simulate(seed: int) -> Report:
    """Run one simulation to its end, or to its first finding."""
    scenario = _Scenario()
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
    return Report(
        seed,
        watch.finding,
        network.trace,
        round(CLOCK.elapsed, 6),
        network.n_sent,
        network.n_lost,
        scenario.happened,
        dict(sorted(watch.outcomes.items())),
    )


class _Scenario:
    def __init__(self) -> None:
        self.world, self.watch = World(), Watch()
        self.world.network.after = self.watch.look
        self.watch.follow_publications()
        self.happened: list[str] = []

    async def run(self) -> None:
        world = self.world
        await world.start_scheduler()
        for machine in MACHINES:
            await world.start_worker(machine)
        process, client = await world.start_client()
        users = [await world.start_client() for _ in range(N_CLIENTS)]
        await world.within(process, self._work(client, users))

    async def _work(self, client: Client, users: list[tuple[Process, Client]]) -> None:
        pushes = Pushes(self.watch, N_SHARDS, N_PUSHES)
        await daskps.create(
            pushes.params(),
            name=pushes.name,
            shards=N_SHARDS,
            optimizer=optim.SGD(lr=1.0),
            client=client,
        )
        training = Training(self.world, self.watch, N_SHARDS)
        trained = await daskps.create(
            training.params(),
            name=training.name,
            shards=N_SHARDS,
            optimizer=optim.SGD(lr=1.0),
            client=client,
        )
        faults = Faults(self.world, self.watch)
        self.happened = faults.happened
        link = self.world.link(client)
        jobs = [faults.run()]
        for i, (process, user) in enumerate(users):
            jobs.append(self.world.within(process, pushes.push_all(user, i, N_CLIENTS)))
        if CHANCE.random() < 0.7:
            jobs.append(pushes.snapshots(link, 3))
        jobs.append(training.run(link, trained.uid))
        await asyncio.gather(*jobs)
        self.happened.append(
            f"the {training.policy} run {'is complete' if training.is_complete else training.why}"
        )
        try:
            await pushes.check(client)
            work = trained.pull(timeout=10)
            training.check(await self.watch.call("the last pull", _awaited(work), 10.0))
        except EXPECTED as error:
            if not (faults.lossy and isinstance(error, ShardLostError)):
                self.watch.wrong(f"the last pull failed: {error!r}")


async def _awaited(work: Any) -> Any:
    return await work
