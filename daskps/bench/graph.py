"""Rounds in the task graph, beside the same round written plainly with Dask.

Two worker processes of four threads. The plain round is what a user would write with
`client.submit`: weights in eight futures, for each part a gradient and a task per
shard that cuts its slice out of it, for each shard an update. Both sides have their
rounds queued; each figure is the median of alternating pairs in one run. CPU time is
that of whole processes: in a cluster started here the scheduler's is the client's, too.
"""

from __future__ import annotations

import statistics
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import Client, Event, SchedulerPlugin

import daskps
from daskps import optim
from daskps.bench import command
from daskps.bench.pairs import Comparison, alternate, seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.bench.cores import Looks
    from daskps.bench.pairs import Samples

PARTS, SHARDS, ELEMENTS = 8, 8, 250_000


def _half(params: Any, X: Any, y: Any) -> Any:
    return {"w": params["w"] * np.float32(0.5)}


def _train(store: daskps.ParameterStore, rounds: int, parts: int, how: str) -> None:
    data = np.zeros((parts * rounds, 1))
    options: dict[str, Any] = {"batch_size": 1, "execution": how, "callbacks": ()}
    daskps.train(store, _half, data, trainers=parts, **options)


# -- the same round with plain Dask -------------------------------------------


def _joined(*slices: Any) -> Any:
    return np.concatenate(slices)


def _gradient(weights: Any) -> Any:
    return weights * np.float32(0.5)


def _slice(gradient: Any, shard: int) -> Any:
    return np.array_split(gradient, SHARDS)[shard]


def _updated(weights: Any, *gradients: Any) -> Any:
    return weights - np.float32(0.1) * sum(gradients) / np.float32(len(gradients))


