"""Shuffled batches of training data in several blocks, beside the same in one array."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dask.array as da
import numpy as np

import daskps
from daskps import optim
from daskps.bench import bare, command
from daskps.bench.pairs import Comparison, alternate
from daskps.bench.report import line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from distributed import Client

BATCH = 64


def _gradient(params: Any, X: Any, y: Any) -> Any:
    error = X @ params["w"] - y
    return {"w": X.T @ error / np.float32(len(y))}


def _step(store: Any, X: Any, y: Any, n: int) -> float:
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
    turned = chunked[0].map_blocks(np.asfortranarray).persist()
    yield f"{chunks} chunks, by column", (turned, chunked[1]), (np.asfortranarray(X), y)


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
    parser = command.plain("batches")
    add, count = parser.add_argument, command.count
    add("--rows", type=count, default=2_000_000, help="[%(default)s]")
    add("--columns", type=count, default=20, help="float32 [%(default)s]")
    add("--chunks", type=count, default=20, help="[%(default)s]")
    add("--pairs", type=count, default=5, help="[%(default)s]")
    options = parser.parse_args(argv)
    with bare.cluster(rpc_only=False) as client:
        sides = _sides(client, options.rows, options.columns, options.chunks)
        params = {"w": np.zeros(options.columns, "f4")}
        with daskps.create(params, optimizer=optim.SGD(1e-6)) as store:
            for name, blocks, array in sides:
                found = alternate(
                    _measure(store, blocks, options.rows),
                    _measure(store, array, options.rows),
                    options.pairs,
                )
                print(line(Comparison(name, "one array", found.ours, found.theirs)))
    return 0


def _measure(store: Any, data: tuple[Any, Any], n: int) -> Callable[[], float]:
    return lambda: _step(store, data[0], data[1], n)
