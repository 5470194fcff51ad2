"""The workers of a group, and the place of the one that a program runs in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.compat.launch import here
from daskps.compat.singa.net import check_net, cut, params_of
from daskps.store.arguments import whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.compat.singa.worker import Worker
    from daskps.typing import Array

SYSTEM = "singa"


class Grouped:
    """The part of a group that knows its workers.

    Parameters
    ----------
    net, n_workers, batch, sync_freq, warmup_steps
        As of :class:`daskps.compat.singa.WorkerGroup`.
    """

    def __init__(
        self,
        net: Sequence[Any],
        n_workers: int,
        *,
        batch: int,
        sync_freq: int = 1,
        warmup_steps: int = 0,
    ) -> None:
        self.net = check_net(net)
        self.n_workers = whole(n_workers, "n_workers", least=1)
        self.batch = whole(batch, "batch", least=1)
        self.sync_freq = whole(sync_freq, "sync_freq", least=1)
        self.warmup_steps = whole(warmup_steps, "warmup_steps", least=0)
        self._cuts = cut(self.batch, self.n_workers)
        for layer in self.net:
            if layer.shape and layer.shape[0] != self.batch:
                raise ValueError(
                    f"layer {layer.name!r} has the shape {tuple(layer.shape)}, of which "
                    f"the first number is that of the batch, {self.batch}"
                )
        #: Initial values by name; each layer's are those of all that share them.
        self.params: dict[str, Array] = {}
        for layer in self.net:
            for name, value in params_of(layer).items():
                self.params.setdefault(name, np.array(value))

    def __repr__(self) -> str:
        return (
            f"<daskps.compat.singa.WorkerGroup of {self.n_workers} workers for "
            f"{self.batch} rows>"
        )

    # -- workers and their places ------------------------------------------------

    @property
    def worker_id(self) -> int:
        """Number of this worker in its group, from 0."""
        return here(SYSTEM).rank

    @property
    def rows(self) -> slice:
        """The rows of a batch that are this worker's."""
        return self._cuts[self.worker_id]

    @property
    def owned(self) -> list[str]:
        """Names of the parameters that this worker owns: it puts them."""
        return [n for n in self.params if self._owner(n) == self.worker_id]

    def _owner(self, name: str) -> int:
        return list(self.params).index(name) % self.n_workers

    def _known(self, name: str) -> str:
        if name not in self.params:
            raise ValueError(
                f"the net has no parameter {name!r}; it has {sorted(self.params)}"
            )
        return name

    @property
    def _worker(self) -> Worker:
        worker: Worker = here(SYSTEM).kept[SYSTEM]
        return worker

    def _wanted(self, name: str, version: int | None) -> int:
        if version is None:
            return self._worker.sent(name)
        return whole(version, "min_version", least=0)

    def _shaped(self, name: str, array: Array) -> Array:
        shape = self.params[name].shape
        if array.shape != shape:
            raise ValueError(
                f"parameter {name!r} has shape {shape}, found {array.shape}"
            )
        return array
