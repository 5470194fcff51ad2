"""Ends a run with the same round on all shards of its store.

A trainer sends its step to all hosts at once, so what one shard has applied may still
be on its way to the rest; or it never comes, for its trainer died, or one of them
cannot apply it. So shards are *held* first, and none gets ahead of what it reports.
Those that are behind may catch up for a moment. Then all end with the round that the
last of them has, and those that are ahead by one withdraw theirs.

A shard that nobody can reach is waited for: until it has heard of the end the store
stays held. Its limit is in the segment, whoever takes it over.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from daskps.errors import DaskPSError
from daskps.shards.steps import RunPosition

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from daskps.cluster.directory.entry import Hosts
    from daskps.cluster.directory.run import RunState

logger = logging.getLogger(__name__)
#: How long shards that are a round behind may take to catch up.
SETTLE_SECONDS = 0.5
#: How long steps of the run wait where not all of its shards can be reached.
_REFUSE_SECONDS = 0.75
#: How long the task that ends a run waits for the next thing to be done; the rest is
#: done without it.
END_SECONDS = 1.0
#: Between two looks at which shards have caught up, and at those not held.
LOOK_SECONDS, PAUSE_SECONDS = 0.005, 0.05


class Settlement(NamedTuple):
    """How a run ends: after so many rounds, and at which version at least."""

    rounds: int | None = None
    version: int = 0


def agree(found: Collection[RunPosition]) -> Settlement:
    """Return how a run ends whose shards stand like that, and are held there.

    No version names two states: where a round is withdrawn on some shards, all of them
    end at a version that none has had.
    """
    rounds = {s.rounds for s in found if s.rounds >= 0}
    if not rounds:
        return Settlement()
    apart = len(rounds) > 1
    return Settlement(min(rounds), 1 + max(s.version for s in found) if apart else 0)


def goal(found: Collection[RunPosition]) -> int:
    """Return the round that all shards may reach: no further than those that cannot."""
    last = max((s.rounds for s in found), default=-1)
    return min((s.rounds for s in found if s.is_stuck and s.rounds >= 0), default=last)


class RunEnd:
    """The end of one run on all shards of its store.

    Parameters
    ----------
    hosts : Hosts
        The way to them.
    run : RunState
        The run.
    reason : str
        Why it ends, for its trainers.
    """

    def __init__(self, hosts: Hosts, run: RunState, reason: str) -> None:
        self._hosts, self._run, self._reason = hosts, run, reason

    async def settle(self) -> Settlement:
        """End the run, however long that takes; return how."""
        self._go_on()
        found = Settlement()
        if self._run.bsp:
            refusing = asyncio.ensure_future(self._refuse_later())
            try:
                found = await self._held()
            finally:
                refusing.cancel()
        await self._every("end_run", reason=self._reason, **found._asdict())
        return found

    async def _held(self) -> Settlement:
        """Hold all shards, let those behind catch up, and say how the run ends."""
        found = await self._positions_of()
        to = goal(found.values())
        if any(s.rounds < to and not s.is_stuck for s in found.values()):
            finished = sorted({r for s in found.values() for r in s.finished})
            await self._caught_up(to, finished)
            # As they are now: from here on none of them moves.
            found = await self._positions_of()
        return agree(found.values())

    async def _positions_of(self, **about: Any) -> dict[int, RunPosition]:
        rows = await self._every("hold", **about)
        return {i: RunPosition(*row) for i, row in rows.items()}

    async def _caught_up(self, to: int, finished: list[int]) -> None:
        """Wait a moment for shards that are behind.

        They may lack the news that a trainer has finished: others have heard of it.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + SETTLE_SECONDS
        found = await self._positions_of(limit=to, finished=finished)
        # Polled: the hosts have no reason to tell the scheduler of each round.
        while any(0 <= s.rounds < to and not s.is_stuck for s in found.values()):
            if loop.time() >= end:
                return
            await asyncio.sleep(LOOK_SECONDS)
            found = await self._positions_of(limit=to)

    async def _refuse_later(self) -> None:
        """Refuse the steps of a run where it takes long: a shard is away, or silent.

        Their trainers need not wait for that.
        """
        await asyncio.sleep(_REFUSE_SECONDS)
        await self._every("hold", reason=self._reason)

    # -- hosts ---------------------------------------------------------------

    async def _every(self, method: str, **about: Any) -> dict[int, Any]:
        """Ask the host of every shard that is not lost, until all have answered.

        A shard that has answered once is asked no more, wherever it moves.
        """
        entry, found = self._run.entry, dict[int, Any]()
        every = set(range(len(entry.owners)))
        asked: dict[str, asyncio.Future[Mapping[int, Any]]] = {}
        try:
            while left := every - found.keys() - entry.lost.keys():
                there = {entry.owners[i] for i in left - entry.away.keys()}
                for worker in sorted(there - asked.keys()):
                    work = self._ask(worker, method, **about)
                    asked[worker] = asyncio.ensure_future(work)
                self._note(left, there)
                if not asked:
                    await asyncio.sleep(PAUSE_SECONDS)
                    continue
                await asyncio.wait(
                    asked.values(),
                    timeout=PAUSE_SECONDS,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for worker in [w for w, work in asked.items() if work.done()]:
                    found.update(asked.pop(worker).result())
        finally:
            for silent in asked.values():
                silent.cancel()
        self._go_on()
        return {i: row for i, row in found.items() if i not in entry.lost}

    def _go_on(self) -> None:
        """Note that something was done, for the tasks that wait for it."""
        now = asyncio.get_running_loop().time()
        self._run.end_by = now + END_SECONDS

    def _note(self, left: set[int], there: set[str]) -> None:
        """Say what the end waits for."""
        away = sorted(left & self._run.entry.away.keys())
        if away:
            self._run.waits_for = f"shard {away[0]}, which has no owner for the moment"
        elif there:
            self._run.waits_for = f"worker {min(there)}, which does not answer"

    async def _ask(self, worker: str, method: str, **about: Any) -> Mapping[int, Any]:
        """Ask one host; return what it says by shard, nothing where it cannot."""
        about |= {"store": self._run.entry.uid, "run": self._run.id}
        try:
            rows = await self._hosts.control(worker, method, **about)
        except (OSError, DaskPSError) as error:
            logger.info("run %d waits for %s: %r", self._run.id, worker, error)
            await asyncio.sleep(PAUSE_SECONDS)
            return {}
        return {row[0]: row[1:] for row in rows}
