"""What large messages cost: memory used again, and gradients as bfloat16.

Each line alternates with the others in one run: medians of the time, of the CPU time
of both processes and of their page faults. CPU time says more on a busy machine.
"""

from __future__ import annotations

import resource
import statistics
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import daskps
from daskps import optim
from daskps.bench import bare, command
from daskps.bench.pairs import seconds
from daskps.cluster import arrivals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Calls per measurement.
CALLS = 3


def usage() -> list[float]:
    """Return this process's milliseconds of CPU time, and its page faults."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return [1e3 * (used.ru_utime + used.ru_stime), float(used.ru_minflt)]


def install(dask_worker: Any) -> None:
    """Let a worker be asked what it has used, and told where frames go."""

    async def asked() -> dict[str, Any]:
        return {"status": "OK", "data": usage()}

    async def memory(again: bool) -> dict[str, Any]:
        arrivals.reuse(again)
        return {"status": "OK"}

    dask_worker.handlers["bare_usage"] = asked
    dask_worker.handlers["bare_memory"] = memory


def _memory(peer: str, again: bool) -> None:
    bare.call(peer, "memory", again=again)
    arrivals.reuse(again)


def _measure(peer: str, action: Callable[[], object]) -> list[float]:
    """Return milliseconds, milliseconds of CPU time and page faults of one call."""
    before = np.add(usage(), bare.call(peer, "usage")["data"])
    ms = 1e3 * seconds(action, CALLS)
    used = np.add(usage(), bare.call(peer, "usage")["data"]) - before
    return [ms, *(used / CALLS)]


def _verbs(store: Any, peer: str, n: int, pairs: int) -> dict[str, list[list[float]]]:
    grad, out = np.ones(n, "f4"), np.empty(n, "f4")
    actions = {
        "push": lambda: store.push({"w": grad}),
        "pull": lambda: store.pull(out={"w": out}),
    }
    found: dict[str, list[list[float]]] = {}
    for k in range(2 * pairs):
        again = (k + k // 2) % 2 == 0
        _memory(peer, again)
        for name, action in actions.items():
            action()
            kind = "again" if again else "fresh"
            found.setdefault(f"{name}, {kind}", []).append(_measure(peer, action))
    _memory(peer, True)
    return found


def _pushes(trainer: daskps.Trainer, part: tuple[str, int]) -> list[float]:
    peer, n = part
    grad = {"w": np.ones(n, "f4")}
    trainer.push(grad)
    return _measure(peer, lambda: trainer.push(grad))


def _line(name: str, rows: list[list[float]]) -> str:
    ms, cpu, faults = (statistics.median(column) for column in zip(*rows, strict=True))
    return f"{name:<22}{ms:>9.2f}{cpu:>9.2f}{faults:>9.0f}"


def _ratio(name: str, one: list[list[float]], other: list[list[float]]) -> str:
    """Return a line: medians of the pairs' ratios of time and of CPU time."""
    pairs = [np.divide(a[:2], b[:2]) for a, b in zip(one, other, strict=True)]
    ms, cpu = np.median(pairs, axis=0)
    return f"{name:<22}{ms:>9.2f}{cpu:>9.2f}"


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
    parser = command.plain("wire")
    add, count = parser.add_argument, command.count
    add("--mib", type=count, default=16, help="of one message [%(default)s]")
    add("--pairs", type=count, default=15, help="[%(default)s]")
    options = parser.parse_args(argv)
    n, pairs = options.mib * 2**20 // 4, options.pairs
    with bare.cluster() as client:
        client.run(install)
        a, b = client.nthreads()
        spec = {"w": daskps.ArraySpec((n,), "float32")}
        store = daskps.create(spec, optimizer=optim.SGD(0.1), servers=[a])
        found = client.submit(_verbs, store, a, n, pairs, workers=[b]).result()
        # The trainer of rank 1 is on the second worker; the first one has no part.
        loop = partial(_second, peer=a, n=n)
        for k in range(2 * pairs):
            codec = "bf16" if (k + k // 2) % 2 else None
            rows = daskps.run(
                store, loop, [0, 1], sync="asp", codec=codec, callbacks=()
            )
            found.setdefault(f"step, {codec or 'float32'}", []).append(rows[1])
    print(f"{f'{options.mib} MiB':<22}{'ms':>9}{'CPU ms':>9}{'faults':>9}")
    for name, rows in found.items():
        print(_line(name, rows))
    for one, other in (
        ("push, fresh", "push, again"),
        ("pull, fresh", "pull, again"),
        ("step, float32", "step, bf16"),
    ):
        print(_ratio(f"{one} / {other.split()[-1]}", found[one], found[other]))
    return 0


def _second(trainer: daskps.Trainer, part: int, *, peer: str, n: int) -> list[float]:
    return _pushes(trainer, (peer, n)) if part else []
