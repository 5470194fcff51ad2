"""A thousand callers of one host, each with a connection of its own.

All of them are one thread here, which speaks the frames of a socket itself: what is
measured is the host. Each caller has one push under way and waits for its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import statistics
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from distributed import get_worker

from daskps.cluster import connections
from daskps.cluster.caller.link import link_of
from daskps.cluster.protocol.messages import PROTOCOL
from daskps.cluster.sockets.frames import (
    ANSWER,
    CALL,
    HEAD_NBYTES,
    ROW_NBYTES,
    TEMPLATE,
    Head,
    pack_head,
    pack_text,
    unpack_head,
)
from tests.benchmarks import sockets
from tests.benchmarks.samples import LeftOutError, Sample
from tests.benchmarks.workers import used

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

    import daskps

Done = TypeVar("Done")
#: Weights of the model.
ELEMENTS = 16
#: Sockets that are opened at a time, and how long all of them may take.
AT_A_TIME, OPEN_SECONDS = 32, 60.0


async def _open(address: str, uid: str, n: int) -> list[socket.socket]:
    """Have a host give so many sockets."""
    worker, some = get_worker(), asyncio.Semaphore(AT_A_TIME)
    message = {"op": "daskps_socket", "protocol": PROTOCOL, "store": uid}

    async def one() -> socket.socket | None:
        async with some:
            said = {**message, "token": uuid.uuid4().hex}
            _, taken = await connections.ask_for_socket(
                worker.rpc, address, said, OPEN_SECONDS
            )
        return taken

    found = await asyncio.gather(*[one() for _ in range(n)])
    taken = [here for here in found if here is not None]
    if len(taken) < n:
        for here in taken:
            here.close()
        raise LeftOutError(f"the host gave {len(taken):,} sockets of {n:,}")
    return taken


def _on_loop(work: Coroutine[Any, Any, Done]) -> Done:
    """Return what comes of work on the event loop of this task's worker."""
    loop: Any = get_worker().loop
    begun = asyncio.run_coroutine_threadsafe(work, loop.asyncio_loop)
    return begun.result(OPEN_SECONDS)


@contextlib.contextmanager
def socket_pool(address: str, uid: str, n: int) -> Iterator[list[socket.socket]]:
    """Open sockets from the worker of this task, and close them."""
    taken = _on_loop(_open(address, uid, n))
    try:
        yield taken
    finally:
        for here in taken:
            here.close()


def _template(uid: str, producer: int) -> dict[str, Any]:
    """Return the template of a push outside runs to the one shard of a store."""
    head = [uid, "gradient", 0, -1, False, producer, None, False, False, "", ""]
    return {
        "protocol": PROTOCOL,
        "head": head,
        "parts": [[0, 1, [[0, 0, ELEMENTS]], [], "no"]],
        "tables": [[], [], False],
    }


def _producers(n: int) -> list[int]:
    """Return so many identities of pushes, as this process gets one."""
    link = link_of(get_worker())
    kind, owner = link.owner

    async def ask() -> list[int]:
        some = [link.directory("producer", kind=kind, owner=owner) for _ in range(n)]
        return list(await asyncio.gather(*some))

    return _on_loop(ask())


@dataclass
class CrowdCaller:
    """One of them."""

    here: socket.socket
    #: When its last push left.
    sent: float = 0.0
    calls: int = 0
    #: Longest time between a push and its answer, which is its longest without one.
    longest: float = 0.0


class SocketPushes:
    """Pushes by sockets, in the frames of these."""

    nbytes = HEAD_NBYTES + ROW_NBYTES

    def __init__(self, here: Sequence[socket.socket], uid: str) -> None:
        self._gradient = np.full(ELEMENTS, 1e-3, np.float32).tobytes()
        for one, producer in zip(here, _producers(len(here)), strict=True):
            one.sendall(b"".join(pack_text(TEMPLATE, _template(uid, producer), 0)))
            head = unpack_head(one.recv(sockets.BUFFER_NBYTES)[:HEAD_NBYTES])
            if head.kind != ANSWER:
                raise LeftOutError(
                    f"the host answers the template of a push with {head}"
                )

    def frame(self, n: int) -> bytes:
        """Return the n-th push of a caller."""
        head = Head(CALL, 4 * ELEMENTS, n + 1, sequence=n, floor=n, wait_ms=500)
        return pack_head(head) + self._gradient

    def check(self, answer: memoryview) -> None:
        """Look whether it was applied."""
        if answer[4] != ANSWER:
            raise LeftOutError(f"the host answers a push with {unpack_head(answer)}")


