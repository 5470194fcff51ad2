"""Tasks that predict by a model: a view of it, the model at hand, and a pull for each.

Two worker processes of one thread. Each task reads the model, a part at a time, for
5 ms. At hand means in a global variable of the process, which nobody keeps up to date.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import daskps
from tests.benchmarks import clusters
from tests.benchmarks.command import benchmark, number
from tests.benchmarks.samples import Bar, Job, Sample, seconds

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator

    from distributed import Client

    from tests.benchmarks.report import Found

#: Elements of a model of 100 MB, and what a task multiplies at a time.
BIG, PART = 25_000_000, 1_000
TASK_SECONDS = 0.005
AT_HAND: dict[str, Any] = {}


def _predict(params: Any) -> float:
    """Read the model for as long as a task takes."""
    parts, x, total = params["w"].reshape(-1, PART), np.ones(PART, "f4"), 0.0
    end, n = time.perf_counter() + TASK_SECONDS, 0
    while time.perf_counter() < end:
        total += float(parts[n % len(parts)] @ x)
        n += 1
    return total


def at_hand(elements: int, number: int) -> float:
    """Predict by arrays that the process has."""
    if not AT_HAND:
        AT_HAND["w"] = np.ones(elements, "f4")
    return _predict(AT_HAND)


def by_view(store: daskps.ParameterStore, number: int) -> float:
    """Predict by a view."""
    return _predict(store.view())


def by_pull(store: daskps.ParameterStore, number: int) -> float:
    """Predict by a copy of one's own."""
    return _predict(store.pull())


@benchmark(
    "prediction",
    "tasks that predict by a large model",
    number("--tasks", 200, "in a sample"),
)
def prediction(options: Namespace) -> Iterator[Found]:
    """Yield the seconds of a task by each way to the model."""
    with clusters.local(2) as client:
        store = daskps.create({"w": np.ones(BIG, "f4")}, client=client)
        n = options.tasks
        first = seconds(partial(_all, client, partial(by_view, store), 2))
        yield f"the first two tasks took {first:.2f} s, a view among it"
        sides = {
            "a view": partial(by_view, store),
            "at hand": partial(at_hand, BIG),
            "a pull each": partial(by_pull, store),
        }
        bars = [
            Bar("a view", "at hand", 1.1),
            Bar("a view", "a pull each", 5, "", True),
        ]
        timed = {name: partial(_side, client, work, n) for name, work in sides.items()}
        yield Job(f"a task of 5 ms, {BIG * 4 // 10**6} MB", timed, bars, warm=1)
        store.close()


def _side(client: Client, work: Callable[[int], float], n: int) -> Sample:
    return Sample(seconds(partial(_all, client, work, n)) / n)


def _all(client: Client, work: Callable[[int], float], n: int) -> None:
    client.gather(client.map(work, range(n), pure=False))
