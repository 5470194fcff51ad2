"""What goes wrong in a simulation: chosen by the seed, over a while, then no more."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from daskps.testing.ground import CHANCE

if TYPE_CHECKING:
    from daskps.testing.loop import Process, VirtualLoop
    from daskps.testing.oracles import Watch
    from daskps.testing.world import World

#: Shares of messages that are lost: one of them for each seed.
LOSSES = (0.0, 0.05, 0.15, 0.3)
#: How long faults come.
FAULT_SECONDS = (1.5, 5.0)
#: How long after a crash its peers see the end of their streams, at most.
SILENCE_SECONDS = 2.0


class Faults:
    """Disturbs a world for a while.

    Attributes
    ----------
    happened : list of str
        What was done, in order.
    lossy : set of str
        Machines on which shards may be lost: no worker was left that could adopt.
    """

    def __init__(self, world: World, watch: Watch) -> None:
        self._world, self._watch = world, watch
        self.happened: list[str] = []
        self.lossy: set[str] = set()
        self._coming: list[asyncio.Future[None]] = []
        self._kinds = {
            self.crash: CHANCE.choice((0, 0, 1, 2)),
            self.stop: CHANCE.choice((0, 1, 3)),
            self.cut: CHANCE.choice((0, 1, 3)),
        }

    async def run(self) -> None:
        """Disturb, then let everything be as it should."""
        network = self._world.network
        network.loss = CHANCE.choice(LOSSES)
        network.late = CHANCE.choice((0.0, 0.1))
        self._note(f"loss {network.loss:g}, late {network.late:g}")
        seconds = CHANCE.uniform(*FAULT_SECONDS)
        due = [
            (CHANCE.uniform(0.0, seconds), kind)
            for kind, n in self._kinds.items()
            for _ in range(n)
        ]
        due.sort(key=lambda row: row[0])
        loop, began = asyncio.get_running_loop(), network.now
        for at, kind in due:
            await asyncio.sleep(max(0.0, began + at - network.now))
            await kind()
        await asyncio.sleep(max(0.0, began + seconds - network.now))
        network.loss = network.late = 0.0
        network.heal()
        for process in self._world.network.processes.values():
            self.go_on(process)
        self._watch.quiet_at = loop.time()
        self._note("faults are over")

    def _note(self, what: str) -> None:
        self._world.network.note("fault", what)
        self.happened.append(f"{self._world.network.elapsed:.3f} {what}")

    # -- kinds ---------------------------------------------------------------

    async def crash(self) -> None:
        """End a worker; another one comes to its machine later, perhaps at once."""
        victim = CHANCE.choice(self._world.live)
        mates = [
            p
            for p in self._world.live
            if p is not victim and p.machine == victim.machine
        ]
        if not any(not p.is_stopped for p in mates):
            self.lossy.add(victim.machine)
        self._note(f"crash {victim.name}")
        self._world.network.crash(victim, CHANCE.uniform(0.0, SILENCE_SECONDS))
        if CHANCE.random() < 0.7:
            self._coming.append(asyncio.ensure_future(self._replace(victim.machine)))

    async def _replace(self, machine: str) -> None:
        await asyncio.sleep(CHANCE.uniform(0.0, 3.0))
        process = await self._world.start_worker(machine)
        self._note(f"{process.name} has come")

    async def stop(self) -> None:
        """Stop a process for a while."""
        process = CHANCE.choice(self._world.live)
        seconds = CHANCE.choice((0.05, 0.3, 1.0, 2.5))
        if process.is_stopped or process.is_dead:
            return
        self._note(f"stop {process.name} for {seconds:g} s")
        process.is_stopped = True
        asyncio.get_running_loop().call_later(seconds, self.go_on, process)

    def go_on(self, process: Process) -> None:
        """Let a stopped process go on."""
        if process.is_stopped and not process.is_dead:
            self._note(f"{process.name} goes on")
            loop: VirtualLoop = asyncio.get_running_loop()  # type: ignore[assignment]
            loop.go_on(process)

    async def cut(self) -> None:
        """Hold back what one process sends another, for a while."""
        network = self._world.network
        names = [p.name for p in network.processes.values() if not p.is_dead]
        source, target = CHANCE.sample(names, 2)
        seconds = CHANCE.choice((0.1, 0.5, 1.5))
        self._note(f"cut {source} > {target} for {seconds:g} s")
        network.cut(source, target)
        asyncio.get_running_loop().call_later(seconds, network.mend, source, target)