def _plain(client: Client, rounds: int) -> None:
    weights = [
        client.submit(np.zeros, ELEMENTS // SHARDS, "f4", pure=False)
        for _ in range(SHARDS)
    ]
    for _ in range(rounds):
        whole = [client.submit(_joined, *weights, pure=False) for _ in range(PARTS)]
        grads = [client.submit(_gradient, w, pure=False) for w in whole]
        weights = [
            client.submit(
                _updated,
                weights[shard],
                *(client.submit(_slice, g, shard, pure=False) for g in grads),
                pure=False,
            )
            for shard in range(SHARDS)
        ]
    client.gather(weights)


# -- measurements --------------------------------------------------------------


class _Cpu:
    """CPU milliseconds of a round, per sample, of the scheduler and of all workers."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.scheduler: list[float] = []
        self.workers: list[float] = []

    def _now(self) -> tuple[float, float]:
        workers = self._client.run(time.process_time)
        return self._client.run_on_scheduler(time.process_time), sum(workers.values())

    def seconds(self, work: Callable[[], None], rounds: int) -> float:
        """Return the seconds of a round; keep its CPU time."""
        before = self._now()
        found = seconds(work) / rounds
        scheduler, workers = (
            (b - a) / rounds * 1e3 for a, b in zip(before, self._now(), strict=True)
        )
        self.scheduler.append(scheduler)
        self.workers.append(workers)
        return found

    def __str__(self) -> str:
        """Return both, without the first sample, which warms up."""
        scheduler = statistics.median(self.scheduler[1:])
        return f"{scheduler:.1f} + {statistics.median(self.workers[1:]):.1f} ms"


def _beside_plain(
    client: Client, pairs: int, rounds: int, looks: Looks | None
) -> Comparison:
    start = {"w": np.ones(ELEMENTS, "f4")}
    ours, plain = _Cpu(client), _Cpu(client)
    with daskps.create(start, optimizer=optim.SGD(0.1)) as store:
        found = _warm(
            lambda: ours.seconds(lambda: _train(store, rounds, PARTS, "graph"), rounds),
            lambda: plain.seconds(lambda: _plain(client, rounds), rounds),
            pairs,
            looks,
        )
    print(f"CPU time of a round, scheduler + workers: ours {ours}, plain Dask {plain}")
    return Comparison(f"graph round of {PARTS} parts, 1 MB", "plain Dask", *found)


def _beside_resident(pairs: int, rounds: int, looks: Looks | None) -> Comparison:
    with daskps.create({"w": np.ones(256, "f4")}, optimizer=optim.SGD(0.1)) as store:
        many = 20 * rounds
        found = _warm(
            lambda: seconds(lambda: _train(store, many, 2, "resident")) / many,
            lambda: seconds(lambda: _train(store, rounds, 2, "graph")) / rounds,
            pairs,
            looks,
        )
    return Comparison("resident round of 2 trainers, 1 kB", "graph execution", *found)


def _warm(
    ours: Callable[[], float],
    theirs: Callable[[], float],
    pairs: int,
    looks: Looks | None,
) -> Samples:
    """Warm both up, then measure them in turn."""
    ours(), theirs()
    return alternate(ours, theirs, pairs, looks)


class _Most(SchedulerPlugin):
    """The largest number of tasks on the scheduler, and those done by name."""

    name = "daskps-bench-most"

    async def start(self, scheduler: Any) -> None:
        self.scheduler, self.most = scheduler, 0
        self.done: dict[str, int] = {}

    def transition(self, key: Any, start: Any, finish: Any, *_: Any, **__: Any) -> None:
        self.most = max(self.most, len(self.scheduler.tasks))
        if start == "processing" and finish == "memory" and type(key) is tuple:
            name = key[0].rsplit("-", 1)[0] if "reduce" in key[0] else key[0]
            self.done[name] = self.done.get(name, 0) + 1


def _tasks(client: Client, rounds: int) -> None:
    client.register_plugin(_Most())
    start = {"w": np.ones(ELEMENTS, "f4")}
    with daskps.create(start, optimizer=optim.SGD(0.1), name="bench") as store:
        _train(store, rounds, PARTS, "graph")
        store.delete()

    def state(dask_scheduler: Any) -> Any:
        plugin = dask_scheduler.plugins[_Most.name]
        return plugin.most, plugin.done

    most, done = client.run_on_scheduler(state)
    client.unregister_scheduler_plugin(_Most.name)
    each = ", ".join(f"{n / rounds:g} {name}" for name, n in done.items())
    print(f"{rounds} rounds: tasks per round {each}; at most {most} on the scheduler")


class _Late:
    def __call__(self, params: Any, X: Any, y: Any) -> Any:
        if X[0, 0]:
            Event("daskps-bench-late").wait()
        return _half(params, X, y)


def _idle(client: Client, idle_seconds: float) -> None:
    """Keep 11 contributions while the twelfth is late; count them."""

    def held() -> int:
        def count(dask_worker: Any) -> int:
            n: int = dask_worker.metrics["daskps"](dask_worker)["contributions"]
            return n

        return sum(client.run(count).values())

    late = Event("daskps-bench-late", client=client)
    rows = np.zeros((12, 1))
    rows[-1] = 1
    with daskps.create({"w": np.ones(256, "f4")}, optimizer=optim.SGD(0.1)) as store:
        thread = threading.Thread(
            target=lambda: daskps.train(
                store, _Late(), rows, trainers=12, execution="graph", callbacks=()
            )
        )
        thread.start()
        while held() < 11:
            time.sleep(0.05)
        time.sleep(idle_seconds)
        kept = held()
        late.set()
        thread.join()
        time.sleep(0.5)
        print(
            f"after {idle_seconds:g} s idle: {kept} of 11 contributions; then {held()}"
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
    parser = command.parser("graph", pairs=5)
    add, count = parser.add_argument, command.count
    add("--rounds", type=count, default=48, help="of one side [%(default)s]")
    add(
        "--long", type=count, default=1000, help="rounds that are counted [%(default)s]"
    )
    add("--idle", type=command.duration, default=10.0, help="seconds [%(default)s]")
    options = parser.parse_args(argv)
    with (
        command.cluster(options, 2, threads=4) as client,
        command.reported("graph", options) as report,
    ):
        pairs, looks = options.pairs, report.looks
        report.add(_beside_plain(client, pairs, options.rounds, looks))
        report.add(_beside_resident(pairs, options.rounds, looks))
        if options.scheduler is None:  # they look into scheduler and workers
            _tasks(client, options.long)
            _idle(client, options.idle)
    return 0
