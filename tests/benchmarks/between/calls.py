"""What is measured in the workers: calls of handles, steps of trainers, bare sockets."""

from __future__ import annotations

import contextlib
import math
import os
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import get_worker

import daskps
from daskps import optim
from tests.benchmarks import clusters
from tests.benchmarks.between import sockets
from tests.benchmarks.between.rows import WaySample
from tests.benchmarks.counting import counters_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distributed import Client

#: Calls before those that are measured, and how long a lane may take to open meanwhile.
WARM, WARM_SECONDS = 50, 10.0
#: Of a step: both trainers must make as many.
WARM_STEPS = 200


def used(pid: int) -> float:
    """Return the seconds of CPU time that a process of this machine has used."""
    # What `clock_getcpuclockid` gives.
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return math.nan


def timed(act: Callable[[], object], calls: int, peer: int) -> WaySample:
    """Time calls, one after the other, and the CPU time of both ends."""
    took, mine, theirs = [], time.process_time(), used(peer)
    for _ in range(calls):
        began = time.perf_counter()
        act()
        took.append(1e6 * (time.perf_counter() - began))
    mine, theirs = time.process_time() - mine, used(peer) - theirs
    return WaySample(tuple(took), 1e6 * mine / calls, 1e6 * theirs / calls)


def with_lanes(sample: WaySample, before: Any, after: Any) -> WaySample:
    """Add which part of the calls took a lane, by counters before and after."""
    lanes, messages = np.subtract(after, before)
    share = float(lanes / max(1, lanes + messages))
    return WaySample(sample.took, sample.caller, sample.server, share)


def handle(
    store: daskps.ParameterStore, verb: str, calls: int, *, lane: bool, peer: int
) -> WaySample:
    """Measure a verb of a handle, in a task of one worker on a shard of another."""

    def counted() -> tuple[int, int]:
        found = store.stats()["handle"]
        return found["lane_calls"], found["messages"]

    with clusters.configured({"daskps.ways.lane": lane}):
        out = store.pull()
        grads = {name: np.full(a.shape, 1e-3, a.dtype) for name, a in out.items()}

        def both() -> None:
            store.pull(out=out)
            store.push(grads)

        verbs: dict[str, Callable[[], object]] = {
            "get": partial(store.pull, out=out),
            "push": partial(store.push, grads),
            "both": both,
        }
        act, end = verbs[verb], time.monotonic() + WARM_SECONDS
        act()
        while lane and not counted()[0] and time.monotonic() < end:
            act()
        # A host loads what answers reads without Python after its first lane.
        is_plain = lane and verb == "get" and get_worker().address.startswith("tcp:")
        while is_plain and time.monotonic() < end and not plain_reads(store):
            act()
        for _ in range(min(WARM, 1 + calls // 4)):
            act()
        before = counted()
        return with_lanes(timed(act, calls, peer), before, counted())


def plain_reads(store: daskps.ParameterStore) -> int:
    """Return how many reads of a store its hosts have answered without Python."""
    return sum(row["plain_reads"] for row in store.stats()["shards"])


def bare(
    where: tuple[str, int], verb: str, n: int, calls: int, *, tls: bool, peer: int
) -> WaySample:
    """Measure the same over a bare socket."""
    connection = get_worker().security.get_connection_args("worker")
    context = connection.get("ssl_context") if tls else None
    with contextlib.closing(sockets.BareCaller(where, n, context)) as caller:
        act = getattr(caller, verb)
        for _ in range(min(WARM, 1 + calls // 4)):
            act()
        return timed(act, calls, peer)


@contextlib.contextmanager
def own_cores(number: int, of: int) -> Iterator[None]:
    """Keep all threads of this process on its share of the machine's cores meanwhile.

    Parameters
    ----------
    number, of : int
        Which share it is of how many.
    """
    before = os.sched_getaffinity(0)
    _keep_on(set(sorted(before)[number::of]))
    try:
        yield
    finally:
        _keep_on(before)


def _keep_on(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cores)


def step(trainer: daskps.Trainer, part: tuple[str, int, list[int], bool]) -> WaySample:
    """Measure the steps of a trainer: `push` and `pull`, or `pushpull`."""
    verb, steps, pids, apart = part
    if apart:
        with own_cores(trainer.rank, trainer.size):
            return step(trainer, (verb, steps, pids, False))
    counters = counters_of(trainer)
    out = trainer.pull()
    grads = {name: np.full(a.shape, 1e-3, a.dtype) for name, a in out.items()}

    def push_pull() -> None:
        trainer.push(grads)
        trainer.pull(out=out)

    act = (
        push_pull
        if verb == "push + pull"
        else partial(trainer.pushpull, grads, out=out)
    )
    for _ in range(WARM_STEPS):
        act()
    before = counters.lane_calls, counters.messages
    peer = next((pid for pid in pids if pid != os.getpid()), os.getpid())
    sample = timed(act, steps, peer)
    return with_lanes(sample, before, (counters.lane_calls, counters.messages))


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
        workers = list(client.nthreads())
        if len(workers) < 2:
            raise SystemExit(f"two workers are needed, there are {len(workers)}")
        here, there = workers[:2]
        pids = client.run(os.getpid, workers=[here, there])
        return cls(client, here, there, (pids[here], pids[there]), tls)

    @contextlib.contextmanager
    def store(self, n: int, *, both: bool = False) -> Iterator[daskps.ParameterStore]:
        """Make a store of so many float32, on the second worker or on both."""
        spec = {"w": daskps.ArraySpec((n,), "float32")}
        servers = [self.here, self.there] if both else [self.there]
        with daskps.create(
            spec, client=self.client, optimizer=optim.SGD(1e-3), servers=servers
        ) as store:
            yield store

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a task on the first worker."""
        task = self.client.submit(
            function, *args, workers=[self.here], pure=False, **kwargs
        )
        return task.result()

    def call(
        self, store: daskps.ParameterStore, verb: str, calls: int, *, lane: bool
    ) -> WaySample:
        """Measure calls of a handle."""
        sample: WaySample = self.run(
            partial(handle, store, verb, calls, lane=lane, peer=self.pids[1])
        )
        return sample

    def bare(self, verb: str, n: int, calls: int, *, work: bool) -> WaySample:
        """Measure the same over a bare socket."""
        server = partial(sockets.serve, n, work, self.tls)
        where = self.client.run(server, workers=[self.there])[self.there]
        sample: WaySample = self.run(
            partial(bare, where, verb, n, calls, tls=self.tls, peer=self.pids[1])
        )
        return sample

    @property
    def may_part(self) -> bool:
        """Whether each worker can have cores of its own, as machines have."""
        if not hasattr(os, "sched_setaffinity") or self.pids[0] == self.pids[1]:
            return False
        return len(os.sched_getaffinity(0)) > 1

    def steps(
        self,
        store: daskps.ParameterStore,
        verb: str,
        steps: int,
        *,
        lane: bool,
        apart: bool = False,
    ) -> WaySample:
        """Measure the steps of two trainers, one on each of the workers.

        With `apart` each worker has cores of its own.
        """
        both = [self.here, self.there]
        self.client.run(clusters.configure, {"daskps.ways.lane": lane}, workers=both)
        part = verb, steps, list(self.pids), apart
        rows: list[WaySample] = daskps.run(store, step, [part] * 2, callbacks=())
        return rows[0]