class BarePushes:
    """Pushes to a bare server."""

    nbytes = sockets.ANSWER_NBYTES

    def __init__(self) -> None:
        gradient = np.full(ELEMENTS, 1e-3, np.float32).tobytes()
        self._frame = sockets.request(ELEMENTS, 0) + gradient

    def frame(self, n: int) -> bytes:
        """Return the n-th push of a caller."""
        return self._frame

    def check(self, answer: memoryview) -> None:
        """Do nothing: it has one answer."""


def drive(
    here: Sequence[socket.socket],
    pushes: SocketPushes | BarePushes,
    seconds: float,
    peer: int,
) -> Sample:
    """Have all callers push for so long; what is told is the longest call of each."""
    poll, callers = select.epoll(), {one.fileno(): CrowdCaller(one) for one in here}
    buffer = memoryview(bytearray(sockets.BUFFER_NBYTES))
    mine, theirs = time.process_time(), used(peer)
    began = now = time.perf_counter()
    with poll:
        for caller in callers.values():
            poll.register(caller.here, select.EPOLLIN)
            caller.sent = time.perf_counter()
            caller.here.sendall(pushes.frame(0))
        waiting, end = len(callers), began + seconds
        while waiting:
            ready = poll.poll(10.0)
            if not ready:
                raise LeftOutError(f"{waiting:,} callers had no answer for 10 s")
            for number, _ in ready:
                caller = callers[number]
                got = caller.here.recv_into(buffer)
                if got != pushes.nbytes:
                    raise LeftOutError(f"the host answers with {got} bytes")
                pushes.check(buffer[:HEAD_NBYTES])
                now = time.perf_counter()
                caller.longest = max(caller.longest, now - caller.sent)
                caller.calls += 1
                if now < end:
                    caller.sent = now
                    caller.here.sendall(pushes.frame(caller.calls))
                else:
                    waiting -= 1
    calls = sum(caller.calls for caller in callers.values())
    mine, theirs = time.process_time() - mine, used(peer) - theirs
    longest = [caller.longest for caller in callers.values()]
    more = {"longest": max(longest), "a second": calls / (now - began)}
    more |= {"cpu": mine / calls, "server": theirs / calls}
    return Sample(statistics.median(longest), more)


def by_socket(
    store: daskps.ParameterStore, address: str, n: int, seconds: float, peer: int
) -> Sample:
    """Measure pushes by so many sockets, in a task."""
    with socket_pool(address, store.uid, n) as here:
        return drive(here, SocketPushes(here, store.uid), seconds, peer)


def by_selector(where: tuple[str, int], n: int, seconds: float, peer: int) -> Sample:
    """Measure the same to a bare server, in a task."""
    with contextlib.ExitStack() as stack:
        here = [stack.enter_context(sockets.connected(where)) for _ in range(n)]
        return drive(here, BarePushes(), seconds, peer)


def held(pid: int) -> tuple[int, int, int]:
    """Return the open files, the KiB of memory and the threads of a process."""
    folder = Path(f"/proc/{pid}")
    status = dict(
        line.split(":", 1) for line in (folder / "status").read_text().splitlines()
    )
    kib = int(status["VmRSS"].split()[0])
    return len(list((folder / "fd").iterdir())), kib, int(status["Threads"])


def taken(store: daskps.ParameterStore, address: str, n: int, peer: int) -> list[int]:
    """Return what so many sockets that have been used take of their host, in a task."""
    before = held(peer)
    with socket_pool(address, store.uid, n) as here:
        drive(here, SocketPushes(here, store.uid), 0.0, peer)
        found = held(peer)
    return [b - a for a, b in zip(before, found, strict=True)]


def beside(
    store: daskps.ParameterStore,
    address: str,
    n: int,
    measure: Callable[..., Sample],
    *args: Any,
) -> Sample:
    """Measure something in a task while so many other sockets are open and idle."""
    with socket_pool(address, store.uid, n):
        return measure(*args)
