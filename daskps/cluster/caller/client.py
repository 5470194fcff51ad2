"""From a caller to the shards of one store: route, batch, sequence, retry, await.

The nearest way to each host is taken: none but the shard's mutex where the host lives
in this process, its lock where its memory is mapped here, else a message over Dask's
own connections. One call to a host is one message, whatever it carries for however
many shards.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from daskps.cluster.caller.answers import (
    Outs,
    again,
    check_located,
    fill,
    late,
    raise_first,
)
from daskps.cluster.caller.liveness import Liveness
from daskps.cluster.caller.near import Counters, NearCall
from daskps.cluster.caller.routes import by_host
from daskps.cluster.caller.ways import Ways
from daskps.cluster.host.host import HOSTS
from daskps.cluster.machine.membership import owner_of, pid_of
from daskps.cluster.wire.deadline import Deadline
from daskps.cluster.wire.messages import Answer, Call, pack_call, unpack_answers
from daskps.errors import DaskPSError, StaleGenerationError
from daskps.shards.steps import NO_WAIT

if TYPE_CHECKING:
    from collections.abc import (
        Awaitable,
        Callable,
        Mapping,
        Sequence,
    )

    from daskps.cluster.caller.link import Link
    from daskps.cluster.caller.shard_map import RunMembership, StoreMap

logger = logging.getLogger(__name__)
T = TypeVar("T")
#: How long one message may wait at a host before it asks again. Bounds what a host
#: keeps for a caller that is gone.
WAIT_SECONDS = 20.0
#: How long a control message to a host that cannot be reached is tried again: new
#: owners of its shards may have to be found first.
CONTROL_SECONDS = 20.0
#: How long the directory may think about where shards are that a worker left: the
#: first time, and after that.
FIRST_SECONDS, ADOPT_SECONDS = 1.0, 5.0
#: How long a host may take to say who keeps a call that is late.
ASK_SECONDS = 0.5
#: Pauses between two tries to reach a host that does not answer.
BACKOFF_SECONDS = (0.01, 0.05, 0.2, 0.5)


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
    """

    def __init__(
        self, link: Link, meta: StoreMap, joined: RunMembership | None = None
    ) -> None:
        self.link, self.meta = link, meta
        self.counters = Counters()
        self._name, self._numbers = uuid.uuid4().hex, itertools.count()
        self.ways = Ways(link, meta, joined)
        size = joined.size if joined else 1
        #: What shards that were away when they were last looked for wait for.
        self._waits: dict[int, str] = {}
        self._locate = partial(_locate, link, meta.uid)
        self.liveness = Liveness(self._locate, meta.name, size)

    # -- one exchange with all hosts concerned -------------------------------

    def call(
        self, calls: Mapping[str, Call], outs: Outs, deadline: Deadline
    ) -> dict[int, Answer]:
        """Send a call to each host from a thread that may wait.

        Parameters
        ----------
        calls : mapping of str to Call
            By worker address.
        outs : mapping of int to sequence of ndarray
            For each shard where its ranges go.
        deadline : Deadline
            Its end, and what is waited for.

        Returns
        -------
        dict of int to Answer
            By shard.
        """
        found = {w: self.ways.serving(w, by_owner=c.by_owner) for w, c in calls.items()}
        near = {w: (s, calls[w]) for w, s in found.items() if s is not None}
        if not near:
            return self.link.run(lambda: self.call_async(calls, outs, deadline))
        far = {w: c for w, c in calls.items() if w not in near}
        return NearCall(self, outs, deadline).call(near, far)

    # -- on the event loop ---------------------------------------------------

    async def call_async(
        self, calls: Mapping[str, Call], outs: Outs, deadline: Deadline
    ) -> dict[int, Answer]:
        """Send a call to each host from the event loop; see :meth:`call`."""
        found = await gather(
            *(self.to_host(w, c, outs, deadline=deadline) for w, c in calls.items())
        )
        return {a.shard: a for answers in found for a in answers}

    async def to_host(
        self,
        worker: str,
        call: Call,
        outs: Outs,
        *,
        deadline: Deadline,
        tries: int = 0,
    ) -> list[Answer]:
        """Send a call to one host until it is answered, or that is in vain.

        Where its shards have moved it goes to those that have them now: the same call,
        which a shard that has applied it knows again.
        """
        while True:
            try:
                left = deadline.left()
                token = f"{self._name}-{next(self._numbers)}"
                call = call._replace(wait_seconds=min(left, WAIT_SECONDS), token=token)
                answers = await self._send(worker, call, left)
                raise_first(answers)
            except TimeoutError:
                raise await self.late(deadline, worker, call) from None
            except (OSError, StaleGenerationError) as error:
                parts = {part.shard: part for part in call.parts}
                try:
                    tries = await self._relocate(
                        list(parts), error, tries=tries, deadline=deadline
                    )
                except TimeoutError:
                    raise await self.late(deadline, worker, call) from error
                calls = by_host(self.meta, parts, call)
                if list(calls) != [worker]:
                    found = await gather(
                        *(
                            self.to_host(w, c, outs, deadline=deadline, tries=tries)
                            for w, c in calls.items()
                        )
                    )
                    return [answer for answers in found for answer in answers]
                call = calls[worker]
                continue
            if not any(a.parked for a in answers):
                fill(outs, answers)
                return answers
            call = again(call, answers)

    async def _send(self, worker: str, call: Call, left: float) -> list[Answer]:
        shards = [part.shard for part in call.parts]
        if self.ways.is_near(worker) and HOSTS[worker].worker.loop is self.link.loop:
            self.counters.local_calls += 1
            async with self.liveness.over(worker, shards, call.run):
                return await HOSTS[worker].call(call)
        if self.ways.is_gone(worker):
            # Dask would try to connect for a while.
            raise OSError(f"the process of worker {worker} has died")
        self.counters.messages += 1
        self.counters.nbytes += call.nbytes
        try:
            async with self.liveness.over(worker, shards, call.run):
                reply = await asyncio.wait_for(
                    self.link.rpc(worker, "daskps_call", **pack_call(call)),
                    None if left == float("inf") else left,
                )
        except asyncio.CancelledError:
            self._give_up(worker, call)
            raise
        return unpack_answers(reply, f"worker {worker}", call)

    def _give_up(self, worker: str, call: Call) -> None:
        """Tell a host that nobody waits for a call any more.

        Where this gets lost the host lets the call go after its `wait_seconds`.
        """
        if call.wait != NO_WAIT or call.run:
            self.link.start(
                lambda: self.link.control(
                    worker, "give_up", store=call.store, token=call.token
                )
            )

    async def _relocate(
        self,
        shards: Sequence[int],
        error: Exception,
        *,
        tries: int,
        deadline: Deadline,
        run: int = 0,
    ) -> int:
        """Find out where to send a message again that failed, and whether to.

        `run` is for whom, where no trainer calls. Returns how often it was tried in
        vain where the shards still are.
        """
        where, wait = self.meta.where, FIRST_SECONDS
        while True:
            left = deadline.left()
            # For half of what is left at most: an answer says what keeps them.
            work = self._locate(run or self.ways.run, wait_seconds=min(left / 2, wait))
            seconds = None if left == float("inf") else left
            located = await self.link.within(work, seconds, deadline.what)
            self._waits, wait = dict(located["waits"]), ADOPT_SECONDS
            check_located(self.meta.name, located, shards)
            if not set(shards) & set(located["adopting"]):
                break
        self.counters.retries += 1
        logger.debug("%s: try %d: %r", deadline.what, tries + 2, error)
        self.ways.moved(located)
        if self.meta.where != where:
            return 0
        if isinstance(error, StaleGenerationError) and tries >= 3:
            logger.warning("%s gives up: %s", deadline.what, error)
            raise error
        pause = BACKOFF_SECONDS[min(tries, len(BACKOFF_SECONDS) - 1)]
        await asyncio.sleep(min(pause, deadline.left()))
        return tries + 1

    async def late(self, deadline: Deadline, worker: str, call: Call) -> TimeoutError:
        """Return the error that says what a call has waited for, and who keeps it."""
        shards, why = [part.shard for part in call.parts], ""
        await self._look_who_is_away()
        for shard in shards:
            if shard in self._waits:
                return late(deadline, worker, call, f"which {self._waits[shard]}")
        try:
            asked = self.link.control(
                worker, "locked", store=self.meta.uid, shards=shards
            )
            for shard, pid in await asyncio.wait_for(asked, ASK_SECONDS):
                why = f"where process {pid} of its machine has locked shard {shard}"
        except (OSError, DaskPSError):
            why = f"which does not answer{self._process(shards)}"
        return late(deadline, worker, call, why)

    async def _look_who_is_away(self) -> None:
        """Ask what shards wait for that are away, but not for long."""
        with contextlib.suppress(OSError, DaskPSError):
            located = await asyncio.wait_for(self._locate(self.ways.run), ASK_SECONDS)
            self._waits = dict(located["waits"])

    def _process(self, shards: Sequence[int]) -> str:
        """Return the number of the process that owns shards, in words."""
        places = self.meta.where.segments
        names = [places[i].name for i in shards if i in places]
        return f" (process {pid_of(owner_of(names[0]))} of its machine)" * bool(names)

    # -- control -------------------------------------------------------------

    def settle(self, owner: int, floor: int, run: int = 0) -> None:
        """Tell the hosts, without waiting, which steps are no longer under way.

        Parameters
        ----------
        owner : int
            A producer, or -1 - rank of a trainer.
        floor : int
            All its steps below this number were answered or given up.
        run : int
            The trainer's run.
        """

        async def tell(worker: str) -> None:
            settled = {"run": run, "owner": owner, "floor": floor}
            told = self.link.control(worker, "settle", store=self.meta.uid, **settled)
            # The owner's next step says the same.
            with contextlib.suppress(OSError, DaskPSError):
                await asyncio.wait_for(told, CONTROL_SECONDS)

        self.link.start(lambda: asyncio.gather(*map(tell, self.meta.hosts)))

    async def control(
        self, method: str, deadline: Deadline | None = None, **kwargs: Any
    ) -> list[Any]:
        """Send a control message to every host of the store.

        Where shards have moved meanwhile, to all hosts once more.
        """
        return await self.rerouted(
            method,
            lambda: dict.fromkeys(self.meta.hosts, kwargs),
            deadline=deadline,
            run=kwargs.get("run", 0),
        )

    async def control_at(self, shard: int, method: str, **kwargs: Any) -> Any:
        """Send a control message to the host of one shard."""
        [found] = await self.rerouted(
            method,
            lambda: {self.meta.owners[shard]: kwargs},
            run=kwargs.get("run", 0),
        )
        return found

    async def rerouted(
        self,
        method: str,
        plan: Callable[[], Mapping[str, Mapping[str, Any]]],
        *,
        deadline: Deadline | None = None,
        run: int = 0,
    ) -> list[Any]:
        """Send control messages, planned anew when shards have moved.

        Parameters
        ----------
        method : str
            What is asked of the hosts; asking twice is fine.
        plan : callable
            Returns the arguments for each worker.
        deadline : Deadline, optional
            When to give up.
        run : int
            The run for which; it is tried until that is over, without a deadline.

        Returns
        -------
        list
            What they answer, in the order of the plan.

        Raises
        ------
        ShardLostError
            Where a shard of the store is lost.
        RunCancelledError
            If the run is over.
        """
        what = f"{method} of store {self.meta.name!r}"
        seconds = None if run else CONTROL_SECONDS
        # A caller without a limit waits for what a host has to work out.
        scope = asyncio.timeout(deadline.remaining() if deadline else None)
        deadline = deadline or Deadline(seconds, what)
        try:
            async with scope:
                return await self._rerouted(method, plan, deadline, run)
        except TimeoutError as error:
            if not scope.expired() and not deadline.is_over:
                raise
            await self._look_who_is_away()
            raise deadline.error(self._who_is_away(), changes=False) from error

    async def _rerouted(
        self,
        method: str,
        plan: Callable[[], Mapping[str, Mapping[str, Any]]],
        deadline: Deadline,
        run: int,
    ) -> list[Any]:
        tries = 0
        while True:
            planned = plan()
            try:
                return await gather(
                    *(self._tell(w, method, of) for w, of in planned.items())
                )
            except (OSError, StaleGenerationError) as error:
                every = range(self.meta.layout.n_shards)
                tries = await self._relocate(
                    every, error, tries=tries, deadline=deadline, run=run
                )

    def _who_is_away(self) -> str:
        """Return which shard was away when they were last looked for, in words."""
        for shard, why in sorted(self._waits.items()):
            return f"shard {shard} at worker {self.meta.owners[shard]}, which {why}"
        return ""

    async def _tell(self, worker: str, method: str, of: Mapping[str, Any]) -> Any:
        async with self.liveness.over(worker, self.meta.hosts.get(worker, ())):
            return await self.link.control(worker, method, store=self.meta.uid, **of)


async def _locate(
    link: Link, uid: str, run: int = 0, wait_seconds: float = 0.0
) -> dict[str, Any]:
    # No method: a cycle would keep the shards' memory mapped until it is collected.
    found: dict[str, Any] = await link.directory(
        "locate", uid=uid, run=run, wait_seconds=wait_seconds
    )
    return found


async def gather(*work: Awaitable[T]) -> list[T]:
    """Await all; at the first error cancel the rest and wait until they stopped."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
