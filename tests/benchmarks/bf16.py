"""What gradients as bfloat16 save in large messages.

Both kinds alternate in one run: medians of the time, of the CPU time of both processes
and of their page faults. CPU time says more on a busy machine.
"""

from __future__ import annotations

import resource
import statistics
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import daskps
from daskps import optim
from tests.benchmarks import bare, clusters
from tests.benchmarks.options import number
from tests.benchmarks.pairs import seconds

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

#: Calls per measurement.
CALLS = 3


def usage() -> list[float]:
    """Return this process's milliseconds of CPU time, and its page faults."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return [1e3 * (used.ru_utime + used.ru_stime), float(used.ru_minflt)]


def install(dask_worker: Any) -> None:
    """Let a worker be asked what it has used."""

    async def asked() -> dict[str, Any]:
        return {"status": "OK", "data": usage()}

    dask_worker.handlers["bare_usage"] = asked


def _measure(peer: str, action: Callable[[], object]) -> list[float]:
    """Return milliseconds, milliseconds of CPU time and page faults of one call."""
    before = np.add(usage(), bare.call(peer, "usage")["data"])
    ms = 1e3 * seconds(action, CALLS)
    used = np.add(usage(), bare.call(peer, "usage")["data"]) - before
    return [ms, *(used / CALLS)]


def _pushed(trainer: daskps.Trainer, part: int, *, peer: str, n: int) -> list[float]:
    """Measure pushes of the trainer of rank 1, which is on the second worker."""
    if not part:
        return []
    push = partial(trainer.push, {"w": np.ones(n, "f4")})
    push()
    return _measure(peer, push)


OPTIONS = (number("--mib", 16, "of one message"), number("--pairs", 15))


def run(options: Namespace) -> None:
    """Measure and print."""
    n, pairs = options.mib * 2**20 // 4, options.pairs
    with clusters.local(2, close=clusters.WAYS) as client:
        client.run(install)
        a, _ = client.nthreads()
        spec = {"w": daskps.ArraySpec((n,), "float32")}
        store = daskps.create(spec, optimizer=optim.SGD(0.1), servers=[a])
        found: dict[str, list[list[float]]] = {}
        loop = partial(_pushed, peer=a, n=n)
        for k in range(2 * pairs):
            codec = "bf16" if (k + k // 2) % 2 else None
            how: dict[str, Any] = {"sync": "asp", "codec": codec, "callbacks": ()}
            rows = daskps.run(store, loop, [0, 1], **how)
            found.setdefault(f"step, {codec or 'float32'}", []).append(rows[1])
    print(f"{f'{options.mib} MiB':<22}{'ms':>9}{'CPU ms':>9}{'faults':>9}")
    for name, rows in found.items():
        ms, cpu, faults = (statistics.median(of) for of in zip(*rows, strict=True))
        print(f"{name:<22}{ms:>9.2f}{cpu:>9.2f}{faults:>9.0f}")
    both = zip(found["step, float32"], found["step, bf16"], strict=True)
    ms, cpu = np.median([np.divide(a[:2], b[:2]) for a, b in both], axis=0)
    print(f"{'float32 / bf16':<22}{ms:>9.2f}{cpu:>9.2f}")
