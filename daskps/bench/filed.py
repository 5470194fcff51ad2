"""Copies out of a block's file, beside copies out of its mapped memory.

Both in one process, in turn. Reported are wall time and CPU time of the thread, medians,
and the ratio of pairs.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from daskps import config
from daskps.bench import command, pairs
from daskps.cluster import reading
from daskps.cluster.filed import Filed
from daskps.cluster.memory import Memory, open_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: Of one sample.
SECONDS = 0.05


def measure(memory: Memory, nbytes: int, n_pairs: int) -> Iterator[str]:
    """Yield a line for wall and one for CPU time of a copy.

    Parameters
    ----------
    memory : Memory
        Where the block lies.
    nbytes : int
        What is copied.
    n_pairs : int
        How many samples of either.

    Yields
    ------
    str
        In microseconds.
    """
    block, out = memory.take(nbytes), np.ones(nbytes, np.uint8)
    reading.warm(nbytes)
    file, mapped = (
        partial(copier(nbytes), out, block.buffer)
        for copier in (Filed(block).copier, reading.copier)
    )
    for title, clock in (("wall", time.perf_counter), ("cpu", time.thread_time)):
        n = pairs.steps_in(SECONDS, partial(_sample, file, clock))
        ours, theirs = (partial(_sample, f, clock, n) for f in (file, mapped))
        a, b, _ = pairs.alternate(ours, theirs, n_pairs)
        ratios = [x / y for x, y in zip(a, b, strict=True)]
        yield (
            f"{nbytes:>10}  {title:<4}{statistics.median(a) * 1e6:>10.1f}"
            f"{statistics.median(b) * 1e6:>10.1f}{statistics.median(ratios):>8.2f} "
            f"({min(ratios):.2f}-{max(ratios):.2f})"
        )
    block.free()


def _sample(copy: Callable[[], None], clock: Callable[[], float], n: int) -> float:
    began = clock()
    for _ in range(n):
        copy()
    return (clock() - began) / n


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
    parser = command.plain("filed")
    add, count = parser.add_argument, command.count
    sizes = [1, 64, 1024, 16384, 65536]
    add("--kib", type=count, nargs="+", default=sizes, help="sizes %(default)s")
    add("--pairs", type=count, default=31, help="alternating pairs [%(default)s]")
    options = parser.parse_args(argv)
    print("     bytes   us        file    mapped   ratio")
    with tempfile.TemporaryDirectory(dir=config.load().shared_memory) as base:
        memory = open_memory(base, "bench")
        for kib in options.kib:
            for line in measure(memory, kib * 1024, options.pairs):
                print(line, flush=True)
        memory.close()
    return 0
