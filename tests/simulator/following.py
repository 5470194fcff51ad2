"""Copies of tables in a simulation that are kept by what is told of changes alone."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

import daskps
from daskps.errors import IllegalStateError
from tests.simulator.delays import CLOSE
from tests.simulator.ground import CHANCE
from tests.simulator.loop import PROCESS
from tests.simulator.named_ids import ANY
from tests.simulator.oracles import EXPECTED

if TYPE_CHECKING:
    from collections.abc import Collection

    from distributed import Client

    from daskps.typing import Array
    from tests.simulator.loop import Process
    from tests.simulator.named_ids import NamedIds
    from tests.simulator.oracles import Watch


@dataclass(eq=False)
class Follower:
    """A copy of an unbounded table, of one process.

    What the process has pushed itself it is not told, so that nothing is known of what
    its own steps have touched last.

    Parameters
    ----------
    watch : Watch
        Hears of what is wrong.
    named : NamedIds
        What steps name in the table.
    store : object
        The handle of this process.
    name : str
        Whose copy it is, for messages.
    own : collection of int
        Steps of this process.
    """

    watch: Watch
    named: NamedIds
    store: Any
    name: str
    own: Collection[int] = ()
    #: What the call before has returned to go on with.
    since: Any = None
    #: Of each id; 0 for one that has no row.
    copy: Array = field(init=False)
    #: Where it is.
    process: Process = field(init=False)

    def __post_init__(self) -> None:
        self.copy = np.zeros(len(self.named.ids))
        if (process := PROCESS.get()) is None:
            raise IllegalStateError("a follower is in no process")
        self.process = process

    async def follow(self, times: int, whole: Any, seconds: float) -> None:
        """Ask so often; each time all must be told that was acknowledged before.

        `whole` returns the steps that were.
        """
        for _ in range(times):
            await asyncio.sleep(CHANCE.uniform(0.0, 1.0))
            before, removed = {*whole()}, {*self.named.removed}
            try:
                await self.ask(seconds)
            except EXPECTED:
                continue
            for_all = np.isin(self.named.steps, [*before])
            wanted = np.where(for_all, 1.0, np.nan)
            wanted[np.isin(self.named.steps, [*self.named.removing])] = np.nan
            wanted[np.isin(self.named.steps, [*removed])] = 0.0
            self.compare(wanted, f"{self.name}, of acknowledged steps")

    async def ask(self, seconds: float) -> None:
        """Take what has changed."""
        table = self.store[ANY]
        work = table.pull_changed(self.since, timeout=seconds)
        changes = await self.watch.call("a look for changes", awaited(work), seconds)
        at = self.named.places_of(changes.ids)
        if (at < 0).any():
            self.watch.wrong(f"{self.name} is told of ids that nobody has named")
            return
        if not changes.complete:
            # What is not named reads as in the beginning.
            self.copy[:] = 0.0
        self.copy[at], self.since = changes.rows[:, 0], changes.since

    def compare(self, wanted: Array, what: str) -> None:
        """Find ids whose copy is not what they read; NaN where that is not known."""
        known = ~np.isnan(wanted) & ~np.isin(self.named.steps, [*self.own])
        if self.own:
            # They have changed what all steps name.
            known &= self.named.steps >= 0
        differ = known & ~(abs(self.copy - wanted) <= CLOSE)
        if differ.any():
            i = int(np.flatnonzero(differ)[0])
            self.watch.wrong(
                f"{what}: it has {self.copy[i]:g} for {self.named.told(i)}, which reads "
                f"{wanted[i]:g}"
            )


async def opened(name: str, client: Client) -> Any:
    """Return a handle of a store, however often that has to be tried."""
    while True:
        try:
            return await daskps.aio.open(name, client=client)
        except EXPECTED:
            await asyncio.sleep(0.1)


async def awaited(work: Any) -> Any:
    """Await what a handle returns: it may be any awaitable."""
    return await work
