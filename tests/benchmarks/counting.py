"""Counts of what leaves this process and what its scheduler does; for in-process workers."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from distributed.comm.tcp import TCP

from daskps.cluster.protocol.messages import Answer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distributed import Scheduler

    from daskps import Trainer
    from daskps.cluster.counters import Counters


def counters_of(trainer: Trainer) -> Counters:
    """Return what the calls of a trainer are counted in."""
    return trainer._session.shards.counters


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


@contextmanager
def wire() -> Iterator[Counter[str]]:
    """Count calls of daskps to hosts, as all workers of this process write them to TCP.

    Counted are requests, replies, and nbytes, those of both.
    """
    found, write = Counter[str](), TCP.write

    async def counted(self: TCP, msg: Any, *args: Any, **kwargs: Any) -> int:
        nbytes: int = await write(self, msg, *args, **kwargs)
        if isinstance(msg, dict):
            is_request, rows = msg.get("op") == "daskps_call", msg.get("value")
            is_reply = isinstance(rows, list) and any(map(_is_answer, rows))
            found.update(requests=is_request, replies=is_reply)
            found["nbytes"] += nbytes * (is_request or is_reply)
        return nbytes

    # Every connection of Dask's goes through this one method.
    with mock.patch.object(TCP, "write", counted):
        yield found


def _is_answer(row: Any) -> bool:
    """Return whether it is what a shard answers to a call."""
    return isinstance(row, list) and len(row) == len(Answer._fields)


@contextmanager
def scheduler(server: Scheduler) -> Iterator[Counter[Any]]:
    """Count what reaches the scheduler of this process.

    Counted are ("asked", method) of messages to the directory, "events" that workers
    and clients told of tasks, "ns" of CPU time for these, and tasks that "finished".
    Heartbeats are left out: they are Dask's, and come by the clock.
    """
    found = Counter[Any]()
    handlers, streams = dict(server.handlers), dict(server.stream_handlers)
    asked: Any = handlers["daskps_directory"]

    async def directory(**kwargs: Any) -> Any:
        # The client's own long poll comes by the clock, too.
        if kwargs["method"] != "watch":
            found["asked", kwargs["method"]] += 1
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
    name: str, handler: Callable[..., Any], found: Counter[Any]
) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.thread_time_ns()
        try:
            return handler(*args, **kwargs)
        finally:
            found["ns"] += time.thread_time_ns() - began
            found["events"] += 1
            found["finished"] += name == "task-finished"

    return timed
