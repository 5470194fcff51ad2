"""Trainers of a run whose steps are awaited, built as a session builds them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daskps.cluster.caller import routes
from daskps.cluster.caller.routes import GRADIENT
from daskps.cluster.caller.session import Session
from daskps.cluster.caller.shard_map import RunMembership, StoreMap
from daskps.errors import ContributionLostError, RunCancelledError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskps.cluster.caller.link import Link
    from daskps.cluster.wire.messages import Call
    from daskps.typing import Array

#: How long trainers wait for each other to register.
REGISTER_SECONDS = 20.0


async def join(
    link: Link, uid: str, *, run: int, rank: int, size: int, bsp: bool
) -> AsyncTrainer:
    """Register a trainer with the directory, as its task does, and let it resume."""
    found = await link.directory(
        "register",
        run=run,
        rank=rank,
        worker=link.node.address,
        wait_seconds=REGISTER_SECONDS,
    )
    meta = StoreMap(await link.directory("find", uid=uid))
    joined = RunMembership(run, size, found["mailboxes"], None)
    trainer = AsyncTrainer(link, meta, joined, rank=rank, bsp=bsp)
    if found["attempt"] > 1:
        await trainer.resume_async(found["attempt"])
    return trainer


class AsyncTrainer(Session):
    """A session for an event loop: all of its calls take messages."""

    async def resume_async(self, attempt: int) -> None:
        """Take clock and sequence from the shards; see :meth:`Session.resume`."""
        rows = await self.shards.control(
            "resume", run=self.run, rank=self.rank, attempt=attempt
        )
        places = [tuple(place) for row in rows for place in row]
        self.clock, self.sequence = min(places)
        if self.bsp:
            self.sequence = max(sequence for _, sequence in places)

    async def read_async(self) -> Any:
        """Read all parameters; see :meth:`Session.read`."""
        target = routes.whole(self.meta)
        plan = routes.read(self.meta, target, None, self._call())
        deadline = self._deadline(None, "a pull")
        await self.shards.call_async(plan.calls, plan.outs, deadline)
        return target.finish()

    async def deliver_async(
        self, arrays: Mapping[int, Array], *, tick: bool = True
    ) -> None:
        """Send gradients, and the tick to all; see :meth:`Session.deliver`."""
        call = self._call(kind=GRADIENT, weight=1.0, tick=tick)
        try:
            await self._send_async(arrays, call)
        except RunCancelledError:
            raise
        except BaseException:
            self.shards.settle(-1 - self.rank, self.sequence, self.run)
            raise
        self.clock += tick
        self._open = not tick
        if tick:
            self._uncommitted.clear()
        elif self.bsp:
            self._uncommitted.add(arrays)

    async def _send_async(self, arrays: Mapping[int, Array], call: Call) -> None:
        try:
            await self._send_once(arrays, call)
        except ContributionLostError:
            arrays = self._uncommitted.with_last(arrays)
            await self._send_once(arrays, call._replace(whole=True))

    async def _send_once(self, arrays: Mapping[int, Array], call: Call) -> None:
        call = call._replace(sequence=self.sequence, floor=self.sequence)
        self.sequence += 1
        plan = routes.push(self.meta, arrays, call, everywhere=call.tick)
        deadline = self._deadline(None, "a push")
        await self.shards.call_async(plan.calls, plan.outs, deadline)

    async def finish_async(self) -> None:
        """Tell shards and directory that it has ended; see :meth:`Session.finish`."""
        await self._finish()
