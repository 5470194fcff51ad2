"""Trainers of a run, and pushes of tasks, whose steps are awaited: built as others are."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

from daskps import consistency
from daskps.cluster.caller import routes
from daskps.cluster.caller.client import ShardClient
from daskps.cluster.caller.producer import producer_of
from daskps.cluster.caller.routes import GRADIENT, Step
from daskps.cluster.caller.session import Session
from daskps.cluster.caller.shard_map import RunMembership, StoreMap
from daskps.cluster.protocol.deadline import Deadline
from daskps.errors import ContributionLostError
from daskps.store import targets as targets_of
from tests.simulator.oracles import SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.caller.link import Link
    from daskps.cluster.caller.routes import Request
    from daskps.cluster.caller.row_routes import RowBatch
    from daskps.cluster.caller.trainer_step import TrainerStep
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
        await self._call_async(routes.read(self.meta, target, None, self._step()))
        return target.finish()

    async def deliver_async(self, given: TrainerStep, *, tick: bool = True) -> None:
        """Send gradients, and the tick to all; see :meth:`Session.deliver`."""
        step = self._step(self._next_number(GRADIENT, tick), GRADIENT, tick)
        request = self._request(step, given, tick=tick, target=None)
        try:
            await self._send_async(request)
        except BaseException as error:
            self._give_up(step, error, tick=tick)
            raise
        self.clock += tick
        if self._open or not tick or self._keeps_last:
            self._note_open(step, given)

    async def _send_async(self, request: Request) -> None:
        """Send a push; see :meth:`Session._send`."""
        if not (self._open and request.step.tick and self._keeps_last):
            with contextlib.suppress(ContributionLostError):
                return await self._call_async(request)
        whole: Any = self._send_whole(request, self._forever)
        return await self._call_async(whole)

    def _call(self, request: Request, deadline: Deadline) -> Any:
        """Return a request, for `_call_async`: :meth:`Session._send_whole` makes one."""
        return request

    async def _call_async(self, request: Request) -> None:
        """Make a call, again where a copy lacks what came before; see `Session._call`."""
        deadline = self._deadline(None, "a call")
        while True:
            try:
                reply = await self.shards.call_async(request, deadline)
                break
            except ContributionLostError:
                if (last := self._last_before(request)) is None:
                    raise
            await self._call_async(last)
        seen, target = self.shards.seen, request.target
        if seen is not None and target is not None:
            seen.update(reply.versions)

    async def finish_async(self) -> None:
        """Tell shards and directory that it has ended; see :meth:`Session.finish`."""
        if self._keeps_last:
            await self._call_async(routes.barrier(self.meta, self._step()))
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
