"""How long it takes until something happens: imports and first pushes."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

import daskps
from daskps import optim
from tests.benchmarks import clusters
from tests.benchmarks.command import benchmark
from tests.benchmarks.samples import Job, Sample

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

_IMPORT = (
    "import time, distributed; t = time.perf_counter(); import daskps; "
    "print(time.perf_counter() - t)"
)


def _first(stores: int) -> Sample:
    """Return the seconds of the last of so many stores of a cluster, and of its push."""
    with clusters.local(2), ExitStack() as stack:
        for _ in range(stores):
            began = time.perf_counter()
            made = daskps.create({"w": np.zeros(1000)}, optimizer=optim.Adam())
            took = time.perf_counter() - began
            stack.enter_context(made).push({"w": np.ones(1000)})
            pushed = time.perf_counter() - began
    return Sample(took, {"pushed": pushed})


@benchmark("startup", "imports, and first pushes")
def startup(options: Namespace) -> Iterator[Job]:
    """Yield what takes its time once."""
    command = [sys.executable, "-c", _IMPORT]
    importing = {"import": lambda: float(subprocess.check_output(command))}
    yield Job("import daskps after distributed", importing)
    for stores, what in ((1, "first"), (2, "second")):
        yield Job(f"create, {what} store", {"create": partial(_first, stores)})
