"""How long a trainer waits for the rows of its batches, read ahead and not.

One trainer of ``train(rows=)`` under ASP, its table on another worker. What it waits is the
time from the end of a gradient to the next one's begin: the step, and what is left of the
reads. Both sides compute for about as long: NumPy, or with ``--device`` a wait, as for an
accelerator.
"""

from __future__ import annotations

import os
import time
from functools import cache, partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

import daskps
from daskps import optim
from daskps.training.choices import rows_ahead
from tests.benchmarks import clusters
from tests.benchmarks.options import number, switch
from tests.benchmarks.overlap import Computation
from tests.benchmarks.pairs import Comparison, alternate
from tests.benchmarks.report import HEADER, line

if TYPE_CHECKING:
    from argparse import Namespace

#: How the trainer reaches the table, and the ways that are closed for that.
_CLOSED = {
    "shared memory": (),
    "lane": ("process", "machine"),
    "message": clusters.WAYS,
}
#: When the last gradient ended.
_ENDED = [0.0]


@cache
def _computation(length: float, device: bool) -> Computation:
    return Computation(length, device)


def _gradient(params: Any, X: Any, y: Any, *, length: float, device: bool) -> Any:
    """Return as the loss the seconds since the last one, but for an epoch's first."""
    waited = time.perf_counter() - _ENDED[0] if X[0, 0] else 0.0
    _computation(length, device)()
    grad = params["emb"]
    _ENDED[0] = time.perf_counter()
    return waited, {"emb": grad}


def _some(X: Any, rng: np.random.Generator, *, n: int, rows: int) -> Any:
    """Return random ids: as in most batches, few come in the next one again."""
    return rng.integers(0, rows, n)


def _waited(store: Any, options: Namespace, *, ahead: bool) -> float:
    """Return the seconds that a trainer waits for one step."""
    ids = partial(_some, n=options.ids, rows=options.rows)
    work = partial(_gradient, length=options.ms / 1e3, device=options.device)
    how: dict[str, Any] = {"rows": {"emb": ids}, "sync": "asp", "trainers": 1}
    how |= {"batch_size": 1, "shuffle": False, "callbacks": (), "epochs": 2}
    n: int = options.steps
    steps = np.arange(float(n))[:, None]
    begin = rows_ahead if ahead else lambda chosen: 0
    with mock.patch("daskps.training.fit.rows_ahead", begin):
        result = daskps.train(store, work, steps, **how)
    found: float = min(epoch.loss or 0.0 for epoch in result.history)
    return found * n / (n - 1)


OPTIONS = (
    number("--rows", 1_000_000, "of the table"),
    number("--ids", 10_000, "of a batch"),
    number("--dim", 64),
    number("--ms", 10, "of a gradient"),
    number("--steps", 30, "of an epoch"),
    number("--pairs", 9),
    switch("--device", "wait, as for an accelerator"),
)


def run(options: Namespace) -> None:
    """Measure and print."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(HEADER)
    spec = daskps.TableSpec(options.rows, options.dim)
    for way, close in _CLOSED.items():
        with clusters.local(2, close=close) as client:
            _, servers = clusters.places(client, 1, 1)
            params = {"emb": spec}
            rule = optim.SGD(1e-9)
            with daskps.create(params, optimizer=rule, servers=servers) as store:
                ahead = partial(_waited, store, options, ahead=True)
                after = partial(_waited, store, options, ahead=False)
                ahead(), after()
                found = alternate(ahead, after, options.pairs)
        print(line(Comparison(f"waits, {way}", "not ahead", *found)), flush=True)
