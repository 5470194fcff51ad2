"""The bare peer: Dask RPC handlers that do the same work and nothing else."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import get_worker
from distributed.protocol.serialize import to_serialize
from distributed.utils import sync

from daskps import kernels, optim
from tests.benchmarks.jobs import PAST_NBYTES

if TYPE_CHECKING:
    from daskps.typing import Array


class BareHandlers:
    """What a hand-written server of one array would do."""

    def __init__(self, n: int) -> None:
        self.sides = [np.zeros(n, "f4"), np.zeros(n, "f4")]
        self.flip = 0
        self.sgd = optim.bind(optim.SGD(0.1), "float32")
        # As a shard of this size does.
        past = 4 * n >= PAST_NBYTES
        self._update = functools.partial(self.sgd.publish, past=past)
        self.sgd.kernel.warm(past=past)

    async def echo(self, data: bytes) -> dict[str, Any]:
        """Answer with as many bytes."""
        return {"status": "OK", "data": data}

    async def push(self, data: Array, work: bool) -> dict[str, Any]:
        """Take a gradient; with `work` check it and apply it to the other buffer."""
        if work:
            now, then = self.sides[self.flip & 1], self.sides[1 - self.flip & 1]
            if not kernels.finite(data):
                raise ValueError("not finite")
            self._update(now, then, data, (), self.sgd.scalars(1))
            self.flip += 1
        return {"status": "OK"}

    async def pull(self, work: bool) -> dict[str, Any]:
        """Send the weights; with `work` a copy, since an update may come meanwhile."""
        now = self.sides[self.flip & 1]
        return {"status": "OK", "data": to_serialize(now.copy() if work else now)}


def install(n: int, dask_worker: Any) -> None:
    """Give a worker the bare handlers."""
    handlers = BareHandlers(n)
    for name in ("echo", "push", "pull"):
        dask_worker.handlers[f"bare_{name}"] = getattr(handlers, name)


def call(peer: str, method: str, **kwargs: Any) -> Any:
    """Make one bare round trip from a task's thread."""
    worker: Any = get_worker()

    async def send() -> Any:
        return await getattr(worker.rpc(peer), f"bare_{method}")(**kwargs)

    return sync(worker.loop, send)
