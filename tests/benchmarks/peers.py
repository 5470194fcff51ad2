"""Other systems that do the jobs of trainers, in the same worker processes as ours.

The limit acts on memory that all processes map: no store, no messages. A pull is a copy out
of it, a push the kernel of the update rule in place, without a lock. A round fills
mailboxes; whoever fills the last one of a shard applies their sum to its other buffer, and
all copy that out. With gloo there is no server: a round is the allreduce of the gradients,
and in training each process then applies the mean.
"""

from __future__ import annotations

import fcntl
import importlib.util
import math
import os
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import config, optim
from tests.benchmarks import clusters
from tests.benchmarks.jobs import LEARNING_RATE, PAST_NBYTES, StepJob, cuts, started
from tests.benchmarks.samples import LeftOutError, timed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distributed import Client

    from daskps.typing import Array

LIMIT, GLOO = "limit: shared memory", "torch gloo allreduce"
#: Elements that are summed and applied at a time: they stay in a core's cache.
_BLOCK = 262_144
#: Polls before the first sleep, for the start of a sample and in a round, and the sleep.
_SPINS, _SPINS_OF_ROUNDS, _NAP_SECONDS = 50, 500, 20e-6


@dataclass(frozen=True)
class Place:
    """A process among those of its job."""

    rank: int
    trainers: int
    folder: Path

    def mapped(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an array that all of them map; zeros at first."""
        path = self.folder / name
        with path.open("ab") as file:
            os.truncate(file.fileno(), math.prod(shape) * np.dtype(dtype).itemsize)
        # Not the memmap itself: its `__array_finalize__` makes every slice slower.
        return np.memmap(path, dtype, "r+", shape=shape).view(np.ndarray)

    def meet(self) -> None:
        """Wait until all of them have come here as often."""
        words = self.mapped("clocks", (self.trainers,), np.int64)
        words[self.rank] += 1
        mine = int(words[self.rank])
        wait_until(lambda: bool((words >= mine).all()))


def wait_until(condition: Callable[[], bool], spins: int = _SPINS) -> None:
    """Poll, at first without sleeping in between."""
    for _ in range(spins):
        if condition():
            return
    while not condition():
        time.sleep(_NAP_SECONDS)


def covers(peer: str, job: StepJob) -> bool:
    """Tell whether a peer does a job: gloo makes rounds of two and more."""
    return peer == LIMIT or (job.kind in ("round", "train") and job.trainers > 1)


@contextmanager
def opened(client: Client, peer: str, job: Any) -> Iterator[Callable[[int], float]]:
    """Give what measures steps of a job by a peer, in the workers that train."""
    trainers, _ = clusters.places(client, job.trainers, job.servers)
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="daskps-measured-", dir=shared) as folder:

        def measure(steps: int) -> float:
            if peer == GLOO and importlib.util.find_spec("torch") is None:
                raise LeftOutError("torch is not installed")
            work = partial(_steps, peer, job, len(trainers), Path(folder), steps)
            return float(max(clusters.at_once(client, trainers, work)))

        try:
            yield measure
        finally:
            clusters.at_once(client, trainers, _leave)


def _steps(
    peer: str, job: Any, trainers: int, folder: Path, steps: int, rank: int
) -> float:
    place = Place(rank, trainers, folder)
    act = job.step(_side(peer, job, place), rank)
    place.meet()
    return timed(act, steps, getattr(job, "clock", time.perf_counter))


@lru_cache(maxsize=1)
def _side(peer: str, job: Any, place: Place) -> Any:
    if peer == GLOO:
        return Gloo(job, place)
    if isinstance(job, StepJob):
        return LimitTrainer(job, place)
    return job.limit(place)


def _leave(rank: int) -> None:
    _side.cache_clear()
    if "torch" in sys.modules:
        from torch import distributed

        if distributed.is_initialized():
            distributed.destroy_process_group()


def _bound(share: float) -> optim.Bound:
    cache = str(config.load().cache)
    return optim.bind(optim.SGD(LEARNING_RATE * share), "float32", cache_dir=cache)


def sgd(share: float = 1.0) -> Callable[[Array, Array], None]:
    """Return a function that applies a gradient, weighed, in place."""
    bound = _bound(share)
    scalars = bound.scalars(1)
    bound.kernel.warm()
    return lambda w, g: bound.inplace(w, g, (), scalars)


class LimitTrainer:
    """One trainer's side of the shared memory."""

    def __init__(self, job: StepJob, place: Place) -> None:
        n, self._place = job.elements, place
        name, trainers = f"{job.kind}-{job.nbytes}", place.trainers
        self._sides = place.mapped(name, (2, n), np.float32)
        self._mail = place.mapped(f"{name}.mail", (trainers, n), np.float32)
        #: Per shard: deliveries so far, and rounds that are complete.
        self._words = place.mapped(f"{name}.words", (2, job.servers), np.int64)
        self._locks = [
            (place.folder / f"lock-{i}").open("wb") for i in range(job.servers)
        ]
        mean, past = _bound(1 / trainers), job.nbytes >= job.servers * PAST_NBYTES
        self._scalars = mean.scalars(1)
        self._update = partial(mean.publish, past=past)
        mean.kernel.warm(past=past)
        self._apply = sgd()
        self._cuts = cuts(n, job.servers)
        # Each begins at another shard, so that each completes one.
        self._order = [(place.rank + i) % job.servers for i in range(job.servers)]
        self._sum = np.empty(_BLOCK, np.float32)
        self.weights, self.gradient = started(n), started(n)

    def pull(self) -> None:
        """Copy the weights out."""
        np.copyto(self.weights, self._sides[0])

    def push(self) -> None:
        """Apply the gradient in place."""
        self._apply(self._sides[0], self.gradient)

    def round(self) -> None:
        """Deliver, wait for the others, copy the new weights out."""
        if self._place.trainers == 1:
            self.push()
            self.pull()
            return
        was = int(self._words[1].min())
        for shard in self._order:
            self.deliver(shard, was)
        for shard in self._order:
            wait_until(partial(self.is_complete, shard, was), _SPINS_OF_ROUNDS)
            cut = self._cuts[shard]
            np.copyto(self.weights[cut], self._sides[(was + 1) & 1, cut])

    def is_complete(self, shard: int, was: int) -> bool:
        """Tell whether a round after so many is."""
        return bool(self._words[1, shard] > was)

    def deliver(self, shard: int, was: int) -> None:
        """Put the gradient into the own mailbox; publish if all are full."""
        cut = self._cuts[shard]
        np.copyto(self._mail[self._place.rank, cut], self.gradient[cut])
        fcntl.lockf(self._locks[shard], fcntl.LOCK_EX)
        self._words[0, shard] += 1
        is_last = self._words[0, shard] == (was + 1) * self._place.trainers
        fcntl.lockf(self._locks[shard], fcntl.LOCK_UN)
        if is_last:
            self._publish(cut, was)
            self._words[1, shard] = was + 1

    def _publish(self, cut: slice, was: int) -> None:
        old, new = self._sides[was & 1], self._sides[(was + 1) & 1]
        for begin in range(cut.start, cut.stop, _BLOCK):
            at = slice(begin, min(begin + _BLOCK, cut.stop))
            total = self._sum[: at.stop - at.start]
            np.add(self._mail[0, at], self._mail[1, at], out=total)
            for more in self._mail[2:]:
                total += more[at]
            self._update(old[at], new[at], total, (), self._scalars)


class Gloo:
    """One process of an allreduce by torch, over loopback."""

    def __init__(self, job: StepJob, place: Place) -> None:
        from torch import distributed, from_numpy, set_num_threads

        set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        if distributed.is_initialized():
            distributed.destroy_process_group()
        rendezvous = place.folder / f"gloo-{job.kind}-{job.nbytes}"
        distributed.init_process_group(
            "gloo",
            init_method=rendezvous.as_uri(),
            rank=place.rank,
            world_size=place.trainers,
        )
        self.weights, self.gradient = started(job.elements), started(job.elements)
        shared = from_numpy(self.gradient)
        self._sum_up = partial(distributed.all_reduce, shared)
        self._apply = sgd(1 / place.trainers) if job.kind == "train" else None

    def round(self) -> None:
        """Sum the gradients up; apply the mean where it trains."""
        if self._apply is None:
            self.gradient[0] = 1e-3  # else the sums of sums overflow
        self._sum_up()
        if self._apply is not None:
            self._apply(self.weights, self.gradient)
