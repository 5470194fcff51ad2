"""How long it takes until something happens: imports, first pushes, a new worker."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
from distributed import Client

import daskps
from daskps import optim
from tests.benchmarks import clusters
from tests.benchmarks.options import number

if TYPE_CHECKING:
    from argparse import Namespace

_IMPORT = (
    "import time, distributed; t = time.perf_counter(); import daskps; "
    "print(time.perf_counter() - t)"
)


def _arrival(with_store: bool) -> float:
    """Return the seconds from asking for a second worker to its first task's end.

    Beside a store, the worker that comes loads the loops of its rule in idle time.
    """
    with clusters.started(1, memory_limit="auto") as cluster, Client(cluster) as client:
        params = {"w": np.zeros(1000)}
        daskps.create(params, name="w", optimizer=optim.Adam())
        if not with_store:
            daskps.open("w").delete()
        (first,) = client.nthreads()
        began = time.perf_counter()
        cluster.scale(2)
        client.wait_for_workers(2)
        (second,) = client.nthreads().keys() - {first}
        client.submit(sum, [1, 2], workers=[second]).result()
        return time.perf_counter() - began


OPTIONS = (number("--runs", 7, "imports, and workers that come"),)


def run(options: Namespace) -> None:
    """Measure and print."""
    command = [sys.executable, "-c", _IMPORT]
    runs = [float(subprocess.check_output(command)) for _ in range(options.runs)]
    print(f"import daskps after distributed: {statistics.median(runs):.3f} s")
    for name in ("first store of the cluster", "second store"):
        with clusters.local(2):
            for _ in range(1 if name.startswith("first") else 2):
                began = time.perf_counter()
                store = daskps.create({"w": np.zeros(1000)}, optimizer=optim.Adam())
                created = time.perf_counter() - began
                store.push({"w": np.ones(1000)})
                pushed = time.perf_counter() - began
            print(f"{name}: created {created:.3f} s, pushed {pushed:.3f} s")
    arrivals = {False: list[float](), True: list[float]()}
    for _ in range(options.runs):
        for with_store, taken in arrivals.items():
            taken.append(_arrival(with_store))
    for with_store, taken in arrivals.items():
        print(
            f"a worker that comes {'beside a' if with_store else 'without a'} store, "
            f"until its first task ended: {statistics.median(taken):.3f} s "
            f"({min(taken):.3f} to {max(taken):.3f})"
        )
