"""Processes back to back at the lock of one shard, and how fairly they share it.

Each holds the lock for a while, busy, and takes it again at once. Reported are the
processes' turns and their ratio, waits in holds, the most turns that others had during
one wait, and the share of the time that each process was busy. Where more runs than
there are cores, the longest wait is that for a core and not for the lock.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import config
from daskps.bench.options import duration, number, numbers
from daskps.cluster.machine.blocks import FileMembers
from daskps.cluster.machine.locks import FileLock
from daskps.cluster.machine.memory import open_memory

if TYPE_CHECKING:
    from argparse import Namespace

NBYTES = 2**20


def _compete(
    base: str, block: tuple[str, int], timing: tuple[float, float], ends: Any
) -> None:
    (ready, found), (hold, seconds) = ends, timing
    registry = FileMembers.visit(base, "bench")
    shared = registry.attach(block[0], NBYTES, block[1])
    lock, count = FileLock(shared), shared.buffer[NBYTES // 2 :][:8].view(np.int64)
    ready.wait()
    waits, others, last, cpu = [], 0, 0, time.process_time()
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        lock.acquire(60)
        begin = time.perf_counter()
        # The first turn may come before the others are there.
        others, last = max(others, int(count[0]) - last if last else 0), count[0] + 1
        count[0] = last
        while time.perf_counter() - begin < hold:
            pass
        lock.release()
        waits.append(begin - start)
    cpu = time.process_time() - cpu
    quantiles = np.quantile(waits, [0.5, 0.99, 1]).tolist()
    found.put((len(waits), quantiles, cpu / seconds, others))
    registry.leave()


def _round(base: str, hold: float, seconds: float, n: int) -> list[Any]:
    memory = open_memory(base, "bench")
    block = memory.allocate(NBYTES)
    block.stamp()
    context = multiprocessing.get_context("spawn")
    ends = context.Barrier(n), context.Queue()
    args = base, (block.name, block.nonce), (hold, seconds), ends
    processes = [context.Process(target=_compete, args=args) for _ in range(n)]
    for process in processes:
        process.start()
    found = [ends[1].get() for _ in processes]
    for process in processes:
        process.join()
    block.free()
    memory.close()
    return found


def _alone(base: str, n: int = 20_000) -> float:
    memory = open_memory(base, "bench")
    lock = FileLock(memory.allocate(NBYTES))
    start = time.perf_counter()
    for _ in range(n):
        lock.acquire(1)
        lock.release()
    microseconds = (time.perf_counter() - start) / n * 1e6
    memory.close()
    return microseconds


OPTIONS = (
    numbers("--hold", [20, 1000], "microseconds that each holds it, one row each"),
    duration("--seconds", 3.0, "of a row"),
    number("--processes", 2),
    number("--rounds", 3, "times that rows come"),
)


def run(options: Namespace) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(dir=config.load().shared_memory) as base:
        print(f"acquire and release, alone: {_alone(base):.2f} us")
        print(
            "hold us  turns (ratio)              wait in holds: p50  p99  max"
            "  turns of others  busy"
        )
        for _ in range(options.rounds):
            for hold in options.hold:
                rows = _round(base, hold / 1e6, options.seconds, options.processes)
                turns = [row[0] for row in rows]
                waits = np.max([row[1] for row in rows], axis=0) * 1e6 / hold
                cpu = " ".join(f"{row[2]:.2f}" for row in rows)
                ratio = max(turns) / min(turns)
                print(
                    f"{hold:7g}  {' / '.join(map(str, turns)):18} ({ratio:.2f})"
                    f"{waits[0]:18.1f}{waits[1]:6.1f}{waits[2]:6.1f}"
                    f"{max(row[3] for row in rows):16}  {cpu}"
                )
