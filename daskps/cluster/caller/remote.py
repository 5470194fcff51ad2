"""Calls to shards of other processes, sent again until the shards answer.

Here are the messages, the hosts to ask where the shards have moved, the number of
tries, and the error of a call that is late. A call that is sent again is the same call:
a shard that has applied it knows it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from daskps import config
from daskps.cluster.caller.call_template import least_in
from daskps.cluster.caller.liveness import Liveness, check_located, without_descriptors
from daskps.cluster.caller.routes import Reply, Request, joined
from daskps.cluster.caller.socket_pool import pool_of
from daskps.cluster.caller.socket_route import SocketRoutes, looks_there, may_go
from daskps.cluster.counters import counters_of
from daskps.cluster.host.node import HOSTS
from daskps.cluster.machine.blocks import owner_of
from daskps.cluster.machine.processes import pid_of
from daskps.cluster.protocol.deadline import gather
from daskps.cluster.protocol.messages import PROTOCOL, unpack_answers
from daskps.cluster.protocol.packing import UNKNOWN, pack_array
from daskps.cluster.sockets.frames import CALL, HAS_LEAST, HAS_LR, Head, pack_head
from daskps.errors import DaskPSError, StaleGenerationError
from daskps.shards.steps import NOTHING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from daskps.cluster.caller.call_template import SocketFrame
    from daskps.cluster.caller.carriers import Carriers
    from daskps.cluster.caller.link import CallFuture, Link
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.caller.socket_route import SocketRoute
    from daskps.cluster.caller.targets import Target
    from daskps.cluster.protocol.deadline import Deadline
    from daskps.cluster.protocol.messages import Answer
    from daskps.typing import Array


logger = logging.getLogger(__name__)
T = TypeVar("T")
#: How long one message may wait at a host before it asks again. Bounds what a host
#: keeps for a caller that is gone.
WAIT_SECONDS = 20.0
#: How long the directory may take to say where the shards are that a worker left: the
#: first time, and after that.
FIRST_SECONDS, ADOPT_SECONDS = 1.0, 5.0
#: How long a host may take to say who keeps a call that is late.
ASK_SECONDS = 0.5
#: Pauses between two tries to reach a host that does not answer.
_BACKOFF_SECONDS = (0.01, 0.05, 0.2, 0.5)


class RemoteShards:
    """Calls by message to the shards of one store, from an event loop.

    Parameters
    ----------
    link : Link
        The way to the cluster.
    meta : StoreMap
        The store.
    carriers : Carriers
        How this process reaches its hosts.
    size : int
        How many callers may wait at once: the trainers of a run.
    """

    def __init__(
        self, link: Link, meta: StoreMap, carriers: Carriers, size: int
    ) -> None:
        self.link, self.meta, self._carriers = link, meta, carriers
        self.counters = counters_of(link.node).new(self)
        #: Sockets to the hosts, for calls from threads; None where the configuration
        #: allows none.
        may_use = config.load().socket_carrier
        self.sockets = pool_of(link) if may_use else None
        self._routes = SocketRoutes(meta)
        self._name, self._numbers = uuid.uuid4().hex, itertools.count()
        #: By shard that was away at the last look: the event that it waits for.
        self._waits: dict[int, str] = {}
        # No method: a cycle would keep the shards' memory mapped until it is collected.
        self._locate = partial(locate, link, meta.uid)
        self.liveness = Liveness(self._locate, meta.name, size)

    def send(
        self, request: Request, shards: Sequence[int], deadline: Deadline
    ) -> CallFuture[Reply]:
        """Begin a call by message from a thread; see :meth:`call`."""
        return self.link.start(partial(self.call, request, shards, deadline))

    def watch(
        self, worker: str, shards: Sequence[int], run: int, stop: Callable[[], None]
    ) -> CallFuture[None]:
        """Have a call stopped that waits for a host by other means, if it is in vain.

        Until the future that this returns is stopped.
        """

        async def look() -> None:
            try:
                async with (
                    self.link.reaching(worker),
                    self.liveness.over(worker, shards, run),
                ):
                    await asyncio.Event().wait()
            except DaskPSError:
                stop()

        return self.link.start(look)

    def find_socket_route(
        self, request: Request, shards: Sequence[int]
    ) -> SocketRoute | None:
        """Return the route of a call over sockets; None where it may take none."""
        # Pieces that a caller gives away need a new template each time, and heads of
        # frames have no place for the pushes that it has given up.
        if self.sockets is None or request.given or request.step.given_up:
            return None
        if (request.rows or request.codec) and not may_go(self.meta, request):
            self.counters.fell_back("rows or words that sockets do not carry")
            return None
        checks = request.check is not None and looks_there(request, shards)
        return self._routes.find(request, shards, checks=checks)

    def sockets_to(self, workers: Iterable[str]) -> int:
        """Return how many sockets to some workers this process has."""
        return self.sockets.count(workers) if self.sockets else 0

    def fallbacks(self) -> dict[str, int]:
        """Return by reason the number of calls sent by message in place of a socket.

        Also how often no socket could be opened, for any handle.
        """
        failures = self.sockets.counters.fallbacks if self.sockets else {}
        return {**self.counters.fallbacks, **failures}

    async def call(
        self,
        request: Request,
        shards: Iterable[int],
        deadline: Deadline,
        tries: int = 0,
    ) -> Reply:
        """Send a call to these of its shards, one message to each of their hosts.

        Parameters
        ----------
        request : Request
            The call; its target has the values that were read afterwards.
        shards : iterable of int
            The shards of it to send to.
        deadline : Deadline
            The end of the call, and the name of the thing that is waited for.
        tries : int
            The number of tries in vain so far.

        Returns
        -------
        Reply
            The answers of the shards.
        """
        how = partial(self._to_host, request=request, deadline=deadline, tries=tries)
        work = [how(worker, shards=of) for worker, of in self._hosts_of(shards).items()]
        # One host is the rule, and `gather` a step more each time that its work goes
        # on.
        return await work[0] if len(work) == 1 else joined(await gather(*work))

    def _hosts_of(self, shards: Iterable[int]) -> dict[str, list[int]]:
        """Return the shards by the worker that owns them."""
        hosts: dict[str, list[int]] = {}
        owners = self.meta.where.owners
        for shard in shards:
            hosts.setdefault(owners[shard], []).append(shard)
        return hosts

    async def _to_host(
        self,
        worker: str,
        request: Request,
        shards: list[int],
        *,
        deadline: Deadline,
        tries: int,
    ) -> Reply:
        """Send a call to one host until it is answered, or that is in vain.

        Where its shards have moved it goes to those that have them now.
        """
        while True:
            failed: Exception | None
            try:
                left = deadline.left()
                answers = await self._send(worker, request, shards, left)
            except TimeoutError:
                raise await self.late(deadline, request, shards) from None
            except (OSError, StaleGenerationError) as error:
                failed = error
            else:
                failed = _stale(answers)
            if failed is not None:
                try:
                    tries = await self.relocate(
                        shards, failed, tries=tries, deadline=deadline
                    )
                except TimeoutError:
                    raise await self.late(deadline, request, shards) from failed
                if [*self._hosts_of(shards)] != [worker]:
                    return await self.call(request, shards, deadline, tries)
                continue
            if not any(a.parked for a in answers):
                return Reply.of(answers)
            if all(a.applied for a in answers):
                request = request.waiting()

    async def _send(
        self, worker: str, request: Request, shards: Sequence[int], left: float
    ) -> list[Answer]:
        token, run = f"{self._name}-{next(self._numbers)}", request.step.run
        wait = min(left, WAIT_SECONDS)
        async with self.liveness.over(worker, shards, run):
            if (
                self._carriers.is_local(worker)
                and HOSTS[worker].worker.loop is self.link.loop
            ):
                self.counters.local_calls += 1
                call = request.call(self.meta, shards, wait, token)
                plain = call._replace(read_codec="")
                answers: list[Answer] = await HOSTS[worker].call(plain)
                if _are_final(answers):
                    _fill(request.target, answers)
                return answers
            if self._carriers.is_gone(worker):
                # Dask would try to connect for a while.
                raise OSError(f"the process of worker {worker} has died")
            route = self._routes.find(request, shards)
            if [frame.template.worker for frame in route.frames] != [worker]:
                raise StaleGenerationError(
                    "shards moved while a call was made for them"
                )
            made = HostMessage.of(route, request, wait, token)
            self.counters.messages += 1
            self.counters.nbytes += made.frame.data_nbytes
            try:
                seconds = None if left == float("inf") else left
                answers = await asyncio.wait_for(self._ask(worker, made), seconds)
            except asyncio.CancelledError:
                self._give_up(worker, token)
                raise
            if _are_final(answers):
                made.fill(answers)
            return answers

    async def _ask(self, worker: str, made: HostMessage) -> list[Answer]:
        """Return the answers to a message, with its template where the host lacks that."""
        template = made.frame.template
        text = None if template.is_told else template.text
        # At the host it is `ShardHost.handle_call`.
        reply = await self.link.rpc(worker, "daskps_call", text=text, **made.said)
        if text is None and reply == {"status": UNKNOWN}:
            said = {**made.said, "text": template.text}
            reply = await self.link.rpc(worker, "daskps_call", **said)
        template.is_told = True
        return unpack_answers(reply, f"worker {worker}", made.dtypes)

    def _give_up(self, worker: str, token: str) -> None:
        """Tell a host that nobody waits for a call any more.

        Where this gets lost the host lets the call go after its `wait_seconds`.
        """
        about = {"store": self.meta.uid, "token": token}
        self.link.start(partial(self.link.control, worker, "give_up", **about))

    async def relocate(
        self,
        shards: Sequence[int],
        error: Exception,
        *,
        tries: int,
        deadline: Deadline,
    ) -> int:
        """Find out where to send a message again that failed, and whether to.

        Returns the number of tries in vain at the place where the shards still are.
        """
        where, wait = self.meta.where, FIRST_SECONDS
        while True:
            left = deadline.left()
            # The directory answers once none is away, or after this time. For half of the
            # time left at most: an answer says what keeps the shards.
            at_most = min(left / 2, wait)
            work = partial(self._locate, self._carriers.run, wait_seconds=at_most)
            seconds = None if left == float("inf") else left
            located = await self.link.within(work, seconds, deadline.what)
            self._waits, wait = dict(located["away"]), ADOPT_SECONDS
            check_located(self.meta.name, located, shards)
            if not set(shards) & self._waits.keys():
                break
        self.counters.retries += 1
        logger.debug("%s: try %d: %r", deadline.what, tries + 2, error)
        self._carriers.moved(located)
        if self.meta.where != where:
            return 0  # they have moved: no try was in vain there
        if isinstance(error, StaleGenerationError) and tries >= 3:
            logger.warning("%s gives up: %s", deadline.what, error)
            raise error
        pause = _BACKOFF_SECONDS[min(tries, len(_BACKOFF_SECONDS) - 1)]
        await asyncio.sleep(min(pause, deadline.left()))
        return tries + 1

    # -- the error of a call that is late --------------------------------------

    async def late(
        self, deadline: Deadline, request: Request, shards: Sequence[int]
    ) -> TimeoutError:
        """Return the error that names what a call has waited for, and what keeps it."""
        worker = self.meta.where.owners[shards[0]]
        named = ", ".join(map(str, shards[:8])) + (", ..." if len(shards) > 8 else "")
        where = f"{'shards' if len(shards) > 1 else 'shard'} {named} at worker {worker}"
        if why := await self._who_keeps(worker, shards):
            where += f", {why}"
        # In a run a call that waits may be the rest of a push that was accepted.
        changes = request.step.kind != NOTHING or bool(request.step.run)
        return deadline.error(where, changes=changes)

    async def _who_keeps(self, worker: str, shards: Sequence[int]) -> str:
        has_directory = await self._look_who_is_away()
        for shard in shards:
            if shard in self._waits:
                return f"which {self._waits[shard]}"
        if why := without_descriptors():
            return why
        try:
            asked = self.link.control(
                worker, "keeps", store=self.meta.uid, shards=shards
            )
            why = await asyncio.wait_for(asked, ASK_SECONDS)
        except (OSError, DaskPSError):
            places = self.meta.where.segments
            names = [places[i].name for i in shards if i in places]
            pid = pid_of(owner_of(names[0])) if names else 0
            process = f" (process {pid} of its machine)" if names else ""
            why = f"which does not answer{process}"
            if not has_directory:
                why += ", and nor does the scheduler, which knows where its shards are"
        return why

    async def _look_who_is_away(self) -> bool:
        """Ask the directory, but not for long, what the shards that are away wait for.

        Returns whether the directory has answered.
        """
        try:
            located = await asyncio.wait_for(
                self._locate(self._carriers.run), ASK_SECONDS
            )
            self._waits = dict(located["away"])
        except OSError:
            return False
        except DaskPSError:
            return True
        return True

    async def who_is_away(self) -> str:
        """Return in words the shard that is away, and the event that it waits for."""
        await self._look_who_is_away()
        for shard, why in sorted(self._waits.items()):
            return f"shard {shard} at worker {self.meta.owners[shard]}, which {why}"
        return ""


def _stale(answers: Sequence[Answer]) -> StaleGenerationError | None:
    """Return the error of a shard that has moved, if there is one; raise any other.

    An error of the user's code is raised as it is: a TimeoutError of a rule was no
    time-out of this call, and after an OSError of a rule the host is not out of reach.
    """
    for answer in answers:
        if isinstance(answer.error, StaleGenerationError):
            return answer.error
        if answer.error is not None:
            raise answer.error
    return None


def _are_final(answers: Sequence[Answer]) -> bool:
    """Return whether the values have come that were read."""
    return not any(a.parked or a.error for a in answers)


def _fill(target: Target | None, answers: Sequence[Answer]) -> None:
    """Copy the values that were read into the arrays of the target."""
    for answer in answers:
        if answer.arrays and target is not None:
            target.fill(answer.shard, answer.arrays)


async def locate(
    link: Link, uid: str, run: int = 0, wait_seconds: float = 0.0
) -> dict[str, Any]:
    """Ask the directory where the shards of a store are: its `Directory.on_locate`."""
    found: dict[str, Any] = await link.directory(
        "locate", uid=uid, run=run, wait_seconds=wait_seconds
    )
    return found


class HostMessage(NamedTuple):
    """One call to one host by message: its frame, and the arrays that it comes with."""

    frame: SocketFrame
    #: Take the values that come.
    outs: Sequence[Array]
    #: The rest of the message, but for the text of its template.
    said: dict[str, Any]

    @classmethod
    def of(
        cls, route: SocketRoute, request: Request, wait_seconds: float, token: str
    ) -> HostMessage:
        """Return the message of a call along a route to one host."""
        [frame], step, target = route.frames, request.step, request.target
        arrays, outs = request.arrays, () if target is None else target.flats
        if route.arrays is not None:
            arrays, outs = route.arrays
        least = b""
        if request.min_version is not None or request.seen is not None:
            least = least_in(frame, request.min_version, request.seen)
        flags = HAS_LEAST if least else 0
        if step.lr is not None:
            flags |= HAS_LR
        head = Head(
            CALL,
            len(least) + frame.nbytes,
            0,
            0,
            flags,
            step.clock,
            step.sequence,
            step.floor,
            step.weight,
            step.lr or 0.0,
            int(1000 * wait_seconds),
        )
        first = least + frame.counts
        body = [pack_array(arrays[name][a:b]) for name, a, b in frame.slices]
        said = {
            "protocol": PROTOCOL,
            "template": frame.key,
            "head": pack_head(head),
            "body": [first, *body] if first else body,
            "given_up": step.given_up,
            "token": token,
        }
        return cls(frame, [*outs, *route.word_arrays()], said)

    @property
    def dtypes(self) -> dict[int, list[str]]:
        """By shard the dtypes of the arrays that come, but for those without elements."""
        reads = zip(self.frame.shards, self.frame.reads, strict=True)
        return {s: [of[0] for of, *_ in r if of[1] < of[2]] for s, r in reads}

    def fill(self, answers: Sequence[Answer]) -> None:
        """Put what was read where it belongs."""
        frame, outs = self.frame, self.outs
        reads = dict(zip(frame.shards, frame.reads, strict=True))
        for answer in answers:
            places = [one for one in reads[answer.shard] if one.range[1] < one.range[2]]
            for (_, number, where), array in zip(places, answer.arrays, strict=True):
                np.copyto(outs[number][where], array)
        for move in frame.moves:
            move.put(outs)
