"""Calls by lanes, beside the same by message and a bare socket with the same bytes.

The two ways alternate, each in a cluster of its own with all nearer ways closed. The bare
socket is measured between the calls by lane: a thread of the other process answers.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import daskps
from daskps import optim
from daskps.bench import clusters
from daskps.bench.options import number

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from distributed import Client

#: Whether lanes are open, by the way that is measured.
SIDES = {"lane": True, "message": False}
#: Elements of 1 KiB and of 1 MiB.
SMALL, LARGE = 256, 2**18
#: Calls before a measurement: a lane is opened meanwhile.
WARM, WARM_SECONDS = 100, 0.002
#: A head and the row of one shard.
SAID_NBYTES = 96

#: Latencies in microseconds and CPU microseconds a call, by what was measured.
Latencies = dict[str, tuple[list[float], float]]


def serve(dask_worker: Any) -> int:
    """Have a thread of a worker answer on a bare socket; return its port.

    It gets the bytes of a request and the number of those to answer with.
    """
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with listener:
            here, _ = listener.accept()
        with here:
            here.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sizes = np.empty(2, "i8")
            while receive(here, sizes):
                request, answer = bytearray(sizes[0]), bytearray(sizes[1])
                receive(here, request)
                here.sendall(answer)

    threading.Thread(target=run, daemon=True).start()
    port: int = listener.getsockname()[1]
    return port


def receive(here: socket.socket, array: Any) -> bool:
    """Fill an array from a socket; return False at its end."""
    view = memoryview(array).cast("B")
    while view:
        got = here.recv_into(view)
        if not got:
            return False
        view = view[got:]
    return True


class BareSocket:
    """Round trips over a bare socket."""

    def __init__(self, port: int, sent: int, received: int) -> None:
        self._here = socket.create_connection(("127.0.0.1", port))
        self._here.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sizes = np.array([sent, received], "i8").tobytes()
        self._request = sizes + bytes(sent)
        self._answer = np.empty(received, "u1")

    def __call__(self) -> None:
        """Make one."""
        self._here.sendall(self._request)
        receive(self._here, self._answer)


def timed(call: Callable[[], object], calls: int) -> tuple[list[float], float]:
    """Return the microseconds of each call, and of this process's CPU on average."""
    took, cpu = [], time.process_time()
    for _ in range(calls):
        began = time.perf_counter()
        call()
        took.append(1e6 * (time.perf_counter() - began))
    return took, 1e6 * (time.process_time() - cpu) / calls


def handle(store: Any, verb: str, calls: int, port: int) -> Latencies:
    """Measure a verb of a handle, in a task of one worker on a shard of the other."""
    out = store.pull()
    grads = {name: np.full(a.shape, 1e-3, a.dtype) for name, a in out.items()}
    verbs = {"get": partial(store.pull, out=out), "push": partial(store.push, grads)}
    for _ in range(WARM):
        verbs[verb]()
        time.sleep(WARM_SECONDS)
    found = {"": timed(verbs[verb], calls)}
    if port:
        n = out["w"].nbytes
        come, go = (0, n) if verb == "get" else (n, 0)
        bare = BareSocket(port, SAID_NBYTES + come, SAID_NBYTES + go)
        timed(bare, WARM)
        found["bare socket"] = timed(bare, calls)
    return found


def loop(trainer: daskps.Trainer, part: tuple[str, int]) -> Latencies:
    """Measure the steps of a trainer."""
    verb, calls = part
    out = trainer.pull()
    grads = {name: np.full(a.shape, 1e-3, a.dtype) for name, a in out.items()}

    def push_pull() -> None:
        trainer.push(grads)
        trainer.pull(out=out)

    step = push_pull if verb == "push + pull" else partial(trainer.pushpull, grads)
    timed(step, WARM)
    return {"": timed(step, calls)}


class WayCluster:
    """One of the clusters, and what is measured there."""

    def __init__(self, client: Client, *, bare: bool) -> None:
        self._client, self._bare = client, bare
        self._here, self._there = client.nthreads()

    def measure(self, what: str, n: int, calls: int) -> Latencies:
        """Measure a verb of a handle, or a step of two trainers."""
        spec = {"w": daskps.ArraySpec((n,), "float32")}
        at = {"servers": [self._there]} if what in ("get", "push") else {"shards": 2}
        options: dict[str, Any] = {"optimizer": optim.SGD(1e-3), **at}
        with self._client.as_current(), daskps.create(spec, **options) as store:
            if what in ("get", "push"):
                port = 0
                if self._bare:
                    ports = self._client.run(serve, workers=[self._there])
                    port = ports[self._there]
                task = self._client.submit(
                    handle, store, what, calls, port, workers=[self._here], pure=False
                )
                measured: Latencies = task.result()
                return measured
            rows: list[Latencies] = daskps.run(store, loop, [(what, calls)] * 2)
            return rows[0]


OPTIONS = (number("--rounds", 5), number("--calls", 400, "of one measurement"))
#: What is measured: a verb or a step, and of how many elements.
JOBS = (
    ("get", SMALL),
    ("push", SMALL),
    ("push + pull", 2 * SMALL),
    ("pushpull", 2 * SMALL),
    ("get", LARGE),
    ("push", LARGE),
)


def run(options: Namespace) -> None:
    """Measure and print."""
    with ExitStack() as stack:
        sides: dict[str, WayCluster] = {}
        for name, lane in SIDES.items():
            with clusters.configured({"daskps.ways.lane": lane}):
                client = stack.enter_context(clusters.local(2, close=clusters.WAYS))
            sides[name] = WayCluster(client, bare=lane)
        print(f"{'':<34}{'p50 us':>9}{'p99 us':>9}{'CPU us':>9}")
        for what, n in JOBS:
            calls = options.calls if n < LARGE else max(1, options.calls // 10)
            found: dict[str, list[tuple[list[float], float]]] = {}
            for _ in range(options.rounds):
                for name, side in sides.items():
                    for peer, row in side.measure(what, n, calls).items():
                        found.setdefault(peer or name, []).append(row)
            size = f"{4 * n // 1024} KiB"
            for name, rows in found.items():
                p50, p99 = np.percentile(
                    [took for r in rows for took in r[0]], [50, 99]
                )
                cpu = np.median([r[1] for r in rows])
                print(
                    f"{f'{what}, {size}, {name}':<34}{p50:>9.0f}{p99:>9.0f}{cpu:>9.0f}"
                )
