"""Pulls while the interpreter of the shard's worker is busy, beside the same when idle."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

import daskps
from tests.benchmarks.jobs import timed
from tests.benchmarks.pairs import Comparison, alternate, steps_in
from tests.benchmarks.sides import ways_of

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator, Sequence

    from distributed import Client

    from tests.benchmarks.jobs import StepJob

Measured = TypeVar("Measured")
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
    """Do one of `WORK` again and again."""
    _OVER.clear()
    _BUSY.set()
    while not _OVER.is_set():
        WORK[work]()
    _BUSY.clear()


def _is_busy() -> bool:
    return _BUSY.is_set()


def _stop() -> None:
    _OVER.set()


def _pull(store: daskps.ParameterStore, elements: int, steps: int) -> float:
    """Return seconds of a pull, from a task."""
    out = {"w": np.zeros(elements, np.float32)}
    return timed(lambda: store.pull(out=out), steps)


def compare(
    client: Client, jobs: Sequence[StepJob], options: Namespace
) -> Iterator[Comparison]:
    """Measure pulls from a worker that is busy, beside the same when it is idle."""
    server, reader = list(client.nthreads())[:2]
    for job in jobs:
        params = {"w": daskps.ArraySpec((job.elements,), "float32")}
        with daskps.create(params, servers=[server]) as store:
            run = partial(_run, client, reader)
            pull = partial(run, _pull, store, job.elements)
            steps = steps_in(options.seconds, pull)
            idle = partial(pull, steps)
            busy = partial(beside, client, server, "Python", idle)
            found = alternate(busy, idle, options.pairs)
            ways = tuple(run(ways_of, store))
        yield Comparison(
            f"pull of {job.nbytes:,} B, owner busy", "owner idle", *found, ways
        )


def _run(client: Client, worker: str, function: Any, *args: Any) -> Any:
    return client.submit(function, *args, workers=[worker], pure=False).result()


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
