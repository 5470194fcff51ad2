"""From a caller to the shards of one store: route, batch, sequence, retry, await.

The nearest way to each host is taken: a call under the shard's mutex where the host
lives in this process, else a message over Dask's own connections. One call to a host
is one message, whatever it carries for however many shards.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from daskps import config
from daskps.cluster.deadline import Deadline
from daskps.cluster.host import HOSTS, ShardHost
from daskps.cluster.messages import Answer, Array, Call, pack_call, unpack_answers
from daskps.errors import DaskPSError, ShardLostError, StaleGenerationError
from daskps.shards.base import NO_WAIT

if TYPE_CHECKING:
    from daskps.cluster.link import Link, Pending
    from daskps.cluster.meta import Meta

logger = logging.getLogger(__name__)
T = TypeVar("T")
#: How long one message may wait at a host before it asks again. Bounds what a host
#: keeps for a caller that is gone.
WAIT_SECONDS = 20.0
#: How long to wait for a message that was called off.
STOP_SECONDS = 5.0
#: How long a host may be silent before the directory is asked whether it is gone.
SUSPECT_SECONDS = 1.0
#: How long a control message to a host that cannot be reached is tried again.
CONTROL_SECONDS = 5.0
#: Pauses between two tries to reach a host that does not answer.
BACKOFF_SECONDS = (0.01, 0.05, 0.2, 0.5)

Outs = Mapping[int, Sequence[Array]]


@dataclass(slots=True)
class Counters:
    """What a handle has done: messages, calls in the process, bytes, retries."""

    messages: int = 0
    local_calls: int = 0
    nbytes: int = 0
    retries: int = 0


class ShardClient:
    """Calls to the shards of one store from one process.

    Parameters
    ----------
    link : Link
        The way to the cluster.
    meta : Meta
        The store.
    """

    def __init__(self, link: Link, meta: Meta) -> None:
        settings = config.load()
        self.link, self.meta = link, meta
        self.counters = Counters()
        self._name, self._numbers = uuid.uuid4().hex, itertools.count()
        self._in_process = settings.process_way
        self.hosts = meta.hosts

    # -- one exchange with all hosts concerned -------------------------------

    def call(
        self, calls: Mapping[str, Call], outs: Outs, timeout: float | None, what: str
    ) -> dict[int, Answer]:
        """Send a call to each host from a thread that may wait.

        Parameters
        ----------
        calls : mapping of str to Call
            By worker address.
        outs : mapping of int to sequence of ndarray
            For each shard where its ranges go.
        timeout : float or None
            Seconds; None for ever.
        what : str
            What is waited for, for messages.

        Returns
        -------
        dict of int to Answer
            By shard.
        """
        near = {w: HOSTS[w] for w in calls if self._is_near(w)}
        if not near:
            return self.link.run(lambda: self.call_async(calls, outs, timeout, what))
        deadline = Deadline(timeout, what)
        far = {w: c for w, c in calls.items() if w not in near}
        started = (
            self.link.start(lambda: self.call_async(far, outs, timeout, what))
            if far
            else None
        )
        answers: dict[int, Answer] = {}
        try:
            for worker, host in near.items():
                found = self._now(host, calls[worker], outs, deadline)
                answers.update((a.shard, a) for a in found)
            if started is not None:
                answers.update(started.result())
        except BaseException:
            if started is not None:
                started.stop()
                # Until then the loop may read or fill the caller's arrays.
                concurrent.futures.wait([started], STOP_SECONDS)
            raise
        return answers

    def begin(
        self, calls: Mapping[str, Call], outs: Outs, what: str
    ) -> tuple[dict[str, Call], Pending[dict[int, Answer]]]:
        """Send the calls that leave this process; return the others, and the answers.

        Until these are there, or were stopped, `outs` may be written to.
        """
        near = {w: c for w, c in calls.items() if self._is_near(w)}
        far = {w: c for w, c in calls.items() if w not in near}
        work = partial(self.call_async, far, outs, None, what)
        return near, self.link.start(work)

    def ways(self, on_loop: bool) -> dict[str, str]:
        """Return how calls reach each host: "process" or "message".

        On an event loop only hosts on the same loop are called directly.
        """
        return {
            worker: "process"
            if self._is_near(worker)
            and (not on_loop or HOSTS[worker].worker.loop is self.link.loop)
            else "message"
            for worker in self.hosts
        }

    def _is_near(self, worker: str) -> bool:
        return self._in_process and worker in HOSTS

    def _now(
        self, host: ShardHost, call: Call, outs: Outs, deadline: Deadline
    ) -> list[Answer]:
        """Serve a call in this thread, waiting as long as the deadline allows."""
        self.counters.local_calls += 1
        while True:
            seconds = min(deadline.left(), WAIT_SECONDS)
            try:
                answers = host.call_now(call, outs, seconds)
            except StaleGenerationError:
                # The host has just dropped the shard: the loop finds out why.
                worker = host.worker.address
                return self.link.run(
                    partial(self._to_host, worker, call, outs, deadline)
                )
            _raise_first(answers)
            if not any(a.parked for a in answers):
                return answers
            call = _again(call, answers)

    # -- on the event loop ---------------------------------------------------

    async def call_async(
        self, calls: Mapping[str, Call], outs: Outs, seconds: float | None, what: str
    ) -> dict[int, Answer]:
        """Send a call to each host from the event loop; see :meth:`call`."""
        deadline = Deadline(seconds, what)
        found = await gather(
            *(self._to_host(w, c, outs, deadline) for w, c in calls.items())
        )
        return {a.shard: a for answers in found for a in answers}

    async def _to_host(
        self, worker: str, call: Call, outs: Outs, deadline: Deadline
    ) -> list[Answer]:
        attempts = itertools.count()
        while True:
            left = deadline.left()
            token = f"{self._name}-{next(self._numbers)}"
            call = replace(call, wait_seconds=min(left, WAIT_SECONDS), token=token)
            try:
                answers = await self._send(worker, call, left)
            except TimeoutError:
                raise deadline.error(worker) from None
            except (OSError, StaleGenerationError) as error:
                await self._relocate(worker, error, next(attempts), deadline)
                continue
            try:
                _raise_first(answers)
            except StaleGenerationError as error:
                await self._relocate(worker, error, next(attempts), deadline)
                continue
            if not any(a.parked for a in answers):
                _fill(outs, answers)
                return answers
            call = _again(call, answers)

    async def _send(self, worker: str, call: Call, left: float) -> list[Answer]:
        if self._is_near(worker) and HOSTS[worker].worker.loop is self.link.loop:
            self.counters.local_calls += 1
            return await HOSTS[worker].call(call)
        self.counters.messages += 1
        self.counters.nbytes += call.nbytes
        try:
            async with self.watching(worker, call.run):
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

    @contextlib.asynccontextmanager
    async def watching(self, worker: str, run: int = 0) -> AsyncIterator[None]:
        """Ask the directory about a host that does not answer for a while.

        Dask tries to connect to a dead address for 30 s. A timer costs next to
        nothing where the answer comes in time.
        """
        task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        found: list[Exception] = []
        checks: list[asyncio.Task[None]] = []

        async def check() -> None:
            while task is not None and not found:
                try:
                    self._check(await self._locate(run), worker)
                except DaskPSError as error:
                    found.append(error)
                    task.cancel()
                except OSError:
                    logger.debug("the scheduler does not answer either")
                await asyncio.sleep(SUSPECT_SECONDS)

        timer = loop.call_later(
            SUSPECT_SECONDS, lambda: checks.append(loop.create_task(check()))
        )
        try:
            yield
            if found and task is not None:
                # The answer came together with the cancellation.
                task.uncancel()
        except asyncio.CancelledError:
            if not found:
                raise
            if task is not None:
                task.uncancel()
            raise found[0] from None
        finally:
            timer.cancel()
            for asked in checks:
                asked.cancel()

    async def _relocate(
        self, worker: str, error: Exception, attempt: int, deadline: Deadline
    ) -> None:
        """Find out whether a message that failed is worth another try."""
        left = deadline.left()
        work = self._locate()
        seconds = None if left == float("inf") else left
        self._check(await self.link.within(work, seconds, deadline.what), worker)
        self.counters.retries += 1
        logger.debug("%s: try %d at %s: %r", deadline.what, attempt + 2, worker, error)
        if isinstance(error, StaleGenerationError) and attempt >= 3:
            logger.warning("%s gives up on %s: %s", deadline.what, worker, error)
            raise error
        pause = BACKOFF_SECONDS[min(attempt, len(BACKOFF_SECONDS) - 1)]
        await asyncio.sleep(min(pause, deadline.left()))

    async def _locate(self, run: int = 0) -> dict[str, Any]:
        uid = self.meta.uid
        found: dict[str, Any] = await self.link.directory("locate", uid=uid, run=run)
        return found

    def _check(self, located: Mapping[str, Any], worker: str) -> None:
        for shard, owner, reason in located["lost"]:
            if owner == worker:
                raise ShardLostError(self.meta.name, shard, owner, reason)

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

        self.link.start(lambda: asyncio.gather(*map(tell, self.hosts)))

    async def control(self, method: str, **kwargs: Any) -> list[Any]:
        """Send a control message to every host of the store."""
        return await gather(
            *(self.control_at(worker, method, **kwargs) for worker in self.hosts)
        )

    async def control_at(self, worker: str, method: str, **kwargs: Any) -> Any:
        """Send a control message to one host; a lost shard raises ShardLostError."""
        deadline = Deadline(CONTROL_SECONDS, f"{method} of store {self.meta.name!r}")
        for attempt in itertools.count():
            try:
                async with self.watching(worker):
                    return await self.link.control(
                        worker, method, store=self.meta.uid, **kwargs
                    )
            except (OSError, StaleGenerationError) as error:
                await self._relocate(worker, error, attempt, deadline)
        return None


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


def _raise_first(answers: Sequence[Answer]) -> None:
    for answer in answers:
        if answer.error is not None:
            raise answer.error


def _again(call: Call, answers: Sequence[Answer]) -> Call:
    """Return the call that waits on: without its arrays where they were accepted."""
    if all(a.applied for a in answers):
        return call.waiting()
    return call


def _fill(outs: Outs, answers: Sequence[Answer]) -> None:
    for answer in answers:
        wanted = outs.get(answer.shard, ())
        if answer.arrays and wanted and answer.arrays[0] is not wanted[0]:
            for out, array in zip(wanted, answer.arrays, strict=True):
                np.copyto(out, array)
