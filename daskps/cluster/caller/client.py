"""Calls and control messages to the shards of one store, each by the nearest way.

The nearest way is the shard's mutex alone where its host lives in this process, its
lock where its memory is mapped here, else a socket, and a message where that takes
long or there is none. One call to a host is one frame or message, for any number of
shards.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from daskps.cluster.caller.carriers import Carriers
from daskps.cluster.caller.local import SplitRoute
from daskps.cluster.caller.local_shards import local_call
from daskps.cluster.caller.reads import Reads
from daskps.cluster.caller.remote import RemoteShards
from daskps.cluster.caller.routes import GRADIENT, Reply, Request, Route
from daskps.cluster.caller.row_reads import RowReads
from daskps.cluster.caller.shard_map import Prepared
from daskps.cluster.caller.socket_carrier import SocketCarrier
from daskps.cluster.counters import counters_of
from daskps.cluster.protocol.deadline import Deadline, gather
from daskps.errors import DaskPSError, StaleGenerationError
from daskps.usercode import holding_interrupts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from daskps.cluster.caller.link import Link
    from daskps.cluster.caller.local import LocalPart
    from daskps.cluster.caller.shard_map import RunMembership, StoreMap
    from daskps.cluster.counters import Counters

#: How long a control message to a host that cannot be reached is tried again: new
#: owners of its shards may have to be found first.
_CONTROL_SECONDS = 20.0


class ShardClient:
    """Calls to the shards of one store from one process.

    Parameters
    ----------
    link : Link
        The way to the cluster.
    meta : StoreMap
        The store.
    joined : RunMembership, optional
        The run whose trainer calls.
    rank : int
        Its number in the run.
    bsp : bool
        Whether the run has rounds.
    """

    def __init__(
        self,
        link: Link,
        meta: StoreMap,
        joined: RunMembership | None = None,
        *,
        rank: int = -1,
        bsp: bool = False,
    ) -> None:
        self.link, self.meta = link, meta
        self.carriers = Carriers(link, meta, joined, rank=rank, bsp=bsp)
        measures = joined is not None and joined.measures_delay
        self.remote = RemoteShards(
            link, meta, self.carriers, joined.size if joined else 1
        )
        self.counters = self.remote.counters
        #: Version of each shard that was read last, where anybody wants to know.
        self.seen: dict[int, int] | None = {} if measures else None
        self.reads = Reads(meta, self.carriers, self.remote, self.seen)
        #: The reads of rows alone, by a handle.
        self.rows = RowReads(meta, self.carriers, self.remote)
        #: The shards of a route that this process reaches.
        self._local: Prepared[tuple[Route, bool], SplitRoute] = Prepared(meta)

    def pull(self, request: Request, deadline: Deadline) -> Reply:
        """Read from a thread that may wait, if possible without asking the shards.

        Parameters
        ----------
        request : Request
            A read outside runs, or of a trainer.
        deadline : Deadline
            The end of the call, and the name of the thing that is waited for.

        Returns
        -------
        Reply
            The answers of the shards that were asked.
        """
        target, reply = request.target, Reply([])
        if not (target and self.reads.fill(target, request.bounds())):
            reply = self.call(request, deadline)
        for more in request.rest:
            reply = self.call(more, deadline)
        return reply

    def call(self, request: Request, deadline: Deadline) -> Reply:
        """Make a call to shards from a thread that may wait.

        Parameters
        ----------
        request : Request
            The call; its target has the values that were read afterwards.
        deadline : Deadline
            The end of the call, and the name of the thing that is waited for.

        Returns
        -------
        Reply
            The answers of the shards.
        """
        if request.rows or (request.target is not None and request.target.rows):
            _count_rows(self.counters, request)
        key = request.route, request.by_owner
        local = self._local.find(key)
        if local is None or time.monotonic() > local.until:
            local = SplitRoute(request.route, self.carriers, by_owner=request.by_owner)
            self._local.keep(key, local, request.route.where)
        if not local.parts:
            if self.link.may_wait():
                route = self.remote.find_socket_route(request, local.remote)
                if route is not None:
                    if request.check is not None and not route.checks:
                        request.check()
                    return SocketCarrier.of(self.remote, route, request, deadline).run()
            request.checked()
            work = self.remote.call
            return self.link.run(lambda: work(request, local.remote, deadline))
        taken, parts = list[tuple[int, int]](), None
        if not local.remote and _is_simple(request):
            taken, parts = _try_local(request, local)
            if not parts:
                self.counters.local_calls += local.n_hosts
                return Reply(taken)
        about = self.remote, request, local, deadline
        return local_call(*about, taken=taken, parts=parts).run()

    async def call_async(self, request: Request, deadline: Deadline) -> Reply:
        """Make a call to shards from the event loop; see :meth:`call`."""
        reply = Reply([])
        for one in (request, *request.rest):
            _count_rows(self.counters, one)
            reply = await self.remote.call(one.checked(), one.route.slices, deadline)
        return reply

    def stats(self, on_loop: bool) -> dict[str, Any]:
        """Return how calls reach each host, and the counts of calls so far.

        Parameters
        ----------
        on_loop : bool
            Whether they come from the event loop.
        """
        carriers = self.carriers.names(on_loop)
        for worker, way in carriers.items():
            if way == "message" and not on_loop and self.remote.sockets_to([worker]):
                carriers[worker] = "socket"
        counted = asdict(self.counters)
        counted["fallbacks"] = self.remote.fallbacks()
        why, sockets = self.carriers.reasons(on_loop), self.remote.sockets_to(carriers)
        return {"carriers": carriers, "why": why, **counted, "sockets": sockets}

    def process_counts(self) -> dict[str, Any]:
        """Return the counts of all handles of this process's client or worker."""
        return asdict(counters_of(self.link.node).total())

    def close(self) -> None:
        """Let go of the shards' memory, which goes with its last user."""
        self.reads.clear()
        self.rows.clear()
        self._local.clear()
        self.carriers.close()

    # -- control -------------------------------------------------------------

    def acknowledge(self, owner: int, floor: int, run: int = 0) -> None:
        """Tell the hosts, without waiting, which steps are no longer under way.

        A shard may be away for long; once it is back a cut would wait for the steps.

        Parameters
        ----------
        owner : int
            A producer, or -1 - rank of a trainer.
        floor : int
            All its steps below this number were answered or given up.
        run : int
            The trainer's run.
        """
        about = {"run": run, "owner": owner, "floor": floor}

        async def tell() -> None:
            # The next step of that producer or trainer says the same, if there is one.
            with contextlib.suppress(OSError, DaskPSError):
                while True:
                    deadline = Deadline(_CONTROL_SECONDS, "an acknowledgement")
                    with contextlib.suppress(TimeoutError):
                        await self.control("acknowledge", deadline, **about)
                        return

        self.link.start(tell)

    def tell(self, method: str, **kwargs: Any) -> None:
        """Send a control message to every host, without waiting; it may be lost."""

        async def tell(worker: str) -> None:
            told = self.link.control(worker, method, store=self.meta.uid, **kwargs)
            with contextlib.suppress(OSError, DaskPSError):
                await asyncio.wait_for(told, _CONTROL_SECONDS)

        self.link.start(lambda: asyncio.gather(*map(tell, self.meta.hosts)))

    async def control(
        self, method: str, deadline: Deadline | None = None, **kwargs: Any
    ) -> list[Any]:
        """Send a control message to every host of the store.

        Where shards have moved meanwhile it sends the message to all hosts once more.
        """
        return await self.control_each(
            method, lambda: dict.fromkeys(self.meta.hosts, kwargs), deadline
        )

    async def ask_owners(
        self,
        method: str,
        wanted: Iterable[int],
        say: Callable[[int], Any],
        deadline: Deadline,
        *,
        key: str = "shards",
        **more: Any,
    ) -> list[Any]:
        """Ask each owner about its shards among `wanted`, and again where these moved.

        A host gets under `key` the values that `say` returns for its shards, and
        `more`. Returns the rows of all answers; raises as :meth:`control_each`.
        """
        shards = [*wanted]

        def plan() -> Mapping[str, Mapping[str, Any]]:
            asked: dict[str, list[Any]] = {}
            for shard in shards:
                asked.setdefault(self.meta.owners[shard], []).append(say(shard))
            return {worker: {key: rows, **more} for worker, rows in asked.items()}

        answers = await self.control_each(method, plan, deadline)
        return [row for answer in answers for row in answer]

    def with_generation(self, shard: int) -> tuple[int, int]:
        """Return a shard and its generation, which a step at its owner needs."""
        return shard, self.meta.where.generations[shard]

    async def control_each(
        self,
        method: str,
        plan: Callable[[], Mapping[str, Mapping[str, Any]]],
        deadline: Deadline | None = None,
    ) -> list[Any]:
        """Send control messages, planned anew when shards have moved.

        For a run it is tried until that is over, without a deadline.

        Parameters
        ----------
        method : str
            The message to the hosts, which may get it twice.
        plan : callable
            Returns the arguments for each worker.
        deadline : Deadline, optional
            When to give up.

        Returns
        -------
        list
            Their answers, in the order of the plan.

        Raises
        ------
        ShardLostError
            Where a shard of the store is lost.
        RunCancelledError
            If the run is over.
        """
        what = f"{method} of store {self.meta.name!r}"
        seconds = None if self.carriers.run else _CONTROL_SECONDS
        # A caller without a limit waits until a host has worked the answer out.
        scope = asyncio.timeout(deadline.remaining() if deadline else None)
        deadline = deadline or Deadline(seconds, what)
        tries = 0
        try:
            async with scope:
                while True:
                    # At one moment: another call may hear that shards have moved.
                    about, hosts = plan().items(), self.meta.hosts
                    planned = {w: {"holds": hosts.get(w, []), **of} for w, of in about}
                    try:
                        return await gather(
                            *(self._tell(w, method, of) for w, of in planned.items())
                        )
                    except (OSError, StaleGenerationError) as error:
                        every = range(self.meta.layout.n_shards)
                        tries = await self.remote.relocate(
                            every, error, tries=tries, deadline=deadline
                        )
        except TimeoutError as error:
            if not scope.expired() and not deadline.is_over:
                raise
            away = await self.remote.who_is_away()
            raise deadline.error(away, changes=False) from error

    async def _tell(self, worker: str, method: str, of: Mapping[str, Any]) -> Any:
        # Else a host that has let go of some would answer for the rest of them.
        async with self.remote.liveness.over(worker, of["holds"]):
            return await self.link.control(worker, method, store=self.meta.uid, **of)


