"""BSP rounds: 16 MiB and 1 KiB beside other systems, 1 KiB beside bare round trips.

Against other systems a round is `Trainer.push`, then `Trainer.pull(out=...)`. Beside a
bare Dask RPC round trip it is `Trainer.pushpull`, by two trainers in the processes of
the shards; the bare round trip carries the same bytes both ways, from a task's thread
to a handler of the other worker, by both workers at once as the trainers do.
"""

from __future__ import annotations

from argparse import ArgumentError
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import Client, secede

import daskps
from daskps import optim
from tests.benchmarks import bare, clusters, command
from tests.benchmarks.jobs import StepJob
from tests.benchmarks.options import beside_peers, number
from tests.benchmarks.pairs import Comparison, alternate, seconds
from tests.benchmarks.report import Report

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Sequence

ELEMENTS = 256
#: On which the shards of a step are.
HOSTS = ("2 hosts", "1 host")


def _steps(trainer: daskps.Trainer, n: int) -> float:
    """Return seconds of one step."""
    grads = {"w": np.ones(ELEMENTS, "f4")}
    out = trainer.pull()
    for _ in range(50):
        trainer.pushpull(grads, out=out)
    return seconds(lambda: trainer.pushpull(grads, out=out), n)


def _calls(store: daskps.ParameterStore) -> int:
    """Return how many messages the hosts of a store have got."""
    rows = store.stats()["shards"]
    return sum({row["worker"]: row["calls"] for row in rows}.values())


def _bare(peer: str, n: int) -> float:
    secede()
    data = np.ones(ELEMENTS, "f4").tobytes()
    seconds(lambda: bare.call(peer, "echo", data=data), 50)
    return seconds(lambda: bare.call(peer, "echo", data=data), n)


def _bare_both(client: Client, n: int) -> float:
    a, b = client.nthreads()
    futures = [
        client.submit(_bare, y, n, workers=[x], pure=False) for x, y in ((a, b), (b, a))
    ]
    found: list[float] = client.gather(futures)
    return max(found)


def _step_both(store: daskps.ParameterStore, n: int) -> float:
    return float(max(daskps.run(store, _steps, [n, n], callbacks=())))


def _beside_bare(
    client: Client, titles: Sequence[str], options: Namespace
) -> Iterator[Comparison]:
    """Give a step on two hosts or one, as titles say, beside the bare round trip."""
    client.run(partial(bare.install, ELEMENTS))
    a, _ = client.nthreads()
    spec = {"w": np.zeros(ELEMENTS, "f4")}
    for title in titles:
        servers = "all" if HOSTS[0] in title else [a]
        store = daskps.create(spec, optimizer=optim.SGD(0.1), servers=servers)
        before = _calls(store)
        n, ours = options.steps, partial(_step_both, store, options.steps)
        found = alternate(ours, partial(_bare_both, client, n), options.pairs)
        # A pull and 50 steps to warm up come before the n steps of each trainer.
        messages = (_calls(store) - before) / (2 * len(found[0]) * (n + 51))
        job = f"{title}, {messages:.2f} messages"
        yield Comparison(job, "bare RPC round trip", *found)
        store.close()


def _flat(client: Client, steps: int) -> None:
    """Print the scheduler's tasks and memory before, during and after a long run."""
    store = daskps.create({"w": np.zeros(ELEMENTS, "f4")}, optimizer=optim.SGD(0.1))
    seen: list[dict[str, Any]] = []

    class Watch:
        def on_epoch(self, run: Any) -> None:
            seen.append(client.run_on_scheduler(_scheduler_state))

    per_epoch = min(steps, 1000)
    epochs, data = steps // per_epoch, np.zeros((2 * per_epoch, 1))
    how: dict[str, Any] = {"batch_size": 1, "epochs": epochs, "trainers": 2}
    daskps.train(store, _ones, data, callbacks=[Watch()], **how)
    tenth = max(1, len(seen) // 10)
    n = epochs * per_epoch
    print(f"{n:,} steps of 2 trainers, after the first and the last epochs:")
    for state in (*seen[:1], *seen[tenth::tenth], seen[-1]):
        print(f"  {state['tasks']} tasks, {state['rss'] / 2**20:.1f} MiB")


def _ones(params: Any, X: Any, y: Any) -> Any:
    return {"w": np.ones(ELEMENTS, "f4")}


def _scheduler_state(dask_scheduler: Any) -> dict[str, Any]:
    rss = dask_scheduler.monitor.get_process_memory()
    return {"tasks": len(dask_scheduler.tasks), "rss": rss}


def _series(close: Sequence[str]) -> dict[str, Sequence[str]]:
    """Return ways to close by their names: all of them, and those of `--close`."""
    ours = f"without {' and '.join(sorted(close))}" if close else "all ways"
    return {"RPC": clusters.WAYS, ours: close}


OPTIONS = (
    *beside_peers(pairs=7),
    number("--mib", 16, "of the large model"),
    number("--steps", 500, "beside bare"),
    number("--long", what="steps of a long run alone; whole thousands"),
)


def run(options: Namespace) -> None:
    """Measure and print."""
    if options.long:
        if options.scheduler or options.close or options.json:
            said = "--long takes a cluster of its own, and prints what it finds"
            raise ArgumentError(None, said)
        with clusters.local(2, close=clusters.WAYS) as client:
            _flat(client, options.long)
        return
    jobs = [StepJob("round", nbytes, 2, 2) for nbytes in (options.mib * 2**20, 1024)]
    report = Report("rounds", options)
    command.compare(options, jobs, report)
    for how, close in _series(options.close).items():
        titles = [f"step, {name}, {how}" for name in HOSTS]
        wanted = [title for title in titles if options.job in title]
        if options.scheduler is None and wanted:
            with clusters.local(2, close=close) as client:
                for found in _beside_bare(client, wanted, options):
                    report.add(found)
    report.end()
