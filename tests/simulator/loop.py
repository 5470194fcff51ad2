"""An event loop in virtual time, on which nodes can be stopped and die."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any

from tests.simulator.ground import CHANCE, CLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from contextvars import Context

#: How long a thread takes to begin what it is given.
HAND_OVER_SECONDS = (1e-5, 2e-4)
#: And one of those that a host has for files, which take as long.
FILE_SECONDS = (1e-3, 5e-2)
#: The share of threads that have begun when nobody waits for them any more.
BEGUN_SHARE = 0.5


class Process:
    """A simulated process: what runs in its context stops and dies with it.

    Parameters
    ----------
    name : str
        Its address without the scheme, such as ``m0:1``: machine and number.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.machine, number = name.split(":")
        self.pid = int(number)
        self.is_dead = self.is_stopped = False
        #: Whether its worker closes: what runs in it ends with it.
        self.is_closing = False
        #: Whether it dies in the next change of unbounded rows.
        self.dies_at_work = False
        #: Whether it dies half-way through the next file that it writes.
        self.dies_at_file = False
        #: Whether it dies soon after it hands over a shard, or takes one over.
        self.dies_at_move = False
        #: What would have run while it was stopped.
        self.kept: list[asyncio.Handle] = []
        self._context = copy_context()
        self._context.run(PROCESS.set, self)

    def __repr__(self) -> str:
        return f"<process {self.name}>"

    def context(self) -> Context:
        """Return a context of this process, for what another one causes here."""
        return self._context.copy()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a coroutine in this process."""
        loop = asyncio.get_running_loop()
        return loop.create_task(work, context=self.context())

    async def sees_end(self, work: asyncio.Task[Any], seconds: float) -> bool:
        """Wait for some work, and look so often whether this process still lives."""
        while not (await asyncio.wait({work}, timeout=seconds))[0]:
            if self.is_dead:
                return False
        return True


#: Whose code is running; None for the simulator's own.
PROCESS: ContextVar[Process | None] = ContextVar("daskps-process", default=None)


#: Gives all that may be in a set a place there that does not follow from its address.
NUMBERS = itertools.count()


class NumberedFuture(asyncio.Future[Any]):
    """A future whose place in a set follows from when it was made."""

    def __init__(self, *, loop: asyncio.AbstractEventLoop) -> None:
        self._number = next(NUMBERS)
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class NumberedTask(asyncio.Task[Any]):
    """A task whose place in a set follows from when it was made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = next(NUMBERS)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time jumps to the next timer where nothing is ready; threads are timers.

    No descriptor is ever looked at: what comes from outside the process would come at
    another moment each time.
    """

    _ready: Any
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        super().__init__()
        self.set_task_factory(
            lambda loop, work, **kwargs: NumberedTask(work, loop=loop, **kwargs)
        )

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future of this loop."""
        return NumberedFuture(loop=self)

    def time(self) -> float:
        """Return the virtual time."""
        return CLOCK.now

    def _run_once(self) -> None:
        timers, ready = self._scheduled, self._ready
        if not ready:
            self._skip_cancelled()
            if not timers:
                raise RuntimeError("nothing is ready and nothing is timed: it hangs")
            CLOCK.now = max(CLOCK.now, timers[0].when())
        while timers and timers[0].when() <= CLOCK.now:
            timer = heapq.heappop(timers)
            timer._scheduled = False  # type: ignore[attr-defined]
            ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            # What asyncio itself does with a handle that is due.
            if not handle.cancelled():
                process = handle._context.get(PROCESS)
                if process is None or not (process.is_dead or process.is_stopped):
                    handle._run()
                elif not process.is_dead:
                    process.kept.append(handle)

    def _skip_cancelled(self) -> None:
        while self._scheduled and self._scheduled[0].cancelled():
            heapq.heappop(self._scheduled)

    def go_on(self, process: Process) -> None:
        """Let a stopped process go on with what it has missed."""
        process.is_stopped = False
        self._ready.extend(process.kept)
        process.kept.clear()

    def run_in_executor(  # type: ignore[override]  # its own has type variables
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Call a function a moment later, in this thread."""
        future: asyncio.Future[Any] = self.create_future()

        def call() -> None:
            if future.cancelled() and CHANCE.random() >= BEGUN_SHARE:
                return
            try:
                result = func(*args)
            except BaseException as error:  # noqa: BLE001 - the future's
                if not future.cancelled():
                    future.set_exception(error)
            else:
                if not future.cancelled():
                    future.set_result(result)

        is_slow = isinstance(executor, ThreadPoolExecutor)
        seconds = CHANCE.uniform(*(FILE_SECONDS if is_slow else HAND_OVER_SECONDS))
        self.call_later(seconds, call)
        return future

    def call_soon_threadsafe(  # type: ignore[override]  # its own has type variables
        self,
        callback: Callable[..., Any],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """Call a function soon; there is one thread."""
        return self.call_soon(callback, *args, context=context)
