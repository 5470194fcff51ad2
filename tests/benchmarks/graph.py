"""Rounds in the task graph, beside the same round written plainly with Dask.

Two worker processes of four threads. The plain round is what a user would write with
`client.submit`: weights in eight futures, for each part a gradient and a task per
shard that cuts its slice out of it, for each shard an update. Both sides have their
rounds queued; each figure is the median of alternating pairs in one run. CPU time is
that of whole processes: in a cluster started here the scheduler's is the client's, too.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

import daskps
from daskps import optim
from tests.benchmarks import clusters, command
from tests.benchmarks.options import number, reported
from tests.benchmarks.pairs import Comparison, alternate, seconds
from tests.benchmarks.report import Report

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator

    from distributed import Client

    from tests.benchmarks.pairs import Samples

    Seconds: TypeAlias = Callable[[], float]
    #: Measures ours and theirs in turn, once both are warm.
    Alternating: TypeAlias = Callable[[Seconds, Seconds], Samples]

PARTS, SHARDS, ELEMENTS = 8, 8, 250_000
#: Of the table; a part names as many rows as an array of 1 MB has elements for.
ROWS, DIM = 100_000, 64


def _half(params: Any, X: Any, y: Any) -> Any:
    return {"w": params["w"] * np.float32(0.5)}


def _half_of_rows(params: Any, X: Any, y: Any) -> Any:
    return {"emb": params["emb"] * np.float32(0.5)}


def _own(X: Any) -> Any:
    """Return rows of one part's own."""
    rng = np.random.default_rng(int(X[0, 0]))
    return rng.integers(0, ROWS, ELEMENTS // DIM)


def _same(X: Any) -> Any:
    """Return the rows that all parts name."""
    return _own(np.zeros((1, 1)))


def _train(
    store: daskps.ParameterStore, rounds: int, parts: int, how: str, **more: Any
) -> None:
    data = np.arange(float(parts * rounds))[:, None]
    options: dict[str, Any] = {"batch_size": 1, "execution": how, "callbacks": ()}
    gradient = _half_of_rows if more else _half
    daskps.train(store, gradient, data, trainers=parts, **options, **more)


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


class _Cpu:
    """CPU milliseconds of a round, per sample, of the scheduler and of all workers."""

    def __init__(self, client: Client, rounds: int) -> None:
        self._client, self._rounds = client, rounds
        self.scheduler: list[float] = []
        self.workers: list[float] = []

    def _now(self) -> tuple[float, float]:
        workers = self._client.run(time.process_time)
        return self._client.run_on_scheduler(time.process_time), sum(workers.values())

    def seconds(self, work: Callable[[], None]) -> float:
        """Return the seconds of a round; keep its CPU time."""
        before = self._now()
        found = seconds(work) / self._rounds
        used = np.subtract(self._now(), before) / self._rounds * 1e3
        self.scheduler.append(used[0])
        self.workers.append(used[1])
        return found

    def __str__(self) -> str:
        """Return both, without the first sample, which warms up."""
        scheduler = statistics.median(self.scheduler[1:])
        return f"{scheduler:.1f} + {statistics.median(self.workers[1:]):.1f} ms"


def _beside_plain(
    client: Client, rounds: int, shards: int, alternating: Alternating
) -> tuple[Comparison, str]:
    """Return the round beside plain Dask, and the CPU time of both."""
    ours, plain = _Cpu(client, rounds), _Cpu(client, rounds)
    start = {"w": np.ones(ELEMENTS, "f4")}
    with daskps.create(start, optimizer=optim.SGD(0.1), shards=shards) as store:
        found = alternating(
            lambda: ours.seconds(lambda: _train(store, rounds, PARTS, "graph")),
            lambda: plain.seconds(lambda: _plain(client, rounds)),
        )
    name = f"graph round of {PARTS} parts, 1 MB"
    used = f"CPU time of a round, scheduler + workers: ours {ours}, plain Dask {plain}"
    return Comparison(name, "plain Dask", *found), used


def _beside_resident(rounds: int, alternating: Alternating) -> Comparison:
    with daskps.create({"w": np.ones(256, "f4")}, optimizer=optim.SGD(0.1)) as store:
        many = 20 * rounds
        found = alternating(
            lambda: seconds(lambda: _train(store, many, 2, "resident")) / many,
            lambda: seconds(lambda: _train(store, rounds, 2, "graph")) / rounds,
        )
    return Comparison("resident round of 2 trainers, 1 kB", "graph execution", *found)


def _beside_an_array(
    client: Client, rounds: int, alternating: Alternating
) -> Iterator[tuple[Comparison, str]]:
    """Yield rounds with rows of a table, beside those of an array of as many bytes."""
    start = {"w": np.ones(ELEMENTS, "f4")}
    table = {"emb": daskps.TableSpec(ROWS, DIM, init=1.0)}
    sgd = optim.SGD(0.1)
    with (
        daskps.create(start, optimizer=sgd) as dense,
        daskps.create(table, optimizer=sgd) as store,
    ):
        for which, ids in (("the same", _same), ("its own", _own)):
            ours, array = _Cpu(client, rounds), _Cpu(client, rounds)
            train = partial(_train, store, rounds, PARTS, "graph", rows={"emb": ids})
            found = alternating(
                partial(ours.seconds, train),
                partial(array.seconds, partial(_train, dense, rounds, PARTS, "graph")),
            )
            name = f"graph round of {PARTS} parts, 1 MB of rows, each {which}"
            used = f"rows {ours}, an array {array}"
            yield (
                Comparison(name, "an array of 1 MB", *found),
                f"CPU time of a round, scheduler + workers: {used}",
            )


def _by_lane(rounds: int, alternating: Alternating) -> Iterator[tuple[Comparison, str]]:
    """Yield rounds between workers that share no memory, by lane and by message."""
    with clusters.local(2, close=["machine"], threads_per_worker=4) as client:
        for n, size in ((256, "1 kB"), (ELEMENTS, "1 MB")):
            used = {lane: _Cpu(client, rounds) for lane in (True, False)}
            start = {"w": np.ones(n, "f4")}
            with daskps.create(start, optimizer=optim.SGD(0.1), shards=SHARDS) as store:

                def side(lane: bool, store: Any = store, used: Any = used) -> float:
                    client.run(clusters.configure, {"daskps.ways.lane": lane})
                    took: float = used[lane].seconds(
                        lambda: _train(store, rounds, PARTS, "graph")
                    )
                    return took

                found = alternating(partial(side, True), partial(side, False))
            name = f"graph round of {PARTS} parts, {size}, no memory shared"
            by = f"by lane {used[True]}, by message {used[False]}"
            cpu = f"CPU time of a round of {size}, scheduler + workers: {by}"
            yield Comparison(name, "by message", *found), cpu


OPTIONS = (
    *reported(pairs=5),
    number("--rounds", 48, "of one side"),
    number("--shards", 2, "of the store beside plain Dask"),
)


def run(options: Namespace) -> None:
    """Measure and print."""
    report = Report("graph", options)

    def alternating(ours: Seconds, theirs: Seconds) -> Samples:
        ours(), theirs()  # warm
        return alternate(ours, theirs, options.pairs)

    with command.cluster(options, 2, threads=4) as client:
        sizes = options.rounds, options.shards
        found, used = _beside_plain(client, *sizes, alternating)
        print(used)
        report.add(found)
        report.add(_beside_resident(options.rounds, alternating))
        for found, used in _beside_an_array(client, options.rounds, alternating):
            print(used)
            report.add(found)
    if options.scheduler is None and not options.close:
        for found, used in _by_lane(options.rounds, alternating):
            print(used)
            report.add(found)
    report.end()
