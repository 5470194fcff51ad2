"""A BSP step of two trainers over RPC, beside a bare Dask RPC round trip.

The model has 1 kB. Each line compares medians of alternating pairs in one run; the
bare round trip carries the same bytes both ways, from a task's thread to a handler
of the other worker, by both workers at once as the trainers do.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import Client, secede

import daskps
from daskps import optim
from daskps.bench import bare

if TYPE_CHECKING:
    from collections.abc import Sequence

ELEMENTS = 256


def _steps(trainer: daskps.Trainer, n: int) -> float:
    """Return milliseconds of one step."""
    grads = {"w": np.ones(ELEMENTS, "f4")}
    out = trainer.pull()
    for _ in range(50):
        trainer.pushpull(grads, out=out)
    return bare.milliseconds(lambda: trainer.pushpull(grads, out=out), n)


def _calls(store: daskps.ParameterStore) -> int:
    """Return how many messages the hosts of a store have got."""
    rows = store.stats()["shards"]
    return sum({row["worker"]: row["calls"] for row in rows}.values())


def _bare(peer: str, n: int) -> float:
    secede()
    data = np.ones(ELEMENTS, "f4").tobytes()
    bare.milliseconds(lambda: bare.call(peer, "echo", data=data), 50)
    return bare.milliseconds(lambda: bare.call(peer, "echo", data=data), n)


def _bare_both(client: Client, n: int) -> float:
    a, b = client.scheduler_info()["workers"]
    futures = [
        client.submit(_bare, y, n, workers=[x], pure=False) for x, y in ((a, b), (b, a))
    ]
    found: list[float] = client.gather(futures)
    return max(found)


def _compare(client: Client, pairs: int, n: int) -> None:
    a, _ = client.scheduler_info()["workers"]
    spec = {"w": np.zeros(ELEMENTS, "f4")}
    for name, servers in (("2 hosts", "all"), ("1 host", [a])):
        store = daskps.create(spec, optimizer=optim.SGD(0.1), servers=servers)
        ours, theirs, before = [], [], _calls(store)
        for _ in range(pairs):
            ours.append(max(daskps.run(store, _steps, [n, n])))
            theirs.append(_bare_both(client, n))
        # A pull and 50 steps to warm up come before the n steps of each trainer.
        messages = (_calls(store) - before) / (2 * pairs * (n + 51))
        print(bare.summary(f"step, {name}, {messages:.2f} messages", ours, theirs))
        store.close()


def _flat(client: Client, steps: int) -> None:
    """Print the scheduler's tasks and memory before, during and after a long run."""
    store = daskps.create({"w": np.zeros(ELEMENTS, "f4")}, optimizer=optim.SGD(0.1))
    seen: list[dict[str, Any]] = []

    class Watch:
        def on_epoch(self, run: Any) -> None:
            seen.append(client.run_on_scheduler(_scheduler_state))

    per_epoch = 1000
    daskps.train(
        store,
        _ones,
        np.zeros((2 * per_epoch, 1)),
        batch_size=1,
        epochs=steps // per_epoch,
        callbacks=[Watch()],
        trainers=2,
    )
    tenth = max(1, len(seen) // 10)
    print(f"{steps:,} steps of 2 trainers, after the first and the last epochs:")
    for state in (*seen[:1], *seen[tenth::tenth], seen[-1]):
        print(f"  {state['tasks']} tasks, {state['rss'] / 2**20:.1f} MiB")


def _ones(params: Any, X: Any, y: Any) -> Any:
    return {"w": np.ones(ELEMENTS, "f4")}


def _scheduler_state(dask_scheduler: Any) -> dict[str, Any]:
    rss = dask_scheduler.monitor.get_process_memory()
    return {"tasks": len(dask_scheduler.tasks), "rss": rss}


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
    parser = argparse.ArgumentParser(prog="python -m daskps.bench rounds")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=500, help="steps of one side")
    parser.add_argument("--long", type=int, default=0, help="steps of the long run")
    parser.add_argument("--process", action="store_true", help="all ways open")
    options = parser.parse_args(argv)
    with bare.cluster(rpc_only=not options.process) as client:
        client.run(partial(bare.install, ELEMENTS))
        if options.long:
            _flat(client, options.long)
        else:
            print(f"{'':<34}{'ours':>9}{'bare':>9}")
            _compare(client, options.pairs, options.steps)
    return 0
