"""Steps whose transfer and computation overlap, beside the same steps in a row.

One trainer, the store on another worker, 16 MiB over RPC. The computation is made to
take about as long as the transfer: the worst case for one after the other, which then
takes twice as long as the longer of the two. It is NumPy's and lets other threads run,
or with ``--device`` a wait, as for an accelerator.
"""

from __future__ import annotations

import os
import statistics
import time
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

import daskps
from daskps import optim
from tests.benchmarks import clusters
from tests.benchmarks.command import benchmark, number, switch
from tests.benchmarks.samples import Job, seconds

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator

    from distributed import Client

LAYERS = 4


class Computation:
    """A computation of so many seconds, on its own as long as in company."""

    def __init__(self, length: float, device: bool) -> None:
        self._data, self._out = np.ones(2**15), np.empty(2**15)
        self._length, self._rounds = length, 0
        if not device:
            one = min(seconds(self._sine, 20) for _ in range(5))
            self._rounds = max(1, round(length / one))

    def _sine(self) -> None:
        np.sin(self._data, out=self._out)

    def __call__(self, share: float = 1.0) -> None:
        """Compute a share of it."""
        if not self._rounds:
            time.sleep(self._length * share)
        for _ in range(round(self._rounds * share)):
            self._sine()


class Steps:
    """Kinds of steps of one trainer; each method does so many of them."""

    def __init__(self, trainer: daskps.Trainer, device: bool) -> None:
        self.trainer, self.out = trainer, trainer.pull()
        self.grads = {name: np.full_like(a, 1e-9) for name, a in self.out.items()}
        self.names = list(self.out)
        self.work: Callable[..., None] = lambda share=1.0: None
        self.exchange(5)
        times = [seconds(partial(self.exchange, 1)) for _ in range(9)]
        self.work = Computation(statistics.median(times), device)

    def compute(self, n: int) -> None:
        """Compute, and send nothing."""
        for _ in range(n):
            self.work()

    def exchange(self, n: int) -> None:
        """Push and pull, and compute nothing."""
        for _ in range(n):
            self.trainer.pushpull(self.grads, out=self.out)

    def in_a_row(self, n: int) -> None:
        """Compute, then push and pull."""
        for _ in range(n):
            self.work()
            self.trainer.pushpull(self.grads, out=self.out)

    def prefetch(self, n: int) -> None:
        """Compute what the next weights are not needed for while they come."""
        for _ in range(n):
            self.trainer.push_async(self.grads, copy=False)
            self.trainer.prefetch()
            self.work()
            self.trainer.pull(out=self.out)

    def layers(self, n: int) -> None:
        """Go forward as weights come, backward as gradients leave, layer by layer."""
        share = 0.5 / LAYERS
        coming: dict[str, Any] = {}
        for _ in range(n):
            for name in self.names:
                if name in coming:
                    coming[name].result()
                self.work(share)
            for place, name in reversed(list(enumerate(self.names))):
                self.work(share)
                grad = {name: self.grads[name]}
                self.trainer.push_async(
                    grad, tick=place == 0, priority=-place, copy=False
                )
            for name in self.names:
                out = {name: self.out[name]}
                coming[name] = self.trainer.pull_async(out=out)
        for future in coming.values():
            future.result()


KINDS = ("compute", "exchange", "in_a_row", "prefetch", "layers")


def _loop(trainer: daskps.Trainer, part: Any) -> dict[str, list[float]]:
    """Return the seconds of a step of each kind, pair by pair."""
    pairs, n, device = part
    steps = Steps(trainer, device)
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(pairs):
        for kind, times in found.items():
            times.append(seconds(partial(getattr(steps, kind), n)) / n)
    return found


@cache
def _computed(length: float, device: bool, shapes: tuple[Any, ...]) -> Any:
    grads = {name: np.full(shape, 1e-9, "f4") for name, shape in shapes}
    return Computation(length, device), grads


def _gradient(params: Any, X: Any, y: Any, *, length: float, device: bool) -> Any:
    shapes = tuple((name, a.shape) for name, a in params.items())
    compute, grads = _computed(length, device, shapes)
    compute()
    return grads


def _store(client: Client, mib: int) -> Any:
    """Return a store on the worker on which a single trainer does not run."""
    _, servers = clusters.places(client, 1, 1)
    spec = daskps.ArraySpec((mib * 2**18 // LAYERS,), "float32")
    params = {f"w{i}": spec for i in range(LAYERS)}
    return daskps.create(params, optimizer=optim.SGD(0.1), servers=servers)


def _trained(store: Any, n: int, ahead: str, how: dict[str, Any]) -> float:
    """Return the seconds of a step of `train`, once it is warm."""
    with clusters.configured({"daskps.double-buffer": ahead}):
        result = daskps.train(store, epochs=4, trainers=1, callbacks=(), **how)
    shortest: float = min(epoch.seconds / n for epoch in result.history[1:])
    return shortest


def _ahead(store: Any, length: float, options: Namespace) -> Job:
    """Return steps of `train` with and without parameters that are read ahead."""
    n = options.steps
    work = partial(_gradient, length=length, device=options.device)
    how = {"gradient": work, "X": np.zeros((n, 1)), "sync": "asp", "batch_size": 1}
    sides = {
        ahead: partial(_trained, store, n, ahead, how)
        for ahead in ("parameters", "none")
    }
    return Job("asp, train, double-buffer", sides)


@benchmark(
    "overlap",
    "steps whose transfer and computation overlap",
    number("--mib", 16, "of the model"),
    number("--steps", 5, "of one side"),
    switch("--device", "wait, as for an accelerator"),
    pairs=15,
)
def overlap(options: Namespace) -> Iterator[Job]:
    """Yield steps that overlap beside the same in a row."""
    # Or the other threads of a matrix product would be what is measured.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    part = options.pairs, options.steps, options.device
    with (
        clusters.local(2, close=clusters.CARRIERS) as client,
        _store(client, options.mib) as store,
    ):
        [found] = daskps.run(store, _loop, [part], callbacks=())
        both = zip(found["compute"], found["exchange"], strict=True)
        found["ideal: the longer of the two"] = [max(pair) for pair in both]
        row = found.pop("in_a_row")
        for name, took in found.items():
            # They were taken in turn, in the one trainer.
            sides = {
                side: partial(next, iter(each))
                for side, each in ((name, took), ("in a row", row))
            }
            yield Job(f"bsp, {name}", sides)
        yield _ahead(store, statistics.median(found["exchange"]), options)
