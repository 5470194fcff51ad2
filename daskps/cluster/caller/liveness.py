"""Whether hosts that do not answer for a while are still there, asked of the directory.

Dask tries to connect to a dead address for 30 s; the directory knows sooner. But a
trainer that waits for a slow one waits on every host of the store, and a thousand may:
all calls of a handle ask together, and those of a large run more rarely, so that what
reaches the scheduler does not grow with the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from daskps.errors import DaskPSError, ShardLostError, StaleGenerationError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

logger = logging.getLogger(__name__)

#: How long a host may be silent before the directory is asked whether it is gone, and
#: outside runs, where nobody waits for other trainers: Dask would try for long to reach
#: a worker that has closed.
SUSPECT_SECONDS, SOON_SECONDS = 1.0, 0.25
#: Questions a second that a run puts to the directory at most, all trainers together.
MOST_QUESTIONS = 100


@dataclass(eq=False, slots=True)
class _Call:
    """One call under way, and why it is in vain, once that is known."""

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
        How many of these may wait at once: the trainers of the run.
    """

    def __init__(
        self, locate: Callable[[int], Awaitable[dict[str, Any]]], store: str, size: int
    ) -> None:
        self._locate, self._store = locate, store
        self.pause = max(SUSPECT_SECONDS, size / MOST_QUESTIONS)
        #: In the order in which they became late, which is the order they end in.
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
        For what their names say.
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
