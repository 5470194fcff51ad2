"""The limit: processes that act on one shared segment themselves.

No store, no messages: a pull is a copy out of the segment, a push the kernel of the
update rule in place, without a lock. A round fills mailboxes; whoever fills the last
one of a shard applies their sum to its other buffer, and all copy that out.
"""

from __future__ import annotations

import fcntl
import functools
import os
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import config, optim
from tests.benchmarks.jobs import LEARNING_RATE, PAST_NBYTES, cuts, started
from tests.benchmarks.peers import Peer, gang

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from daskps.typing import Array
    from tests.benchmarks.jobs import Measure, StepJob

#: Elements that are summed and applied at a time: they stay in a core's cache.
_BLOCK = 262_144
#: Polls for a round before the first sleep: nobody else needs the core.
_SPINS = 500


PEER = Peer("limit: shared memory", lambda n, *_: gang.launched("limit", n))


def sgd(share: float = 1.0) -> Callable[[Array, Array], None]:
    """Return a function that applies a gradient, weighed, in place."""
    bound = _bound(share)
    scalars = bound.scalars(1)
    bound.kernel.warm()
    return lambda w, g: bound.inplace(w, g, (), scalars)


def _bound(share: float) -> optim.Bound:
    cache = str(config.load().cache)
    return optim.bind(optim.SGD(LEARNING_RATE * share), "float32", cache_dir=cache)


class ServedSlice:
    """A slice of the model that a server holds, for systems without a kernel."""

    def __init__(self, elements: int, trainers: int) -> None:
        self.weights = started(elements)
        self.apply, self.apply_mean = sgd(), sgd(1 / trainers)

    def pull(self) -> Array:
        """Return the weights as they are."""
        return self.weights

    def push(self, gradient: Array) -> None:
        """Apply a gradient."""
        self.apply(self.weights, gradient)


class _Segment:
    """One trainer's side of the shared segment."""

    def __init__(self, place: gang.Place, job: StepJob) -> None:
        n, self._place = job.elements, place
        name = f"{job.kind}-{job.nbytes}"
        file, trainers = place.folder / name, place.trainers
        self._sides = gang.mapped(file, (2, n), np.float32)
        self._mail = gang.mapped(file.with_suffix(".mail"), (trainers, n), np.float32)
        #: Per shard: deliveries so far, and rounds that are complete.
        words = file.with_suffix(".words")
        self._words = gang.mapped(words, (2, job.servers), np.int64)
        self._locks = [
            os.open(place.folder / f"lock-{i}", os.O_RDWR | os.O_CREAT)
            for i in range(job.servers)
        ]
        mean = _bound(1 / place.trainers)
        self._scalars = mean.scalars(1)
        large = job.nbytes >= job.servers * PAST_NBYTES
        self._update = functools.partial(mean.publish, past=large)
        mean.kernel.warm(past=large)
        self._apply = sgd()
        self._cuts = cuts(n, job.servers)
        # Each begins at another shard, so that each completes one.
        self._order = [(place.rank + i) % job.servers for i in range(job.servers)]
        self._sum = np.empty(_BLOCK, np.float32)
        self._now = self._sides[0]
        self.weights, self.gradient = started(n), started(n)

    def pull(self) -> None:
        np.copyto(self.weights, self._now)

    def push(self) -> None:
        self._apply(self._now, self.gradient)

    def round(self) -> None:
        if self._place.trainers == 1:
            self.push()
            self.pull()
            return
        was = int(self._words[1].min())
        for shard in self._order:
            self._deliver(shard, was)
        for shard in self._order:
            gang.wait_until(partial(self._complete, shard, was), _SPINS)
            cut = self._cuts[shard]
            np.copyto(self.weights[cut], self._sides[(was + 1) & 1, cut])

    def _complete(self, shard: int, was: int) -> bool:
        return bool(self._words[1, shard] > was)

    def _deliver(self, shard: int, was: int) -> None:
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


@contextmanager
def joined(place: gang.Place) -> Iterator[Measure]:
    """Do the jobs of one trainer."""
    clocks, sides = gang.Clocks(place), dict[Any, _Segment]()

    def run(job: StepJob, steps: int) -> float:
        if job not in sides:
            sides[job] = _Segment(place, job)
        return gang.measured(job, sides[job], place.rank, steps, barrier=clocks.barrier)

    yield run
