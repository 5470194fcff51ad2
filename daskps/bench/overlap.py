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
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import get_worker

import daskps
from daskps import optim
from daskps.bench import clusters
from daskps.bench.options import number, switch
from daskps.bench.pairs import Comparison, seconds
from daskps.bench.report import line

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence

    from distributed import Client

LAYERS = 4


class Computation:
    """A computation of so many milliseconds, on its own as long as in company."""

    def __init__(self, ms: float, device: bool) -> None:
        self._data, self._out = np.ones(2**15), np.empty(2**15)
        self._ms, self._rounds = ms, 0
        if not device:
            one = min(_milliseconds(self._sine, 20) for _ in range(5))
            self._rounds = max(1, round(ms / one))

    def _sine(self) -> None:
        np.sin(self._data, out=self._out)

    def __call__(self, share: float = 1.0) -> None:
        """Compute a share of it."""
        if not self._rounds:
            time.sleep(self._ms * share / 1e3)
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
        times = [_milliseconds(partial(self.exchange, 1)) for _ in range(9)]
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
            self.trainer.push_async(self.grads)
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
                self.trainer.push_async(grad, tick=place == 0, priority=-place)
            for name in self.names:
                out = {name: self.out[name]}
                coming[name] = self.trainer.pull_async(out=out)
        for future in coming.values():
            future.result()


KINDS = ("compute", "exchange", "in_a_row", "prefetch", "layers")


def _where(trainer: daskps.Trainer, part: Any) -> str:
    address: str = get_worker().address
    return address


def _loop(
    trainer: daskps.Trainer, part: tuple[int, int, bool]
) -> dict[str, list[float]]:
    pairs, n, device = part
    steps = Steps(trainer, device)
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(pairs):
        for kind in KINDS:
            action = partial(getattr(steps, kind), n)
            found[kind].append(_milliseconds(action) / n)
    return found


def _gradient(params: Any, X: Any, y: Any, *, ms: float, device: bool) -> Any:
    kept = _KEPT.get((ms, device))
    if kept is None:
        grads = {name: np.full_like(a, 1e-9) for name, a in params.items()}
        kept = _KEPT[ms, device] = (Computation(ms, device), grads)
    kept[0]()
    return kept[1]


_KEPT: dict[Any, Any] = {}


def _first(params: Any, X: Any, y: Any) -> Any:
    """Return gradients at once: taking the batch is all the work there is."""
    return _gradient(params, X, y, ms=0.0, device=True)


def _train(store: Any, gradient: Any, X: Any, ahead: str, **options: Any) -> float:
    """Return milliseconds of a step of `train`, once it is warm."""
    with clusters.made_ready(ahead):
        result = daskps.train(
            store, gradient, X, epochs=4, trainers=1, callbacks=(), **options
        )
    shortest: float = min(epoch.seconds for epoch in result.history[1:])
    steps: int = len(X) // options["batch_size"]
    return shortest / steps * 1e3


def _compare_train(store: Any, ms: float, options: Any) -> None:
    """Print steps of `train` with and without what it makes ready ahead."""
    n = options.steps
    work = partial(_gradient, ms=ms, device=options.device)
    # A batch of these is as large as the model.
    rows = np.ones((n * 64, options.mib * 2**12), "f4")
    for sync, ahead, gradient, X, size in (
        ("asp", "parameters", work, np.zeros((n, 1)), 1),
        ("bsp", "batches", _first, rows, 64),
    ):
        sides: dict[str, list[float]] = {"none": [], ahead: []}
        for _ in range(options.pairs):
            for side, times in sides.items():
                step = _train(store, gradient, X, side, batch_size=size, sync=sync)
                times.append(step)
        print(_summary(f"{sync}, train, {ahead}", sides["none"], sides[ahead]))


def _store(client: Client, mib: int) -> Any:
    """Return a store on the worker on which a single trainer does not run."""
    with daskps.create({"w": np.zeros(1)}) as probe:
        [trainer] = daskps.run(probe, _where, [None], callbacks=())
    [server] = set(client.nthreads()) - {trainer}
    spec = daskps.ArraySpec((mib * 2**18 // LAYERS,), "float32")
    params = {f"w{i}": spec for i in range(LAYERS)}
    return daskps.create(params, optimizer=optim.SGD(0.1), servers=[server])


def _milliseconds(action: Callable[[], object], n: int = 1) -> float:
    return 1e3 * seconds(action, n)


def _summary(name: str, row: Sequence[float], ours: Sequence[float]) -> str:
    """Return a line of milliseconds: as it is named, beside the same in a row."""
    a, b = (tuple(ms / 1e3 for ms in side) for side in (ours, row))
    return line(Comparison(name, "in a row", a, b))


OPTIONS = (
    number("--mib", 16, "of the model"),
    number("--pairs", 15),
    number("--steps", 5, "of one side"),
    switch("--device", "wait, as for an accelerator"),
)


def run(options: Namespace) -> None:
    """Measure and print."""
    n, device = options.steps, options.device
    # Or the other threads of a matrix product would be what is measured.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with clusters.local(2, close=clusters.WAYS) as client:
        store = _store(client, options.mib)
        [found] = daskps.run(store, _loop, [(options.pairs, n, device)], callbacks=())
        ideal = [max(p) for p in zip(found["compute"], found["exchange"], strict=True)]
        alone = {kind: statistics.median(found[kind]) for kind in KINDS}
        print(
            f"{options.mib} MiB: computation {alone['compute']:.1f} ms, exchange "
            f"{alone['exchange']:.1f} ms\n{'':<34}{'in a row':>9}{'overlaps':>9}"
        )
        for name, kind in (
            ("ideal: the longer of the two", ideal),
            ("bsp, push_async and prefetch", found["prefetch"]),
            ("bsp, layer by layer", found["layers"]),
        ):
            print(_summary(name, found["in_a_row"], kind))
        _compare_train(store, alone["exchange"], options)
