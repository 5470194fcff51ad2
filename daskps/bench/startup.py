"""How long it takes until something happens: imports, and the first push."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import numpy as np

import daskps
from daskps import optim
from daskps.bench import bare, command

if TYPE_CHECKING:
    from collections.abc import Sequence

_IMPORT = (
    "import time, distributed; t = time.perf_counter(); import daskps; "
    "print(time.perf_counter() - t)"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print.

    Parameters
    ----------
    argv : sequence of str, optional
        Command line without the program's name.

    Returns
    -------
    int
        Exit status: 0, whatever was measured.
    """
    parser = command.plain("startup")
    add = parser.add_argument
    add("--runs", type=command.count, default=7, help="imports [%(default)s]")
    options = parser.parse_args(argv)
    runs = [
        float(subprocess.check_output([sys.executable, "-c", _IMPORT]))
        for _ in range(options.runs)
    ]
    print(f"import daskps after distributed: {statistics.median(runs):.3f} s")
    for name in ("first store of the cluster", "second store"):
        with bare.cluster(rpc_only=False):
            created, pushed = [], []
            for _ in range(1 if name.startswith("first") else 2):
                began = time.perf_counter()
                store = daskps.create({"w": np.zeros(1000)}, optimizer=optim.Adam())
                created.append(time.perf_counter() - began)
                store.push({"w": np.ones(1000)})
                pushed.append(time.perf_counter() - began)
            print(f"{name}: created {created[-1]:.3f} s, pushed {pushed[-1]:.3f} s")
    return 0
