"""What goes wrong in a simulation: chosen by the seed, over a while, then no more."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, cast

from tests.simulator.files import SimFiles
from tests.simulator.ground import CHANCE, CLOCK

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from tests.simulator.loop import Process, VirtualLoop
    from tests.simulator.oracles import Watch
    from tests.simulator.world import World

#: Shares of messages that are lost: one of them for each seed.
LOSSES = (0.0, 0.05, 0.15, 0.3)
#: And of reads and writes of files that fail.
FILE_LOSSES = (0.0, 0.0, 0.02, 0.1)
#: How long faults come.
FAULT_SECONDS = (1.5, 5.0)
#: How long after a crash its peers see the end of their streams, at most.
SILENCE_SECONDS = 2.0
#: The same of the peers of a machine that loses its power: Dask looks every 5 s.
POWER_SECONDS = 12.0
#: The share of such ends before which no worker ends.
CALM_SHARE = 0.6
#: How long a run takes, about.
RUN_SECONDS = 1.5
#: How long two workers do not reach each other: for less, or more, than they are patient.
APART_SECONDS = (1.5, 8.0)
#: How long a worker hangs that Dask takes for lost meanwhile: it looks every 5 s.
HANG_SECONDS = 11.0
#: The share of stopped workers that have locked shards of their machine.
LOCK_SHARE = 0.4
#: How long a worker may take to close; then its nanny kills it.
CLOSE_SECONDS = 4.0
#: How often a machine ends, by how many kinds of stores have second copies.
_ENDS = (0,), (0, 0, 1), (0, 1, 1)


class Faults:
    """Disturbs a world for a while.

    Attributes
    ----------
    happened : list of str
        What was done, in order.
    """

    def __init__(
        self,
        world: World,
        watch: Watch,
        n_copies: Sequence[int],
        has_begun: asyncio.Event,
    ) -> None:
        self._world, self._watch = world, watch
        #: Set when trainers are at work.
        self._has_begun = has_begun
        self.happened: list[str] = []
        #: Workers that take the place of others.
        self.coming: list[asyncio.Future[None]] = []
        #: Those that were told to close.
        self._leaving: set[Process] = set()
        #: When the last one that hangs goes on.
        self._hangs_until = 0.0
        self._kinds = {
            self.crash: CHANCE.choice((0, 0, 1, 2)),
            self.crash_at_work: CHANCE.choice((0, 0, 1)),
            self.crash_at_file: CHANCE.choice((0, 0, 1)),
            self.crash_at_move: CHANCE.choice((0, 0, 1)),
            self.restart: CHANCE.choice((0, 1)),
            self.stop: CHANCE.choice((0, 1, 3)),
            self.cut: CHANCE.choice((0, 1, 3)),
            self.hang: CHANCE.choice((0, 0, 0, 0, 1)),
            self.close: CHANCE.choice((0, 0, 1, 2)),
            self.retire: CHANCE.choice((0, 0, 1)),
            self.close_machine: CHANCE.choice((0, 0, 0, 0, 0, 1)),
            self.part: CHANCE.choice((0, 0, 1)),
            # Of stores without second copies half is lost, which shows little.
            self.end_machine: CHANCE.choice(_ENDS[sum(n_copies) - 2]),
        }
        if self._kinds[self.end_machine] and CHANCE.random() < CALM_SHARE:
            # Else many shards have no copy just then.
            calm = self.stop, self.cut, self.part, self.end_machine
            self._kinds = {kind: self._kinds[kind] for kind in calm}

    async def run(self) -> None:
        """Disturb, then let everything be as it should."""
        network = self._world.network
        network.loss = CHANCE.choice(LOSSES)
        network.late = CHANCE.choice((0.0, 0.1))
        SimFiles.failing = CHANCE.choice(FILE_LOSSES)
        self._note(
            f"loss {network.loss:g}, late {network.late:g}, files {SimFiles.failing:g}"
        )
        seconds = CHANCE.uniform(*FAULT_SECONDS)
        due = [
            (CHANCE.uniform(0.0, seconds), kind)
            for kind, n in self._kinds.items()
            for _ in range(n)
        ]
        due.sort(key=lambda row: row[0])
        began = CLOCK.now
        for at, kind in due:
            await asyncio.sleep(max(0.0, began + at - CLOCK.now))
            await kind()
        end = max(began + seconds, self._hangs_until)
        await asyncio.sleep(max(0.0, end - CLOCK.now))
        network.loss = network.late = SimFiles.failing = 0.0
        network.heal()
        for process in self._world.network.processes.values():
            process.dies_at_work = process.dies_at_file = process.dies_at_move = False
            self.go_on(process)
        self._watch.quiet_at = CLOCK.now
        self._note("faults are over")

    def _note(self, what: str) -> None:
        self._world.network.note("fault", what)
        self.happened.append(f"{CLOCK.elapsed:.3f} {what}")

    # -- kinds ---------------------------------------------------------------

    async def crash(self) -> None:
        """End a worker; another one comes to its machine later, perhaps at once."""
        if (victim := self._victim()) is None:
            return
        self._note(f"crash {victim.name}")
        self._world.network.crash(victim, CHANCE.uniform(0.0, SILENCE_SECONDS))
        if CHANCE.random() < 0.7:
            self._replace(victim.machine, CHANCE.uniform(0.0, 3.0))

    async def crash_at_work(self) -> None:
        """End a worker when it changes unbounded rows next, half-way."""
        if (victim := self._doomed("change of rows")) is not None:
            victim.dies_at_work = True

    async def crash_at_file(self) -> None:
        """End a worker when it writes a file next, half-way."""
        if (victim := self._doomed("file")) is not None:
            victim.dies_at_file = True

    async def crash_at_move(self) -> None:
        """End a worker soon after it hands over a shard, or takes one over."""
        if (victim := self._doomed("move of a shard")) is not None:
            victim.dies_at_move = True

    def _doomed(self, what: str) -> Process | None:
        """Choose a worker that is to die at something; another one comes."""
        if (victim := self._victim()) is None:
            return None
        self._note(f"crash {victim.name} at its next {what}")
        self._leaving.add(victim)
        self._replace(victim.machine, CHANCE.uniform(0.0, 3.0))
        return victim

    async def restart(self) -> None:
        """End all workers of a machine; soon others come to the same addresses."""
        machine, victims = self._machine()
        if not self._spares(victims):
            return
        self._note(f"restart {machine}")
        for victim in victims:
            self._world.network.crash(victim, CHANCE.uniform(0.0, 0.2))
            # When the scheduler has heard of it, or it refuses them.
            self._replace(machine, CHANCE.uniform(0.3, 0.8), victim.pid)

    async def end_machine(self) -> None:
        """End all workers of a machine at once, with the memory that they share.

        In a run, where one begins soon.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_begun.wait(), RUN_SECONDS)
            await asyncio.sleep(CHANCE.uniform(0.0, RUN_SECONDS))
        machine, victims = self._machine()
        if not {*self._world.live} - self._leaving - {*victims}:
            return
        silence = CHANCE.choice(
            (0.0, CHANCE.uniform(0.0, SILENCE_SECONDS), POWER_SECONDS)
        )
        self._note(f"{machine} ends, heard of after {silence:.2g} s")
        self._hangs_until = max(self._hangs_until, CLOCK.now + silence)
        for victim in victims:
            self._world.network.crash(victim, silence)
        self._world.machines[machine].end()
        for _ in range(CHANCE.choice((0, 1, len(victims)))):
            self._replace(machine, CHANCE.uniform(0.3, 3.0))

    def _replace(self, machine: str, seconds: float, number: int = 0) -> None:
        """Have a worker come, to a certain address of its machine if one is given."""

        async def come() -> None:
            await asyncio.sleep(seconds)
            process = await self._world.start_worker(machine, number)
            self._note(f"{process.name} has come")

        self.coming.append(asyncio.ensure_future(come()))

    async def close(self) -> None:
        """Close a worker as SIGTERM does it; another one may come."""
        if (victim := self._victim()) is None:
            return
        self._note(f"close {victim.name}")
        self._end(victim, self._close(victim))
        if CHANCE.random() < 0.5:
            self._replace(victim.machine, CHANCE.uniform(0.0, 3.0))

    async def retire(self) -> None:
        """Have the scheduler retire a worker."""
        if (victim := self._victim()) is None:
            return
        self._note(f"retire {victim.name}")
        self._end(victim, self._retire(victim))

    async def close_machine(self) -> None:
        """Close all workers of a machine at once: what it has is freed."""
        machine, victims = self._machine()
        if not self._spares(victims):
            return
        self._note(f"close all of {machine}")
        for victim in victims:
            self._end(victim, self._close(victim))

    def _victim(self) -> Process | None:
        """Choose a worker that may be spared."""
        victim = CHANCE.choice(self._world.live)
        return victim if self._spares([victim]) else None

    def _machine(self) -> tuple[str, list[Process]]:
        """Choose a machine; return its workers too."""
        live = self._world.live
        machine = CHANCE.choice(live).machine
        return machine, [process for process in live if process.machine == machine]

    def _spares(self, victims: list[Process]) -> bool:
        """Whether none of these leaves already, and there are others that stay."""
        if self._leaving.intersection(victims):
            return False
        others = {*self._world.live} - self._leaving - {*victims}
        return bool(others)

    async def _close(self, victim: Process) -> None:
        await victim.spawn(self._world.workers[victim.name].close())

    async def _retire(self, victim: Process) -> None:
        worker = self._world.workers[victim.name]
        work = self._world.scheduler.retire_workers(
            workers=[worker.address], close_workers=True
        )
        await self._world.hub.spawn(work)
        await worker.finished()

    def _end(
        self, victim: Process, closing: Coroutine[Any, Any, None], seconds: float = 0.0
    ) -> None:
        """Have a worker close; its process ends with that, or is killed.

        It may take so many seconds longer.
        """
        self._leaving.add(victim)
        limit = seconds + CLOSE_SECONDS

        async def end() -> None:
            # In no process: it would be stopped, or die, with that.
            await asyncio.wait({asyncio.ensure_future(closing)}, timeout=limit)
            if not victim.is_dead:
                self._note(f"{victim.name} ends")
                self._world.network.crash(victim, 0.0)

        self.coming.append(asyncio.ensure_future(end()))

    async def stop(self) -> None:
        """Stop a worker or a client for a while."""
        network = self._world.network
        users = [p for p in network.processes.values() if p.machine == "user"]
        process = CHANCE.choice(CHANCE.choice((self._world.live, users)))
        seconds = CHANCE.choice((0.05, 0.3, 1.0, 2.5))
        if process.is_stopped or process.is_dead:
            return
        self._stop(process, seconds)

    def _stop(self, process: Process, seconds: float) -> None:
        machine, how = self._world.machines.get(process.machine), ""
        if machine is not None and CHANCE.random() < LOCK_SHARE:
            n = machine.lock_some(process)
            how = f", who has locked {n} of its machine's blocks"
        self._note(f"stop {process.name} for {seconds:g} s{how}")
        process.is_stopped = True
        asyncio.get_running_loop().call_later(seconds, self.go_on, process)

    def go_on(self, process: Process) -> None:
        """Let a stopped process go on."""
        if process.is_stopped and not process.is_dead:
            self._note(f"{process.name} goes on")
            if (machine := self._world.machines.get(process.machine)) is not None:
                machine.unlock_all(process)
            loop = cast("VirtualLoop", asyncio.get_running_loop())
            loop.go_on(process)

    async def hang(self) -> None:
        """Stop a worker until Dask has taken it for lost; it hears of that, and closes."""
        victim = CHANCE.choice(self._world.live)
        if victim.is_stopped or not self._spares([victim]):
            return
        self._stop(victim, HANG_SECONDS)
        self._hangs_until = max(self._hangs_until, CLOCK.now + HANG_SECONDS)
        self._end(victim, self._world.workers[victim.name].finished(), HANG_SECONDS)
        if CHANCE.random() < 0.5:
            self._replace(victim.machine, HANG_SECONDS + CHANCE.uniform(-5.0, 2.0))

    async def cut(self) -> None:
        """Hold back what one process sends another, for a while."""
        network = self._world.network
        names = [p.name for p in network.processes.values() if not p.is_dead]
        source, target = CHANCE.sample(names, 2)
        seconds = CHANCE.choice((0.1, 0.5, 1.5))
        self._note(f"cut {source} > {target} for {seconds:g} s")
        network.cut(source, target)
        asyncio.get_running_loop().call_later(seconds, network.mend, source, target)

    async def part(self) -> None:
        """Cut two workers apart; both still reach the scheduler."""
        if len(live := self._world.live) < 2:
            return
        network, seconds = self._world.network, CHANCE.choice(APART_SECONDS)
        one, other = (process.name for process in CHANCE.sample(live, 2))
        self._note(f"cut {one} and {other} apart for {seconds:g} s")
        self._hangs_until = max(self._hangs_until, CLOCK.now + seconds)
        for link in ((one, other), (other, one)):
            network.cut(*link)
            asyncio.get_running_loop().call_later(seconds, network.mend, *link)
