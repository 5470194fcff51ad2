"""Calls of one trainer, with its run, rank, clock and sequence numbers."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from daskps import config
from daskps.cluster.caller import routes
from daskps.cluster.caller.allreduce import PEER_SECONDS, Allreduces, CallCount
from daskps.cluster.caller.call_socket import SocketPayload
from daskps.cluster.caller.client import ShardClient
from daskps.cluster.caller.local import SplitRoute
from daskps.cluster.caller.local_shards import local_call
from daskps.cluster.caller.questions import name_applied
from daskps.cluster.caller.routes import GRADIENT, Reply, Request
from daskps.cluster.caller.shard_map import MOST_ROUTES
from daskps.cluster.caller.socket_carrier import SocketCarrier
from daskps.cluster.caller.targets import Target
from daskps.cluster.caller.trainer_step import NO_MORE, RunCodecs, TrainerStep
from daskps.cluster.caller.uncommitted import Uncommitted
from daskps.cluster.machine.leases import LEAST_LIMIT, BufferPool
from daskps.cluster.protocol.deadline import Deadline
from daskps.cluster.protocol.wellformed import MOST_SECONDS
from daskps.errors import ContributionLostError, PushRejectedError, RunCancelledError
from daskps.shards.steps import NOTHING, Step
from daskps.version import Version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.caller.link import Link
    from daskps.cluster.caller.local import LocalPart
    from daskps.cluster.caller.shard_map import RunMembership, StoreMap
    from daskps.cluster.caller.targets import ReadSlices
    from daskps.cluster.host.collectives import Offered
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
        self._pool = BufferPool(LEAST_LIMIT)
        self._codecs = RunCodecs(
            meta, joined, finite=config.load().check_finite, empty=self._pool.empty
        )
        self._codec = self._codecs.codec
        self.shards = ShardClient(link, meta, joined, rank=rank, bsp=bsp)
        self.reads = self.shards.reads
        #: Whether each step is a call that says which versions were read of shards.
        self._by_call = joined.measures_delay
        self.allreduces = Allreduces(link, self.shards, joined.run, rank, bsp=bsp)
        self.barriers = CallCount()
        #: Steps that the trainer repeats, by the parameters that they bring.
        self._step_routes: dict[tuple[int, ...], SplitRoute] = {}
        self._forever = Deadline(None, f"a call of trainer {rank}")
        self.clock = 0
        self.sequence = 0
        #: Loss and rows of the current epoch, where the loop counts them.
        self.loss_sum: float | None = None
        self.rows = 0
        #: Whether shards have pushes since the last tick; `_uncommitted` has them too.
        self._open = False
        #: Whether one of them ended with an error: some shards have it, others do not.
        self._is_torn = False
        #: Whether the last push ended with an error, which the caller may have caught.
        self._failed = False
        self._uncommitted = Uncommitted(meta, self._codec, self._pool.empty)
        #: Whether it sends its last step again to a copy, which has no open round.
        self._keeps_last = bsp and meta.copies > 1
        self._last: Request | None = None
        self._lock = threading.RLock()

    def resume(self, attempt: int, told: dict[str, Any]) -> None:
        """Take clock and sequence from the shard that is furthest behind.

        This is trainer number `attempt` of its rank; those before it get no further.
        The directory has `told` how often they made the calls that all trainers make.
        """
        about: Any = {"run": self.run, "rank": self.rank, "attempt": attempt}
        rows = self.link.run(lambda: self.shards.control("resume", **about))
        places = [tuple(place) for row in rows for place in row]
        self.clock, self.sequence = min(places)
        if self.bsp:
            # Under BSP shards know a repeat by its clock. A shard that is a step ahead
            # must not take the next step's number for one of this step's.
            self.sequence = max(sequence for _, sequence in places)
        self.allreduces.resume(told, self.clock)
        self.barriers.resume(told["barriers"], self.clock)

    def read(self, target: Target, timeout: float | None, *, ahead: int = 0) -> None:
        """Read the weights that the policy allows at its clock, or ahead of it."""
        clock = self.clock + ahead
        if not self.reads.fill(target, itertools.repeat(clock)):
            step = self._step()._replace(clock=clock)
            request = routes.read(self.meta, target, None, step)
            request = request._replace(read_codec=self._codecs.reads_in)
            self._call(request, self._deadline(timeout, "a pull"))
        if self._codecs.reads_in:
            self._codecs.round_read(target)

    def read_all(
        self, targets: Sequence[Target], timeout: float | None, *, ahead: int = 0
    ) -> None:
        """Make reads in turn, of elements that are too many for one call."""
        deadline = self._deadline(timeout, "a pull")
        for target in targets:
            left = None if timeout is None else deadline.left()
            self.read(target, left, ahead=ahead)

    @property
    def codec(self) -> Codec | None:
        """The codec that encodes the arrays of the run's gradients."""
        return self._codec

    @property
    def saved_nbytes(self) -> int:
        """Bytes that the words of its gradients have saved so far."""
        return self._codecs.saved_nbytes

    @property
    def reads_in_words(self) -> bool:
        """Whether values that it reads are rounded to words of a codec."""
        return bool(self._codecs.reads_in)

    @property
    def has_unticked(self) -> bool:
        """Whether shards may have accepted pushes of this clock before its tick."""
        return self._open

    @property
    def looks_later(self) -> bool:
        """Whether large gradients that tick may be looked at on their way.

        Not under BSP, where shards first add them to others, nor with a codec, whose
        words nobody checks.
        """
        return not (self.bsp or self._open or self._codec is not None)

    def deliver(
        self,
        given: TrainerStep,
        timeout: float | None,
        *,
        tick: bool = True,
        target: Target | None = None,
    ) -> Version:
        """Send a step to its shards, with the tick to all, and read `target`.

        The life of a call is in :mod:`daskps.cluster.caller.thread_call`, the whole path
        of a push in :mod:`daskps.cluster`.
        """
        with self._lock:
            self._failed = True
            # Written out: each function called here would add a call to each step.
            kind = given.of if given.arrays or given.rows else NOTHING
            codec = self._codec if kind == GRADIENT else None
            step_route = None
            # Pushes before the tick of a clock stay with the owners, as does the tick.
            if tick and not (self._by_call or self._open):
                step_route = self._find_step_route(given, codec, target, timeout)
            if codec is not None:
                given = self._codecs.encoded(given, codec)
            # By rank and number, in rounds by rank and clock, a shard knows a repeat: the
            # step counts once, however often and on whatever way it comes.
            changes = tick or kind != NOTHING  # as `_next_number`
            number = self.sequence if changes else 0
            self.sequence += changes
            # One at a time: all steps before it were answered or given up.
            who = self.run, self.rank, self.clock, tick
            step = Step(kind, (), *who, 0, number, weight=given.weight, floor=number)
            make = partial(self._request, step, given, tick=tick, target=target)
            try:
                unread: ReadSlices | None = None
                # A call that may take all ways; a step of which some shards are reached by
                # socket; one that meets local shards alone.
                if step_route is None:
                    versions = self._send(make(), timeout).versions
                elif step_route.remote:
                    versions, unread = self._step_remote(
                        step_route,
                        step,
                        given,
                        target=target,
                        make=make,
                        timeout=timeout,
                    )
                else:
                    versions = self._step_local(step_route, step, given, timeout)
                    unread = None if target is None else target.slices
            except BaseException as error:
                self._give_up(step, error, tick=tick)
                raise
            self.clock += tick
            self._failed = False
            if given.left:
                self._codecs.keep(given)
            if self._open or not tick or self._keeps_last:
                self._note_open(step, given)
            if (
                target is not None
                and step_route is not None
                and (unread or target.rows)
            ):
                rest = Target(unread or {}, target.flats, target.finish, target.rows)
                self.read(rest, None)
            elif target is not None and self._codecs.reads_in:
                self._codecs.round_read(target)
            versions.sort()
            return Version.of(versions)

    def _give_up(self, step: Step, error: BaseException, *, tick: bool) -> None:
        """Tell shards that a step has ended; add to its error which shards have it."""
        if isinstance(error, RunCancelledError):
            return
        if self.bsp and not tick:
            # Some shards may have it: the next step brings all of the clock to all.
            self._open = self._is_torn = True
        self.shards.acknowledge(-1 - self.rank, self.sequence, self.run)
        if isinstance(error, PushRejectedError) and not self.bsp:
            self.link.run(partial(name_applied, self.shards, step, error))

    def _step_remote(
        self,
        step_route: SplitRoute,
        step: Step,
        given: TrainerStep,
        *,
        target: Target | None,
        make: partial[Request],
        timeout: float | None,
    ) -> tuple[list[tuple[int, int]], ReadSlices | None]:
        """Deliver a step that ticks over sockets, and maybe to local shards.

        Returns the versions, and the reads of local shards, which follow the step.
        """
        remote, deadline = self.shards.remote, self._forever
        if timeout is not None:
            deadline = self._deadline(timeout, "a push")
        if given.look is not None:
            given.look()
        key = step.kind, target is None
        route = step_route.socket_routes.get(key)
        if route is None or (target is not None and not route.reads_as(target)):
            request = make()
            route = remote.find_socket_route(request, step_route.remote)
            if route is None:
                return self._send(request, timeout).versions, None
            step_route.socket_routes[key] = route
        outs, number = () if target is None else target.flats, step.sequence
        arrays = given.arrays if given.words is None else given.words
        said = SocketPayload(
            step.clock, number, number, step.weight, None, arrays, outs
        )
        call = SocketCarrier(remote, route, said, make=make, deadline=deadline)
        local = None
        if step_route.parts:  # they get their part while the remote ones answer
            local = partial(self._step_local, step_route, step, given, timeout)
        try:
            reply = call.run(local)
        except ContributionLostError:
            return self._send_whole(make(), deadline).versions, None
        if reply.lag:
            self.reads.lag = max(self.reads.lag, reply.lag)
        return reply.versions, route.rest

    def _step_local(
        self, local: SplitRoute, step: Step, given: TrainerStep, timeout: float | None
    ) -> list[tuple[int, int]]:
        """Deliver a step to local shards, which nearly always take it at once.

        Runs in the trainer's thread, which advances the shards itself; where some are
        remote, while their hosts work on the call.
        """
        taken, look = list[tuple[int, int]](), given.look
        parts: Sequence[LocalPart] = local.parts
        if look is None or look.done:
            taken, parts = local.try_step(step, given.arrays, given.rows)
        counters, rows = self.shards.counters, tuple(given.rows)
        for one in rows:
            counters.rows_pushed += len(one.split.ids)
        if not parts:
            counters.local_calls += local.n_hosts
            return taken
        request = Request(local.route, step, given.arrays, check=look, rows=rows)
        about = self.shards.remote, request, local, self._deadline(timeout, "a push")
        return local_call(*about, taken=taken, parts=parts).run().versions

    def _note_open(self, step: Step, given: TrainerStep) -> None:
        """Keep the pushes of this clock until its tick, and maybe all until the next."""
        if step.tick and self._keeps_last:
            last = step._replace(sequence=self.sequence - 1)
            self._last = self._uncommitted.whole(last, given.sent, given.rows)
        self._open = not step.tick
        if step.tick:
            self._uncommitted.clear()
        elif self.bsp:
            self._uncommitted.add(given.sent, given.rows)

    def _find_step_route(
        self,
        given: TrainerStep,
        codec: Codec | None,
        target: Target | None,
        timeout: float | None,
    ) -> SplitRoute | None:
        """Return the route of a step that ticks; None where it is a general call."""
        has_rows = given.rows or (target is not None and target.rows)
        indices = tuple(given.arrays)
        found = self._step_routes.get(indices)
        if (
            found is None
            or found.route.where is not self.meta.where
            or time.monotonic() > found.until
        ):
            route = routes.route_of(self.meta, indices, None)
            found = SplitRoute(route, self.shards.carriers)
            while len(self._step_routes) >= MOST_ROUTES:
                del self._step_routes[next(iter(self._step_routes))]
            self._step_routes[indices] = found
        # A local read follows the step, without asking the shards. Not where it may
        # last too long: a time-out leaves the clock as it is, but not the step.
        is_late = target is not None and timeout is not None
        if found.parts and (codec is not None or is_late):
            return None
        # Its route over sockets is kept for arrays of fixed lengths. Rows differ from step
        # to step, as do the words of some codecs: the general call makes a route for each.
        if found.remote and (has_rows or not (codec is None or codec.is_fixed)):
            return None
        return found

    def _request(
        self, step: Step, given: TrainerStep, *, tick: bool, target: Target | None
    ) -> Request:
        """Return a step as a request to the shards.

        A tick goes to all. So do rows, whichever shards have them: each shard counts the
        steps of a table.
        """
        what: Any = {"everywhere": tick, "target": target, "rows": given.rows}
        what["words"] = given.words
        return routes.push(self.meta, given.arrays, step, **what)._replace(
            codec="" if given.words is None else self._codecs.pushes_in,
            # Only the owner keeps pushes before the tick of a round.
            by_owner=self.bsp and (self._open or not tick),
            check=given.look,
            read_codec="" if target is None else self._codecs.reads_in,
            seen=self.shards.seen,
        )

    def _send(self, request: Request, timeout: float | None) -> Reply:
        """Send a push, or all pushes of its clock where a shard lacks or keeps some."""
        deadline = self._deadline(timeout, "a push")
        is_whole = self._open and request.step.tick and self._keeps_last
        if not (self._is_torn or is_whole):
            with contextlib.suppress(ContributionLostError):
                return self._call(request, deadline)
        return self._send_whole(request, deadline)

    def _send_whole(self, request: Request, deadline: Deadline) -> Reply:
        """Send a push with all pushes before it that have not ticked.

        Under a new number, and yet nothing counts twice: a shard where this clock has
        ticked takes it for a repeat, and any other one forgets what the rank has pushed
        at this clock, as the step is `whole`.
        """
        again = self._uncommitted.whole(request.step, request.arrays, request.rows)
        number = self._next_number(again.step.kind, again.step.tick)
        again = again._replace(
            step=again.step._replace(sequence=number, floor=number),
            target=request.target,
            by_owner=request.by_owner,
            read_codec=request.read_codec,
        )
        reply = self._call(again, deadline)
        self._is_torn = False
        return reply

    def barrier(self, timeout: float | None) -> None:
        """Wait until every live trainer has called it as often as this one."""
        with self._lock:
            deadline = self._deadline(timeout, "a barrier")
            wait = self._uncommitted.waiter(self.shards, self._step(), self._last)
            clock = self.link.run(lambda: wait(self._meet(deadline)))
            if self.bsp:
                # A cut may hold a round back; this trainer may have to send it again.
                step = self._step()._replace(clock=min(clock, self.clock))
                self._call(routes.barrier(self.meta, step), deadline)
            self.barriers.number += 1

    async def _meet(self, deadline: Deadline) -> int:
        """Wait at the directory; return the least clock of those that meet there."""
        number, is_endless = self.barriers.at(self.clock), deadline.end is None
        while True:
            seconds = 0.0 if deadline.is_over else min(deadline.left(), MOST_SECONDS)
            found = await self.link.within(
                partial(
                    self.link.directory,
                    "barrier",
                    run=self.run,
                    rank=self.rank,
                    worker=self.link.node.address,
                    clock=self.clock,
                    number=number,
                    wait_seconds=seconds,
                ),
                None if is_endless else seconds + PEER_SECONDS,
                deadline.what,
            )
            if not (missing := found["missing"]):
                return int(found["clock"])
            if not is_endless and seconds < MOST_SECONDS:
                raise deadline.error(f"{_named(missing)} not called it", changes=False)

    def allreduce(
        self, brought: Offered, flats: Sequence[Array], timeout: float | None
    ) -> list[Array]:
        """Combine arrays with those of the other trainers; see :class:`Allreduces`."""
        with self._lock:
            deadline = self._deadline(timeout, "an allreduce")
            wait = self._uncommitted.waiter(self.shards, self._step(), self._last)
            return self.allreduces.reduce(
                brought, flats, self.clock, deadline, wait=wait
            )

    def finish(self) -> None:
        """Tell every shard and the directory to wait for this trainer no longer."""
        with self._lock:
            if self._open:
                # Pushes that were accepted without a tick must not be lost.
                self.deliver(NO_MORE, None)
            if self._keeps_last:
                # Later nobody could send its last step again.
                self._call(routes.barrier(self.meta, self._step()), self._forever)
            self.link.run(self._finish)

    def close(self) -> None:
        """Let go of the shards' memory, which goes with its last user."""
        self._step_routes.clear()
        self.shards.close()

    async def _finish(self) -> None:
        if self._failed:
            # If one shard cannot apply a round, no other shard may go on without this
            # trainer.
            await self.shards.control("goes_on", run=self.run)
        # A worker that was held to be lost may wake up in the middle of its loop.
        worker = self.link.node.address
        await self.link.directory(
            "finishes", run=self.run, rank=self.rank, worker=worker
        )
        await self.shards.control("finish", run=self.run, rank=self.rank)
        n_ranks = await self.link.directory(
            "finished", run=self.run, rank=self.rank, clock=self.clock
        )
        if self.bsp and self.meta.layout.n_shards > 1:
            await self.shards.control("heard", run=self.run, n_ranks=n_ranks)

    def report(self, epoch: int, report: dict[str, Any]) -> bool:
        """Report an epoch, return whether to stop."""
        if self._keeps_last:
            # Others may wait for its last step at a copy, and this one for them here.
            self._call(routes.barrier(self.meta, self._step()), self._forever)
        about: Any = {"rank": self.rank, "epoch": epoch, "report": report}
        work = self.link.directory("report", run=self.run, **about)
        return bool(self.link.run(lambda: work))

    def _next_number(self, kind: str, tick: bool) -> int:
        """Return the number of a step that may change a shard; 0 for a mere read."""
        changes = tick or kind != NOTHING
        number = self.sequence if changes else 0
        self.sequence += changes
        return number

    def _step(
        self,
        number: int = 0,
        kind: str = NOTHING,
        tick: bool = False,
        weight: float = 1.0,
    ) -> Step:
        """Return a step of this trainer at its clock."""
        who = self.run, self.rank, self.clock, tick
        # One at a time: all steps before it were answered or given up. A read says how
        # many rounds a shard must have of it.
        floor = self.clock if self._keeps_last and not number else number
        return Step(kind, (), *who, 0, number, weight=weight, floor=floor)

    def _deadline(self, timeout: float | None, what: str) -> Deadline:
        if timeout is None:
            return self._forever
        what = f"{what} of trainer {self.rank} at clock {self.clock}"
        return Deadline(timeout, what)

    def _call(self, request: Request, deadline: Deadline) -> Reply:
        with self._lock:
            while True:
                try:
                    reply = self.shards.call(request, deadline)
                    break
                except ContributionLostError:
                    if (last := self._last_before(request)) is None:
                        raise
                self._call(last, deadline)
            self.reads.lag = max(self.reads.lag, reply.lag)
            seen, target = self.shards.seen, request.target
            if seen is not None and target is not None:
                seen.update(row for row in reply.versions if target.reads(row[0]))
            return reply

    def _last_before(self, request: Request) -> Request | None:
        """Return the last step that ticked, to send before one that lacks it.

        A second copy has a shard without the open round: once a shard, or more often.
        Pushes of the same clock that may be lacking are all sent by `_send` instead.
        """
        step, last = request.step, self._last
        is_part = (self._open or not step.tick) and not step.whole
        return None if request is last or (is_part and step.kind != NOTHING) else last


def _named(ranks: Sequence[int]) -> str:
    """Return in words that some trainers have."""
    if len(ranks) == 1:
        return f"trainer {ranks[0]} has"
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"trainers {', '.join(map(str, ranks[:8]))}{more} have"
