"""One trainer's calls: what carries its run, rank, clock and sequence numbers."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from daskps import config
from daskps.cluster.caller import routes
from daskps.cluster.caller.client import ShardClient
from daskps.cluster.caller.deliveries import FiniteCheck, PreparedSteps
from daskps.cluster.caller.reads import PreparedReads
from daskps.cluster.caller.routes import GRADIENT, Plan, Target
from daskps.cluster.caller.uncommitted import Uncommitted
from daskps.cluster.caller.views import Views
from daskps.cluster.machine.pool import LEAST_LIMIT, BufferPool
from daskps.cluster.wire import encoding
from daskps.cluster.wire.deadline import Deadline
from daskps.cluster.wire.messages import Answer, Call
from daskps.errors import ContributionLostError, RunCancelledError
from daskps.shards.steps import NOTHING, READ

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskps.cluster.caller.link import Link
    from daskps.cluster.caller.shard_map import RunMembership, StoreMap
    from daskps.codecs import Codec
    from daskps.typing import Array


class Session:
    """The place of one trainer in a run.

    Threads: one call at a time; a second thread waits for the first.

    Parameters
    ----------
    link : Link
        The worker's way to the cluster.
    meta : StoreMap
        The store.
    joined : RunMembership
        The run.
    rank : int
        This trainer's number in it.
    bsp : bool
        Whether the run has rounds.
    """

    def __init__(
        self, link: Link, meta: StoreMap, joined: RunMembership, *, rank: int, bsp: bool
    ) -> None:
        self.link, self.meta = link, meta
        self.run, self.size, self.rank, self.bsp = joined.run, joined.size, rank, bsp
        self._codec, self._pool = joined.codec, BufferPool(LEAST_LIMIT)
        self._finite = config.load().check_finite
        self.shards = ShardClient(link, meta, joined)
        self.clock = 0
        self.sequence = 0
        #: Largest number of clocks a live trainer was behind one of our pulls.
        self.lag = 0
        #: Losses and rows of the epoch under way, where the loop counts them.
        self.loss_sum: float | None = None
        self.rows = 0
        #: Reads and steps that the trainer repeats.
        self.glances = PreparedReads(self)
        self._deliveries = PreparedSteps(self)
        self.views = Views(self)
        #: Whether pushes were accepted since the last tick, and what they were.
        self._open = False
        #: Whether the last push ended with an error, which the caller may have caught.
        self._failed = False
        self._uncommitted = Uncommitted(meta, joined.codec, self._pool.empty)
        self._lock = threading.RLock()

    def resume(self, attempt: int) -> None:
        """Take clock and sequence from the shard that is furthest behind.

        The rank's trainers before this one, which is its so-many-th, get no further.
        """
        run, rank, control = self.run, self.rank, self.shards.control
        rows = self.link.run(
            lambda: control("resume", run=run, rank=rank, attempt=attempt)
        )
        places = [tuple(place) for row in rows for place in row]
        self.clock, self.sequence = min(places)
        if self.bsp:
            # Under BSP a repeat is told by its clock. A shard that is a step ahead
            # must not take the next step's number for one of this step's.
            self.sequence = max(sequence for _, sequence in places)

    def read(self, target: Target, timeout: float | None) -> None:
        """Read what the policy lets this trainer see at its clock."""
        if timeout is None and self.glances.fill(target):
            return
        plan = routes.read(self.meta, target, None, self._call())
        self._exchange(plan, self._deadline(timeout, "a pull"))

    @property
    def looks_later(self) -> bool:
        """Whether large gradients that tick may be looked at on their way.

        Under BSP they are added to others first; a codec's words are not looked at.
        """
        return not (self.bsp or self._open or self._codec is not None)

    def deliver(
        self,
        arrays: Mapping[int, Array],
        timeout: float | None,
        *,
        kind: str = GRADIENT,
        weight: float = 1.0,
        tick: bool = True,
        target: Target | None = None,
        look: FiniteCheck | None = None,
    ) -> Any:
        """Send arrays to their shards, with the tick to all, and read `target`.

        Gradients that `look` is given for are looked at on the way, at the latest
        before they take a message.
        """
        with self._lock:
            self._failed = True
            codec = self._codec if arrays and kind == GRADIENT else None
            # What was pushed before the tick is with the owners of the shards.
            if tick and timeout is None and not self._open and codec is None:
                version = self._deliveries.send(arrays, kind, weight, look)
                if version is not None:
                    self.sequence += 1
                    self.clock += 1
                    self._failed = False
                    if target is not None:
                        self.read(target, None)
                    return version
            if look is not None:
                look()
            if codec is not None:
                arrays = self._encoded(arrays, codec)
            call = self._call(
                kind=kind if arrays else NOTHING,
                weight=weight,
                tick=tick,
                # Pushes before the tick of a round are kept by the owner alone.
                by_owner=self.bsp and (self._open or not tick),
                codec=codec.name if codec else "",
            )
            try:
                answers = self._send(arrays, call, target, timeout)
            except RunCancelledError:
                raise
            except BaseException:
                self.shards.settle(-1 - self.rank, self.sequence, self.run)
                raise
            self.clock += tick
            self._open, self._failed = not tick, False
            if tick:
                self._uncommitted.clear()
            elif self.bsp:
                self._uncommitted.add(arrays)
            return routes.version_of(answers)

    def _send(
        self,
        arrays: Mapping[int, Array],
        call: Call,
        target: Target | None,
        timeout: float | None,
    ) -> dict[int, Answer]:
        """Send a push; where a shard has lost those before it, all of the clock."""
        deadline = self._deadline(timeout, "a push")

        def send(arrays: Mapping[int, Array], call: Call) -> dict[int, Answer]:
            # One at a time: all before it were answered or given up.
            call = call._replace(sequence=self.sequence, floor=self.sequence)
            self.sequence += 1
            meta, tick = self.meta, call.tick
            plan = routes.push(meta, arrays, call, everywhere=tick, target=target)
            return self._exchange(plan, deadline)

        try:
            return send(arrays, call)
        except ContributionLostError:
            arrays = self._uncommitted.with_last(arrays)
            kind = GRADIENT if call.kind == NOTHING and arrays else call.kind
            return send(arrays, call._replace(kind=kind, codec="", whole=True))

    def _encoded(self, arrays: Mapping[int, Array], codec: Codec) -> dict[int, Array]:
        layout, empty = self.meta.layout, self._pool.empty
        return encoding.encoded(layout, arrays, codec, finite=self._finite, empty=empty)

    def barrier(self, timeout: float | None) -> None:
        """Wait until every live trainer has ticked as often as this one."""
        plan = routes.barrier(self.meta, self._call())
        self._exchange(plan, self._deadline(timeout, "a barrier"))

    def finish(self) -> None:
        """Tell every shard and the directory to wait for this trainer no longer."""
        with self._lock:
            if self._open:
                # What was accepted without a tick must not be lost.
                self.deliver({}, None)
            self.link.run(self._finish)

    def close(self) -> None:
        """Let go of the shards' memory, which goes with its last user."""
        self.glances.clear()
        self._deliveries.clear()
        self.views.clear()
        self.shards.ways.close()

    async def _finish(self) -> None:
        if self._failed:
            # Where a round cannot be applied on one shard, no other may go on without
            # this trainer.
            await self.shards.control("goes_on", run=self.run)
        # A worker that was taken for lost may wake up in the middle of its loop.
        worker = self.link.node.address
        await self.link.directory(
            "finishes", run=self.run, rank=self.rank, worker=worker
        )
        await self.shards.control("finish", run=self.run, rank=self.rank)
        await self.link.directory(
            "finished", run=self.run, rank=self.rank, clock=self.clock
        )

    def report(self, epoch: int, report: dict[str, Any]) -> bool:
        """Report an epoch, return whether to stop."""
        work = self.link.directory(
            "report", run=self.run, rank=self.rank, epoch=epoch, report=report
        )
        return bool(self.link.run(lambda: work))

    def _call(self, **head: Any) -> Call:
        return Call(
            self.meta.uid, (), run=self.run, rank=self.rank, clock=self.clock, **head
        )

    def _deadline(self, timeout: float | None, what: str) -> Deadline:
        what = f"{what} of trainer {self.rank} at clock {self.clock}"
        return Deadline(timeout, what)

    def _exchange(self, plan: Plan, deadline: Deadline) -> dict[int, Answer]:
        with self._lock:
            answers: dict[int, Answer] = self.shards.call(
                plan.calls, plan.outs, deadline
            )
            if plan.calls and next(iter(plan.calls.values())).wait == READ:
                self.lag = max(self.lag, *(a.lag for a in answers.values()))
            return answers
