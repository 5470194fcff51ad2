"""Checks whether hosts that do not answer for a while are alive and within reach.

Dask tries to connect to a dead address for 30 s; the directory knows sooner. But a
trainer that waits for a slow one waits on every host of the store, and a thousand may:
all calls of a handle ask together, and those of a large run more rarely, so that the
load of the scheduler does not grow with the run.

A firewall or a gateway may let a client through to the scheduler and to no worker: a
call whose shards have not moved would try until its time is over
(dask/distributed#8964).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from daskps.cluster import upstream
from daskps.errors import (
    DaskPSError,
    ShardLostError,
    StaleGenerationError,
    WorkerUnreachableError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

logger = logging.getLogger(__name__)

#: How long a host may be silent before the directory is asked whether it is gone, and
#: outside runs, where nobody waits for other trainers: Dask would try for long to reach
#: a worker that has closed.
SUSPECT_SECONDS, SOON_SECONDS = 1.0, 0.25
#: Questions a second that a run puts to the directory at most, all trainers together.
_MOST_QUESTIONS = 100
#: How long a worker may be silent before it is looked for, and how long it may take to
#: answer this client then, the scheduler, and this client once more: 9 s in all.
SILENT_SECONDS, FIRST_SECONDS, SCHEDULER_SECONDS, AGAIN_SECONDS = 1.0, 4.0, 2.0, 2.0
#: How long a worker that cannot be reached is not called again.
_BARRED_SECONDS = 60.0


@dataclass(eq=False, slots=True)
class _Call:
    """One call under way, and the reason why it is in vain, once that is known."""

    task: asyncio.Task[Any]
    worker: str
    shards: Sequence[int]
    run: int
    error: Exception | None = None


class Liveness:
    """Looks after the calls of one handle; used on its event loop only.

    Parameters
    ----------
    locate : callable
        Asks the directory where the shards are, for a run or for none (0).
    store : str
        Name of the store, for messages.
    size : int
        Number of calls that may wait at once: that of the run's trainers.
    """

    def __init__(
        self, locate: Callable[[int], Awaitable[dict[str, Any]]], store: str, size: int
    ) -> None:
        self._locate, self._store = locate, store
        self.pause = max(SUSPECT_SECONDS, size / _MOST_QUESTIONS)
        #: The late calls, in the order in which they became late, which is the order
        #: they end in.
        self._late: dict[_Call, None] = {}
        self._asking: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def over(
        self, worker: str, shards: Sequence[int], run: int = 0
    ) -> AsyncIterator[None]:
        """End a call to a host with an error once the directory says it is in vain.

        A timer costs next to nothing where the answer comes in time.
        """
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a call to a host outside a task cannot be called off")
        call = _Call(task, worker, shards, run)
        loop = asyncio.get_running_loop()
        seconds = SUSPECT_SECONDS if run else SOON_SECONDS
        timer = loop.call_later(seconds, self._suspect, call)
        try:
            yield
            if call.error is not None:
                # The answer came together with the cancellation.
                task.uncancel()
        except asyncio.CancelledError:
            if call.error is None:
                raise
            task.uncancel()
            raise call.error from None
        finally:
            timer.cancel()
            self._late.pop(call, None)
            if not self._late and self._asking is not None:
                self._asking.cancel()
                self._asking = None

    def _suspect(self, call: _Call) -> None:
        self._late[call] = None
        if self._asking is None:
            self._asking = asyncio.get_running_loop().create_task(self._ask())

    async def _ask(self) -> None:
        while True:
            for run in {call.run for call in self._late}:
                await self._ask_for(run)
            await asyncio.sleep(self.pause)

    async def _ask_for(self, run: int) -> None:
        refused: DaskPSError | None = None
        located: dict[str, Any] = {}
        try:
            located = await self._locate(run)
        except DaskPSError as error:
            refused = error
        except OSError:
            logger.debug("the scheduler does not answer either")
            return
        for call in [late for late in self._late if late.run == run]:
            try:
                if refused is not None:
                    raise refused
                check_located(self._store, located, call.shards, call.worker)
            except DaskPSError as error:
                call.error = error
                self._late.pop(call, None)
                call.task.cancel()


def check_located(
    store: str, located: Mapping[str, Any], shards: Sequence[int], worker: str = ""
) -> None:
    """Refuse to wait for shards that are lost, or no longer at a worker if given.

    Raises
    ------
    ShardLostError, StaleGenerationError
        As their names say.
    """
    for shard, owner, reason in located["lost"]:
        if shard in shards:
            raise ShardLostError(store, shard, owner, reason)
    for shard in shards if worker else ():
        if located["owners"][shard] != worker or shard in dict(located["away"]):
            raise StaleGenerationError(
                f"shard {shard} of store {store!r} is no longer at worker {worker}; "
                f"ask the directory where it lives"
            )


class Reach:
    """Looks after a client's questions to workers; used on its event loop only.

    Parameters
    ----------
    client : Client
        The client that asks.
    forget : callable
        Called with a worker that cannot be reached.
    """

    def __init__(self, client: Any, forget: Callable[[str], None]) -> None:
        self._client = client
        self._forget = forget
        self._barred: dict[str, tuple[float, WorkerUnreachableError]] = {}
        #: Searches by worker, and the calls that end where it is not found.
        self._looks: dict[str, asyncio.Task[None]] = {}
        self._late: dict[asyncio.Timeout, str] = {}
        self._is_closed = False

    @contextlib.asynccontextmanager
    async def over(self, worker: str) -> AsyncIterator[None]:
        """End a call to a worker once that is found to be out of reach.

        Raises
        ------
        WorkerUnreachableError
            Then, and at once for the next minute.
        """
        self._check(worker)
        scope = asyncio.timeout(None)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(SILENT_SECONDS, self._suspect, worker, scope)
        try:
            async with scope:
                try:
                    yield
                finally:
                    timer.cancel()
                    self._late.pop(scope, None)
        except OSError:
            if not (scope.expired() or self._is_closed):
                # The search goes on where this call is cancelled, and raises no error
                # where the client closes.
                await asyncio.wait({self._look(worker)})
            self._check(worker)
            raise

    def _check(self, worker: str) -> None:
        until, error = self._barred.get(worker, (0.0, None))
        if error is None:
            return
        if asyncio.get_running_loop().time() < until:
            raise WorkerUnreachableError(*error.args)
        self._barred.pop(worker, None)

    def _suspect(self, worker: str, scope: asyncio.Timeout) -> None:
        self._late[scope] = worker
        if not self._is_closed:
            self._look(worker)

    def close(self) -> None:
        """End all searches: the client closes."""
        self._is_closed = True
        for look in self._looks.values():
            look.cancel()

    def _look(self, worker: str) -> asyncio.Task[None]:
        """Look for a worker, once for all calls that ask; it goes on without them."""
        look = self._looks.get(worker)
        if look is None:
            look = asyncio.get_running_loop().create_task(self._find(worker))
            self._looks[worker] = look
            look.add_done_callback(lambda _: self._looks.pop(worker, None))
        return look

    async def _find(self, worker: str) -> None:
        """Bar a worker that answers the scheduler, but not this client before or after.

        A worker that has died answers neither, one that is stopped or busy both or
        neither.
        """
        if not (why := await self._connect(worker, FIRST_SECONDS)):
            return
        if not await self._answers_scheduler(worker):
            return
        if not await self._connect(worker, AGAIN_SECONDS):
            return
        scheduler = self._client.scheduler.addr
        error = WorkerUnreachableError(worker, scheduler, why)
        logger.info("%s", error)
        loop = asyncio.get_running_loop()
        self._barred[worker] = loop.time() + _BARRED_SECONDS, error
        self._forget(worker)
        for scope in [scope for scope, late in self._late.items() if late == worker]:
            scope.reschedule(loop.time())

    async def _connect(self, worker: str, seconds: float) -> str:
        """Have a worker answer by a connection of its own; return why it did not."""
        args = self._client.connection_args
        try:
            async with (
                asyncio.timeout(seconds),
                upstream.connection(worker, seconds, args) as server,
            ):
                await server.echo(data=True)
        except OSError as error:
            # Without descriptors this process reaches no worker at all: that says
            # nothing of this one.
            why = str(error) or f"no answer in {seconds:g} s"
            return "" if without_descriptors() else why
        return ""

    async def _answers_scheduler(self, worker: str) -> bool:
        about: Any = {"msg": {"op": "echo", "data": True}, "on_error": "return"}
        scheduler = self._client.scheduler
        try:
            async with asyncio.timeout(SCHEDULER_SECONDS):
                # The scheduler would try for 30 s to reach a worker that it has let go,
                # and log an error.
                listed = list(await scheduler.ncores(workers=[worker]))
                said = await scheduler.broadcast(**about, workers=listed)
        except OSError:
            return False
        return said.get(worker) is True


def without_descriptors() -> str:
    """Return why no connection can be opened from here, in words; "" where one can.

    Dask tries again until its time is over where there is no descriptor, and says no
    more than that then.
    """
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            return ""
        of = "its machine" if error.errno == errno.ENFILE else f"process {os.getpid()}"
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"to which no connection can be opened from here: {of} has as many files "
            f"and sockets open as it may (ulimit -n is {soft:,}); close some, or allow "
            f"it more"
        )
    return ""
