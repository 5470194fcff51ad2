"""What leaves this process and what its scheduler does, counted; for in-process workers."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

from distributed.comm.tcp import TCP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distributed import Scheduler


#: What workers and clients tell the scheduler of tasks, but for submitting them; the
#: rest comes by the clock or once for each worker.
OF_TASKS = (
    "add-keys",
    "client-releases-keys",
    "long-running",
    "reschedule",
    "release-worker-data",
    "task-erred",
    "task-finished",
)


@dataclass
class Wire:
    """Calls of daskps to hosts: requests, replies, and the bytes of both."""

    requests: int = 0
    replies: int = 0
    nbytes: int = 0


@contextmanager
def wire() -> Iterator[Wire]:
    """Count what all workers of this process write to TCP connections."""
    found, write = Wire(), TCP.write

    async def counted(self: TCP, msg: Any, *args: Any, **kwargs: Any) -> int:
        nbytes: int = await write(self, msg, *args, **kwargs)
        if isinstance(msg, dict):
            is_request, is_reply = msg.get("op") == "daskps_call", "answers" in msg
            found.requests += is_request
            found.replies += is_reply
            found.nbytes += nbytes * (is_request or is_reply)
        return nbytes

    # Every connection of Dask's goes through this one method.
    with mock.patch.object(TCP, "write", counted):
        yield found


@dataclass
class SchedulerCounts:
    """What a scheduler was asked, and the CPU seconds it took over it."""

    #: Messages to the directory, by method.
    directory: Counter[str] = field(default_factory=Counter)
    #: What workers and clients told the scheduler of tasks.
    events: int = 0
    #: Tasks that were finished.
    finished: int = 0
    #: CPU time of the functions that dealt with the events.
    seconds: float = 0.0

    def since(self, before: SchedulerCounts) -> SchedulerCounts:
        """Return what came after an earlier copy."""
        return SchedulerCounts(
            self.directory - before.directory,
            self.events - before.events,
            self.finished - before.finished,
            self.seconds - before.seconds,
        )


@contextmanager
def scheduler(server: Scheduler) -> Iterator[SchedulerCounts]:
    """Count what reaches the scheduler of this process.

    Heartbeats are left out: they are Dask's, and come by the clock.
    """
    found = SchedulerCounts()
    handlers, streams = dict(server.handlers), dict(server.stream_handlers)
    asked: Any = handlers["daskps_directory"]

    async def directory(**kwargs: Any) -> Any:
        # The client's own long poll comes by the clock, too.
        if kwargs["method"] != "watch":
            found.directory[kwargs["method"]] += 1
        return await asked(**kwargs)

    server.handlers["daskps_directory"] = directory
    for name, handler in streams.items():
        if name in OF_TASKS:
            server.stream_handlers[name] = _timed(name, handler, found)
    try:
        yield found
    finally:
        server.handlers.update(handlers)
        server.stream_handlers.update(streams)


def _timed(
    name: str, handler: Callable[..., Any], found: SchedulerCounts
) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.thread_time()
        try:
            return handler(*args, **kwargs)
        finally:
            found.seconds += time.thread_time() - began
            found.events += 1
            found.finished += name == "task-finished"

    return timed
