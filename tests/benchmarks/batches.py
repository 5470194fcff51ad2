"""Shuffled batches of training data in several blocks, beside the same in one array."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import dask.array as da
import numpy as np

import daskps
from daskps import optim
from tests.benchmarks import clusters
from tests.benchmarks.options import number
from tests.benchmarks.pairs import Comparison, alternate
from tests.benchmarks.report import line

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Sequence

    from distributed import Client

BATCH = 64


def _gradient(params: Any, X: Any, y: Any) -> Any:
    error = X @ params["w"] - y
    return {"w": X.T @ error / np.float32(len(y))}


def _step(store: Any, n: int, X: Any, y: Any) -> float:
    """Return the seconds of a step of `train`, once it is warm."""
    result = daskps.train(store, _gradient, X, y, epochs=3, batch_size=BATCH)
    steps = -(-n // (BATCH * 2))
    shortest: float = min(epoch.seconds for epoch in result.history[1:])
    return shortest / steps


def _array(client: Client, blocks: Sequence[Any]) -> Any:
    """Return a dask array of blocks that are on the cluster."""
    futures = client.scatter(blocks, hash=False)
    lazy = [
        da.from_delayed(f, b.shape, b.dtype)
        for f, b in zip(futures, blocks, strict=True)
    ]
    return da.concatenate(lazy).persist()


def _sides(client: Client, n: int, columns: int, chunks: int) -> Iterator[Any]:
    """Return pairs of X and y: one array, and what is set beside it, on the cluster."""
    rng = np.random.default_rng(0)
    X, y = rng.random((n, columns), "f4"), rng.random(n, "f4")
    high = -(-n // chunks)
    cut = [np.split(a, range(high, n, high)) for a in (X, y)]
    chunked = [_array(client, blocks) for blocks in cut]
    yield f"{chunks} chunks", tuple(chunked), (X, y)
    listed = [client.scatter(np.array_split(a, 2), hash=False) for a in (X, y)]
    yield "a list of blocks", tuple(listed), (X, y)


OPTIONS = (
    number("--rows", 2_000_000),
    number("--columns", 20, "float32"),
    number("--chunks", 20),
    number("--pairs", 5),
)


def run(options: Namespace) -> None:
    """Measure and print."""
    params = {"w": np.zeros(options.columns, "f4")}
    with (
        clusters.local(2) as client,
        daskps.create(params, optimizer=optim.SGD(1e-6)) as store,
    ):
        sides = _sides(client, options.rows, options.columns, options.chunks)
        for name, blocks, array in sides:
            ours = partial(_step, store, options.rows, *blocks)
            theirs = partial(_step, store, options.rows, *array)
            found = alternate(ours, theirs, options.pairs)
            print(line(Comparison(name, "one array", *found)))
