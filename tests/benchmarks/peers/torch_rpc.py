"""torch.distributed.rpc: functions called on the servers, by TensorPipe.

A round is a push, a barrier of the trainers and a pull. Without servers of their own
the trainers' processes hold the model, a slice each.
"""

from __future__ import annotations

import functools
import threading
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.benchmarks.jobs import cuts, started
from tests.benchmarks.peers import Peer, gang, lacking
from tests.benchmarks.peers.limit import sgd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from tests.benchmarks.jobs import Measure, StepJob


#: In a server: its slice of the model of each job; threads change one after the other.
_HELD: dict[StepJob, Any] = {}
_LOCK = threading.Lock()
_applied = functools.cache(sgd)


def _weights(job: StepJob, index: int) -> Any:
    with _LOCK:
        if job not in _HELD:
            cut = cuts(job.elements, job.servers)[index]
            _HELD[job] = started(cut.stop - cut.start)
        return _HELD[job]


def _pull(job: StepJob, index: int) -> Any:
    import torch

    return torch.from_numpy(_weights(job, index))


def _push(job: StepJob, index: int, gradient: Any) -> None:
    weights = _weights(job, index)
    with _LOCK:
        _applied()(weights, gradient.numpy())


def _opened(trainers: int, servers: int, *_: Any) -> AbstractContextManager[Measure]:
    environment = {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    return gang.launched("torch_rpc", trainers, servers, environment=environment)


PEER = Peer("torch RPC", _opened, partial(lacking, "torch"))


class _Trainer(gang.SlicedTrainer):
    def __init__(
        self, job: StepJob, barrier: Callable[[], object], servers: Sequence[int]
    ) -> None:
        super().__init__(job, barrier)
        self._servers = servers

    def pull(self) -> None:
        found = [self._call(index, _pull) for index in range(len(self.cuts))]
        for cut, future in zip(self.cuts, found, strict=True):
            np.copyto(self.weights[cut], future.wait().numpy())

    def push(self) -> None:
        parts = [self._tensor[cut] for cut in self.cuts]
        for future in [self._call(i, _push, part) for i, part in enumerate(parts)]:
            future.wait()

    @cached_property
    def _tensor(self) -> Any:
        import torch

        return torch.from_numpy(self.gradient)

    def _call(self, index: int, function: Any, *args: Any) -> Any:
        from torch.distributed import rpc

        name = f"process{self._servers[index]}"
        return rpc.rpc_async(name, function, args=(self.job, index, *args))


@contextmanager
def joined(place: gang.Place) -> Iterator[Measure]:
    """Do the jobs of one process: the first ranks are the trainers."""
    import torch
    from torch.distributed import rpc

    torch.set_num_threads(1)
    size = place.trainers + place.servers
    servers = range(place.trainers if place.servers else 0, size)
    if place.rank in servers:
        _applied()
    rpc.init_rpc(
        f"process{place.rank}",
        rank=place.rank,
        world_size=size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            init_method=(place.folder / "rpc").as_uri()
        ),
    )
    clocks = gang.Clocks(place) if place.rank < place.trainers else None

    def run(job: StepJob, steps: int) -> float:
        if clocks is None:  # its threads answer
            return 0.0
        side = _Trainer(job, clocks.barrier, servers)
        return gang.measured(job, side, place.rank, steps, barrier=side.barrier)

    try:
        yield run
    finally:
        rpc.shutdown(graceful=False)
