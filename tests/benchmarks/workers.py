"""Two workers that share no memory: calls of handles, steps of trainers, bare sockets."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from distributed import get_worker

import daskps
from daskps import optim
from tests.benchmarks import clusters, sockets
from tests.benchmarks.counting import counters_of
from tests.benchmarks.samples import Sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Client

    from tests.benchmarks.samples import Side

Measured = TypeVar("Measured")
#: Calls before those that are measured, and how long a socket may take to open
#: meanwhile.
WARM, WARM_SECONDS = 50, 10.0
#: Of a step: both trainers must make as many.
WARM_STEPS = 200


def used(pid: int) -> float:
    """Return the seconds of CPU time that a process of this machine has used."""
    # The clock that `clock_getcpuclockid` gives.
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return math.nan


#: Of a caller: its calls by socket, and its messages.
Counts: TypeAlias = "Callable[[], tuple[int, int]]"


def timed(
    act: Callable[[], object], calls: int, peer: int, counted: Counts | None = None
) -> Sample:
    """Time calls one after the other, with the CPU time of both ends, and the sockets."""
    before = counted() if counted else (0, 0)
    took, mine, theirs = [], time.process_time(), used(peer)
    for _ in range(calls):
        began = time.perf_counter()
        act()
        took.append(time.perf_counter() - began)
    mine, theirs = time.process_time() - mine, used(peer) - theirs
    middle, last = np.percentile(took, [50, 99])
    more = {"p99": float(last), "cpu": mine / calls, "server": theirs / calls}
    if counted:
        socket_pool, messages = np.subtract(counted(), before)
        more["by socket"] = float(socket_pool / max(1, socket_pool + messages))
    return Sample(float(middle), more)


def warmed(act: Callable[[], object], calls: int, is_ready: Callable[[], bool]) -> None:
    """Make some calls, and more until something is ready, or for a while."""
    end = time.monotonic() + WARM_SECONDS
    act()
    while not is_ready() and time.monotonic() < end:
        act()
    for _ in range(min(WARM, 1 + calls // 4)):
        act()


def handle(
    store: daskps.ParameterStore, verb: str, calls: int, peer: int, by_socket: bool
) -> Sample:
    """Measure a verb of a handle, in a task of one worker on a shard of another."""

    def counted() -> tuple[int, int]:
        found = store.stats()["handle"]
        return found["socket_calls"], found["messages"]

    def is_ready() -> bool:
        return not by_socket or counted()[0] > 0

    with clusters.configured({"daskps.carriers.socket": by_socket}):
        act = _verbs(store)[verb]
        warmed(act, calls, is_ready)
        return timed(act, calls, peer, counted)


def _verbs(store: daskps.ParameterStore) -> dict[str, Callable[[], object]]:
    out = store.pull()
    grads = {name: np.full(a.shape, 1e-3, a.dtype) for name, a in out.items()}

    def both() -> None:
        store.pull(out=out)
        store.push(grads)

    get, push = partial(store.pull, out=out), partial(store.push, grads)
    return {"get": get, "push": push, "both": both}


def bare(
    where: tuple[str, int], verb: str, n: int, calls: int, peer: int, tls: bool
) -> Sample:
    """Measure the same over a bare socket."""
    connection = get_worker().security.get_connection_args("worker")
    here = sockets.connected(where, connection.get("ssl_context") if tls else None)
    with contextlib.closing(here):
        act = getattr(sockets.BareCaller(n, here), verb)
        warmed(act, calls, lambda: True)
        return timed(act, calls, peer)


def step(trainer: daskps.Trainer, part: tuple[str, int, list[int]]) -> Sample:
    """Measure the steps of a trainer: `push` and `pull`, or `pushpull`."""
    verb, steps, pids = part
    counters = counters_of(trainer)
    out = trainer.pull()
    grads = {name: np.full(a.shape, 1e-3, a.dtype) for name, a in out.items()}

    def push_pull() -> None:
        trainer.push(grads)
        trainer.pull(out=out)

    pushpull = partial(trainer.pushpull, grads, out=out)
    act = push_pull if verb == "push + pull" else pushpull
    for _ in range(WARM_STEPS):
        act()
    peer = next((pid for pid in pids if pid != os.getpid()), os.getpid())
    return timed(act, steps, peer, lambda: (counters.socket_calls, counters.messages))


#: In the worker that is kept busy: whether it is, and whether it may stop.
_BUSY, _OVER = threading.Event(), threading.Event()
_LARGE = np.zeros(2**20, np.float32)


def _python() -> None:
    """Compute without NumPy, which lets no other thread of the process run for long."""
    sum(range(1000))


def _numpy() -> None:
    """Compute with NumPy, which lets others run meanwhile."""
    np.add(_LARGE, 1.0, out=_LARGE)


#: What a busy worker can do.
WORK = {"Python": _python, "NumPy": _numpy}


def _spin(work: str) -> None:
    _OVER.clear()
    _BUSY.set()
    while not _OVER.is_set():
        WORK[work]()
    _BUSY.clear()


def _is_busy() -> bool:
    """Tell whether this worker is kept busy."""
    return _BUSY.is_set()


def _stop() -> None:
    _OVER.set()


def beside(
    client: Client, server: str, work: str, measure: Callable[[], Measured]
) -> Measured:
    """Measure while a task keeps a worker busy with one of `WORK`."""
    spinning = client.submit(_spin, work, workers=[server], pure=False)
    while not client.run(_is_busy, workers=[server])[server]:
        time.sleep(0.01)
    try:
        return measure()
    finally:
        client.run(_stop, workers=[server])
        spinning.result()


@dataclass(frozen=True)
class Pair:
    """Two workers: calls go from the first to the second."""

    client: Client
    here: str
    there: str
    #: Their process ids.
    pids: tuple[int, int]
    #: Whether they speak TLS.
    tls: bool = False

    @classmethod
    def of(cls, client: Client, *, tls: bool = False) -> Pair:
        """Return the first two workers of a cluster."""
        here, there = list(client.nthreads())[:2]
        pids = client.run(os.getpid, workers=[here, there])
        return cls(client, here, there, (pids[here], pids[there]), tls)

    def store(self, n: int, *, both: bool = False) -> daskps.ParameterStore:
        """Make a store of so many float32, on the second worker or on both."""
        servers = [self.here, self.there] if both else [self.there]
        rule, spec = optim.SGD(1e-3), clusters.vector(n)
        return daskps.create(spec, client=self.client, optimizer=rule, servers=servers)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a task on the first worker."""
        return clusters.at(self.client, self.here, function, *args)

    def call(
        self, store: daskps.ParameterStore, verb: str, calls: int, by_socket: bool
    ) -> Sample:
        """Measure calls of a handle."""
        found: Sample = self.run(handle, store, verb, calls, self.pids[1], by_socket)
        return found

    def carriers(self, measure: Callable[[bool], Sample]) -> dict[str, Side]:
        """Return the sides of what can go by socket and by message."""
        return {"socket": partial(measure, True), "message": partial(measure, False)}

    def served(self, serve: Callable[..., Any]) -> tuple[str, int]:
        """Have the second worker serve bare sockets; return where."""
        where: tuple[str, int] = self.client.run(serve, workers=[self.there])[
            self.there
        ]
        return where

    def bare(
        self, verb: str, n: int, calls: int, *, work: bool, apart: bool = False
    ) -> Sample:
        """Measure a verb over a bare socket; with `apart` its ends have a core each.

        Else the system has both on one core, as the ends of two machines never are.
        """
        here, there = (0, 1) if apart else (None, None)
        where = self.served(partial(sockets.serve, n, work, self.tls, core=there))
        about = where, verb, n, calls, self.pids[1], self.tls
        found: Sample = self.run(sockets.pinned, here, partial(bare, *about))
        return found

    def steps(
        self, store: daskps.ParameterStore, verb: str, steps: int, by_socket: bool
    ) -> Sample:
        """Measure the steps of two trainers, one on each of the workers."""
        both = [self.here, self.there]
        self.client.run(
            clusters.configure, {"daskps.carriers.socket": by_socket}, workers=both
        )
        part = verb, steps, list(self.pids)
        found: list[Sample] = daskps.run(store, step, [part] * 2, callbacks=())
        return found[0]
