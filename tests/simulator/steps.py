"""Trainers of a run, and pushes of tasks, whose steps are awaited: built as others are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from daskps import consistency
from daskps.cluster.caller import routes
from daskps.cluster.caller.client import ShardClient
from daskps.cluster.caller.producer import producer_of
from daskps.cluster.caller.routes import GRADIENT, Step
from daskps.cluster.caller.session import Session
from daskps.cluster.caller.shard_map import RunMembership, StoreMap
from daskps.cluster.protocol.deadline import Deadline
from daskps.errors import ContributionLostError, RunCancelledError
from daskps.store import targets as targets_of
from tests.simulator.oracles import SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.caller.link import Link
    from daskps.cluster.caller.row_routes import RowBatch
    from daskps.typing import Array

#: How long trainers wait for each other to register.
REGISTER_SECONDS = 20.0


class SimRank(NamedTuple):
    """Which trainer of which run."""

    run: int
    rank: int
    size: int


async def join(
    link: Link, uid: str, place: SimRank, policy: consistency.Policy
) -> AsyncTrainer:
    """Register a trainer with the directory, as its task does, and let it resume."""
    found = await link.directory(
        "register",
        run=place.run,
        rank=place.rank,
        worker=link.node.address,
        wait_seconds=REGISTER_SECONDS,
    )
    meta = StoreMap(await link.directory("find", uid=uid))
    measures = consistency.measures_delay(policy)
    boxes = found["mailboxes"]
    joined = RunMembership(place.run, place.size, boxes, measures_delay=measures)
    bsp = isinstance(policy, consistency.BSP)
    trainer = AsyncTrainer(link, meta, joined, rank=place.rank, bsp=bsp)
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

    async def read_async(self, rows: Mapping[str, Array]) -> Any:
        """Read all parameters, and rows of tables; see :meth:`Session.read`."""
        whole = routes.whole(self.meta)
        (target,) = targets_of.with_rows(self.meta, whole, rows, {})
        request = routes.read(self.meta, target, None, self._step())
        deadline = self._deadline(None, "a pull")
        reply = await self.shards.call_async(request, deadline)
        if (seen := self.shards.seen) is not None:
            seen.update(reply.versions)
        return target.finish()

    async def deliver_async(
        self,
        arrays: Mapping[int, Array],
        *,
        rows: Sequence[RowBatch] = (),
        tick: bool = True,
    ) -> None:
        """Send gradients, and the tick to all; see :meth:`Session.deliver`.

        Rows come with a tick: what is kept to be sent again is arrays.
        """
        try:
            await self._send_async(arrays, rows, tick)
        except RunCancelledError:
            raise
        except BaseException:
            self.shards.acknowledge(-1 - self.rank, self.sequence, self.run)
            raise
        self.clock += tick
        self._open = not tick
        if tick:
            self._uncommitted.clear()
        elif self.bsp:
            self._uncommitted.add(arrays)

    async def _send_async(
        self, arrays: Mapping[int, Array], rows: Sequence[RowBatch], tick: bool
    ) -> None:
        try:
            await self._send_once(arrays, rows, tick)
        except ContributionLostError:
            whole = self._uncommitted.whole(Step(), arrays, rows)
            await self._send_once(whole.arrays, whole.rows, tick, whole=True)

    async def _send_once(
        self,
        arrays: Mapping[int, Array],
        rows: Sequence[RowBatch],
        tick: bool,
        *,
        whole: bool = False,
    ) -> None:
        number = self._next_number(GRADIENT, tick)
        step = self._step(number, GRADIENT, tick)._replace(whole=whole)
        request = routes.push(self.meta, arrays, step, everywhere=tick, rows=rows)
        request = request._replace(seen=self.shards.seen)
        await self.shards.call_async(request, self._deadline(None, "a push"))

    async def finish_async(self) -> None:
        """Tell shards and directory that it has ended; see :meth:`Session.finish`."""
        await self._finish()


async def push_from(
    link: Link, meta: StoreMap, arrays: Mapping[int, Array], rows: Sequence[RowBatch]
) -> None:
    """Push gradients outside runs from a worker, as a handle there does."""
    shards, deadline = ShardClient(link, meta), Deadline(SECONDS, "a push")
    request = routes.push(meta, arrays, Step(kind=GRADIENT), rows=rows)
    source = producer_of(link, meta.uid, None)
    await link.within(lambda: source.identify(link), deadline.left(), deadline.what)
    async with source.turn_async(deadline, shards.acknowledge) as turn:
        signed = request.signed(source.id, turn)
        await shards.call_async(signed, deadline)
