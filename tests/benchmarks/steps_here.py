"""Steps of the daskps that is imported here, timed on request: one side of `tree`.

It is run as a script, in a checkout of its own, so it uses public names alone. Each line
of standard input names a job; the answer is the seconds of one step.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import Client, LocalCluster

import daskps
from daskps import optim

if TYPE_CHECKING:
    from collections.abc import Callable

#: Elements of 1 KiB in each of two shards, and of 256 KiB in one.
SMALL, MEDIUM, LARGE = (512, 2), (2**16, 1), (250_000, 2)
#: Calls of one sample.
CALLS = 1000


def _quartile(call: Callable[[], object], n: int) -> float:
    """Return the seconds that a quarter of the calls stay below."""
    found = []
    for _ in range(n):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return statistics.quantiles(found, n=4)[0]


def _steps(trainer: daskps.Trainer, part: tuple[str, int]) -> float:
    """Time one verb of a trainer; a step of BSP needs both, so both are done."""
    verb, n = part
    out = trainer.pull()
    grads = {name: np.full(a.shape, 1e-3, a.dtype) for name, a in out.items()}
    calls = {
        "push": lambda: trainer.push(grads),
        "pull": lambda: trainer.pull(out=out),
        "pushpull": lambda: trainer.pushpull(grads, out=out),
    }
    for call in [*calls.values()] * 20:
        call()
    return _quartile(calls[verb], n)


def _run(store: daskps.ParameterStore, verb: str, sync: str, trainers: int) -> float:
    parts = [(verb, CALLS)] * trainers
    found: list[float] = daskps.run(store, _steps, parts, sync=sync)
    return max(found)


def _handle(store: daskps.ParameterStore, verb: str) -> float:
    out = store.pull()
    grads = {name: np.full(a.shape, 1e-3, a.dtype) for name, a in out.items()}
    calls = {"push": lambda: store.push(grads), "pull": lambda: store.pull(out=out)}
    for call in [*calls.values()] * 20:
        call()
    return _quartile(calls[verb], CALLS)


def _slope(params: Any, X: Any, y: Any) -> Any:
    z = 1 / (1 + np.exp(-(X @ params["w"])))
    return {"w": (X.T @ (z - y) / len(X)).astype("f4")}


def _train(store: daskps.ParameterStore) -> float:
    rng = np.random.default_rng(0)
    n = 6 * CALLS
    X, y = rng.normal(size=(n, 512)).astype("f4"), np.ones(n, "f4")
    began = time.perf_counter()
    daskps.train(store, _slope, X, y, trainers=2, batch_size=32, callbacks=())
    return (time.perf_counter() - began) / (n / 64)


def _half(params: Any, X: Any, y: Any) -> Any:
    return {"w": params["w"] * np.float32(0.5)}


def _graph(store: daskps.ParameterStore) -> float:
    rounds = CALLS // 32
    options: dict[str, Any] = {"batch_size": 1, "execution": "graph", "callbacks": ()}
    began = time.perf_counter()
    daskps.train(store, _half, np.zeros((8 * rounds, 1)), trainers=8, **options)
    return (time.perf_counter() - began) / rounds


def jobs(client: Client, stack: ExitStack) -> dict[str, Callable[[], float]]:
    """Return what can be timed by name, in seconds; the stack frees the stores."""
    first = list(client.nthreads())[:1]

    def store(size: tuple[int, int], servers: Any = "auto") -> daskps.ParameterStore:
        n, shards = size
        start, rule = {"w": np.ones(n, "f4")}, optim.SGD(1e-3)
        made: daskps.ParameterStore = daskps.create(
            start, optimizer=rule, shards=shards, servers=servers
        )
        stack.callback(made.close)
        return made

    near, medium = store(SMALL, first), store(MEDIUM, first)
    both, large = store(SMALL), store(LARGE)
    found: dict[str, Callable[[], float]] = {}
    for verb in ("push", "pull"):
        if os.environ.get("DASK_DASKPS__WAYS__MACHINE") != "false":
            for size, held in ("1 KiB x 2", near), ("256 KiB", medium):
                for sync in ("bsp", "asp"):
                    name = f"trainer, {verb}, {size}, {sync.upper()}"
                    found[name] = partial(_run, held, verb, sync, 1)
        found[f"handle, {verb}, 1 KiB x 2"] = partial(_handle, near, verb)
    return found | {
        "rounds of two trainers, 1 KiB x 2": partial(_run, both, "pushpull", "bsp", 2),
        "rounds of two trainers, 1 MB": partial(_run, large, "pushpull", "bsp", 2),
        "train, two trainers": partial(_train, both),
        "graph, 8 parts, 1 MB": partial(_graph, large),
    }


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anything prints is no answer
    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=4,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            memory_limit=0,
        ) as cluster,
        Client(cluster) as client,
        ExitStack() as stack,
    ):
        known = jobs(client, stack)
        print("\t".join(known), file=answers, flush=True)
        for line in sys.stdin:
            print(known[line.rstrip("\n")](), file=answers, flush=True)


if __name__ == "__main__":
    main()
