"""Sockets from a process's first call on, and a count of the calls that took none.

Workers of the fourth way have this as a preload of Dask's, the process of the tests is
changed by :func:`watched`. Only what the configuration gives sockets is changed by it:
a call waits for the socket to its host to be open, and one that has ended is opened
anew at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from daskps.cluster.caller import socket_pool
from daskps.cluster.caller.client import ShardClient
from daskps.cluster.caller.remote import RemoteShards
from daskps.cluster.caller.socket_pool import SocketPool
from daskps.cluster.counters import Counters

#: How many of the calls that may take a socket have to, and how many of a run of only a
#: few tests may do without: what tests refuse and interrupt goes by message.
SHARE, MOST_WITHOUT = 0.99, 20
#: What a handle counts of calls that a socket has answered: they have to be waited for,
#: or are not what the shards take, and the rest of it goes by message.
ANSWERED = frozenset(
    ["it has to be waited for"]
    + [f"refused: {name}" for name in ("ConsistencyError", "RunCancelledError")]
    + [f"refused: {name}" for name in ("PushRejectedError", "ValueError")]
)
#: How long a call waits for its socket.
OPEN_SECONDS = 5.0

#: Those of all handles and trainers of this process that have sockets.
_counters: list[Counters] = []
#: Messages that could be nothing else, by why; calls that found no socket, by why.
_by_contract: Counter[str] = Counter()
_without: Counter[str] = Counter()
_lock = threading.Lock()
_is_async: ContextVar[bool] = ContextVar("_is_async", default=False)
#: What is changed while sockets are watched, and what it was before: in the process of
#: the tests only those of the fourth way are, whose hosts give some.
_before: list[tuple[Any, str, Any]] = []


def count(of: Counter[str], why: str) -> None:
    """Count something that threads count at the same time."""
    with _lock:
        of[why] += 1


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Change this process for a while."""
    install()
    try:
        yield
    finally:
        for owner, name, value in _before:
            setattr(owner, name, value)
        _before.clear()


def is_counted(remote: RemoteShards) -> bool:
    """Whether this is one of those that are counted."""
    return any(remote.counters is one for one in _counters)


def install() -> None:
    """Change this process: its calls take sockets, and are counted."""
    values: Any = (socket_pool, "CALLS_BEFORE", 1), (socket_pool, "PAUSE_SECONDS", 0.0)
    for owner, name, value in values:
        _before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)
    patches: Any = (
        (RemoteShards, "__init__", noting),
        (RemoteShards, "_send", tallying),
        (SocketPool, "take", waiting),
        (ShardClient, "call_async", on_loop),
    )
    for owner, name, of in patches:
        whole = getattr(owner, name)
        _before.append((owner, name, whole))
        setattr(owner, name, functools.wraps(whole)(of(whole)))


def noting(begin: Any) -> Any:
    """Note what a way to other processes counts in, where it has sockets."""

    def noted(self: RemoteShards, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        if self.sockets is not None:
            _counters.append(self.counters)

    return noted


def waiting(take: Any) -> Any:
    """Wait for a socket that is being opened; count calls that find none."""

    def taken(self: SocketPool, worker: str, store: str) -> Any:
        socket, tries = take(self, worker, store), 0
        # Others may be faster at those that are opened meanwhile.
        while (
            socket is None and tries < socket_pool.MOST_SOCKETS and opened(self, worker)
        ):
            socket, tries = take(self, worker, store), tries + 1
        if socket is None:
            if self.count([worker]) >= socket_pool.MOST_SOCKETS:
                count(_by_contract, "all sockets to the host are in calls")
            else:
                count(_without, "no socket")
        return socket

    return taken


def opened(of: SocketPool, worker: str) -> bool:
    """Wait until no socket to a worker is being opened; tell whether one was."""
    with contextlib.suppress(RuntimeError):
        # It may be this loop that opens it.
        asyncio.get_running_loop()
        return False
    pause, is_opening = threading.Event(), worker in of._opening
    end = time.monotonic() + OPEN_SECONDS
    while worker in of._opening:
        # Of a worker that is gone it takes long to hear.
        if time.monotonic() > end:
            return False
        pause.wait(0.002)
    return is_opening


def tallying(send: Any) -> Any:
    """Count the messages that nobody could have sent by a socket."""

    async def tallied(
        self: RemoteShards, worker: str, request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if is_counted(self) and _is_async.get():
            count(_by_contract, "on an event loop")
        elif is_counted(self) and request.given:
            count(_by_contract, "pieces that are given away")
        return await send(self, worker, request, *args, **kwargs)

    return tallied


def on_loop(call_async: Any) -> Any:
    """Mark the calls that an event loop makes, which go by message."""

    async def marked(self: ShardClient, *args: Any, **kwargs: Any) -> Any:
        token = _is_async.set(True)
        try:
            return await call_async(self, *args, **kwargs)
        finally:
            _is_async.reset(token)

    return marked


def dask_setup(_: Any) -> None:
    """Change a worker that has this as a preload."""
    install()


class Tally:
    """What the handles and trainers of some processes have counted."""

    def __init__(self, processes: Iterable[dict[str, Any]]) -> None:
        self.calls = self.messages = 0
        self.by_contract, self.without = Counter[str](), Counter[str]()
        for found in processes:
            self.calls += found["calls"]
            self.messages += found["messages"]
            self.by_contract += found["by_contract"]
            self.without += found["without"]

    @property
    def missed(self) -> int:
        """Messages that a socket could have carried."""
        answered = sum(self.without[why] for why in ANSWERED)
        return max(0, self.messages - self.by_contract.total() - answered)

    @property
    def is_enough(self) -> bool:
        """Whether nearly all calls took a socket that could."""
        allowed = (1 - SHARE) * (self.calls + self.missed)
        return self.missed <= max(allowed, MOST_WITHOUT)

    def __str__(self) -> str:
        def said(of: Counter[str]) -> str:
            return ", ".join(f"{n} {why!r}" for why, n in of.most_common()) or "none"

        return (
            f"{self.calls:,} calls by socket, {self.missed:,} without that could have "
            f"(noted: {said(self.without)}), by message as agreed: "
            f"{said(self.by_contract)}"
        )


def counted() -> dict[str, Any]:
    """Return what this process has counted, as plain values."""
    without = Counter(_without)
    for one in _counters:
        without.update(one.fallbacks)
    return {
        "calls": sum(one.socket_calls for one in _counters),
        "messages": sum(one.messages for one in _counters),
        "by_contract": Counter(_by_contract),
        "without": without,
    }