def _count_rows(counters: Counters, request: Request) -> None:
    """Count the rows of tables that a call names."""
    if request.rows:
        for given in request.rows:
            counters.rows_pushed += len(given.split.ids)
    if request.target is not None and (rows := request.target.rows):
        counters.rows_pulled += sum(
            len(r.asked.ids) for of in rows.values() for r in of
        )


def _is_simple(request: Request) -> bool:
    """Return whether a shard may take a call at once: only pushes outside runs.

    A push whose values the shard checks while it applies them becomes a ticket there.
    """
    step, check = request.step, request.check
    if check is not None and request.arrays and not request.rows and not check.done:
        return False
    return bool(
        step.producer
        and not step.given_up
        and request.target is None
        and not request.codec
        and (step.kind == GRADIENT or (request.rows and not request.arrays))
    )


def _try_local(
    request: Request, local: SplitRoute
) -> tuple[list[tuple[int, int]], Sequence[LocalPart]]:
    """Have local shards take a push that is simple, as nearly all are.

    Returns
    -------
    list of (int, int)
        The shards that have taken it, with their versions.
    sequence of LocalPart
        The others: nothing was changed there.
    """
    check, checks = request.check, False
    if check is not None and not check.done:
        checks = not request.arrays and len(local.parts) == 1
        if not checks:  # else one shard applies it before another finds NaN
            check()
    # Ctrl-C must not come between taking a lock and giving it back.
    with holding_interrupts():
        step, given = request.step, (request.arrays, request.rows)
        return local.try_step(step, *given, check=checks)
