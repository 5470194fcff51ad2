"""Rounds in the task graph, beside the same round written plainly with Dask.

Two worker processes of four threads. The plain round is what a user would write with
`client.submit`: weights in eight futures, for each part a gradient and a task per
shard that cuts its slice out of it, for each shard an update. Both sides have their
rounds queued. CPU time is that of whole processes; the scheduler's is the client's,
too.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import daskps
from daskps import optim
from tests.benchmarks import clusters
from tests.benchmarks.command import benchmark, number
from tests.benchmarks.samples import Job, Sample, seconds

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator

    from distributed import Client

PARTS, SHARDS, ELEMENTS = 8, 8, 250_000


def _half(params: Any, X: Any, y: Any) -> Any:
    return {"w": params["w"] * np.float32(0.5)}


def _train(store: daskps.ParameterStore, rounds: int, parts: int, how: str) -> None:
    data = np.arange(float(parts * rounds))[:, None]
    options: dict[str, Any] = {"batch_size": 1, "execution": how, "callbacks": ()}
    daskps.train(store, _half, data, trainers=parts, **options)


def _joined(*slices: Any) -> Any:
    return np.concatenate(slices)


def _gradient(weights: Any) -> Any:
    return weights * np.float32(0.5)


def _slice(gradient: Any, shard: int) -> Any:
    return np.array_split(gradient, SHARDS)[shard]


def _updated(weights: Any, *gradients: Any) -> Any:
    return weights - np.float32(0.1) * sum(gradients) / np.float32(len(gradients))


def _plain(client: Client, rounds: int) -> None:
    """Do the same rounds as a user would write them."""
    submit = partial(client.submit, pure=False)
    weights = [submit(np.zeros, ELEMENTS // SHARDS, "f4") for _ in range(SHARDS)]
    for _ in range(rounds):
        whole = [submit(_joined, *weights) for _ in range(PARTS)]
        grads = [submit(_gradient, w) for w in whole]
        weights = [
            submit(_updated, old, *(submit(_slice, g, shard) for g in grads))
            for shard, old in enumerate(weights)
        ]
    client.gather(weights)


def _round(client: Client, rounds: int, work: Callable[[], None]) -> Sample:
    """Return the seconds of a round, and its CPU time in scheduler and workers."""

    def now() -> tuple[float, float]:
        workers = client.run(time.process_time)
        return client.run_on_scheduler(time.process_time), sum(workers.values())

    before = now()
    took = seconds(work) / rounds
    scheduler, workers = np.subtract(now(), before) / rounds
    return Sample(took, {"scheduler": float(scheduler), "workers": float(workers)})


def _beside(client: Client, rounds: int, shards: int) -> Iterator[Job]:
    """Yield the round beside plain Dask, and a small one beside resident trainers."""
    timed, sgd = partial(_round, client, rounds), optim.SGD(0.1)
    start = {"w": np.ones(ELEMENTS, "f4")}
    with daskps.create(start, optimizer=sgd, shards=shards) as store:
        graph = partial(_train, store, rounds, PARTS, "graph")
        sides = {
            "graph": partial(timed, graph),
            "plain Dask": partial(timed, partial(_plain, client, rounds)),
        }
        yield Job(f"round of {PARTS} parts, 1 MB", sides, warm=1)
    with daskps.create({"w": np.ones(256, "f4")}, optimizer=sgd) as store:
        many = 20 * rounds
        resident = partial(_train, store, many, 2, "resident")
        graph = partial(_train, store, rounds, 2, "graph")
        sides = {
            "resident": partial(_round, client, many, resident),
            "graph": partial(timed, graph),
        }
        yield Job("round of 2 trainers, 1 kB", sides, warm=1)


def _by_socket(client: Client, rounds: int) -> Iterator[Job]:
    """Yield rounds between workers that share no memory, by socket and by message."""
    for n, size in ((256, "1 kB"), (ELEMENTS, "1 MB")):
        start = {"w": np.ones(n, "f4")}
        with daskps.create(start, optimizer=optim.SGD(0.1), shards=SHARDS) as store:
            work = partial(_train, store, rounds, PARTS, "graph")

            def side(by_socket: bool, work: Any = work) -> Sample:
                client.run(clusters.configure, {"daskps.carriers.socket": by_socket})
                return _round(client, rounds, work)

            sides = {"socket": partial(side, True), "message": partial(side, False)}
            title = f"round of {PARTS} parts, {size}, no memory shared"
            yield Job(title, sides, warm=1)


@benchmark(
    "graph",
    "rounds in the task graph, beside plain Dask",
    number("--rounds", 48, "of one side"),
    number("--shards", 2, "of the store beside plain Dask"),
    pairs=5,
)
def graph(options: Namespace) -> Iterator[Job]:
    """Yield rounds on the workers of one machine, then of two."""
    with clusters.local(2, threads_per_worker=4) as client:
        yield from _beside(client, options.rounds, options.shards)
    with clusters.local(2, close=["machine"], threads_per_worker=4) as client:
        yield from _by_socket(client, options.rounds)
