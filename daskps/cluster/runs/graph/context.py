"""The state that a thread of a worker keeps for the graph tasks of one run."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import config
from daskps.cluster.caller import routes
from daskps.cluster.caller.client import ShardClient
from daskps.cluster.caller.link import task_link
from daskps.cluster.caller.routes import whole
from daskps.cluster.caller.shard_map import RunMembership, StoreMap
from daskps.cluster.caller.targets import sizes_of
from daskps.cluster.host.contributions import Contribution, contribution
from daskps.cluster.host.node import HOSTS
from daskps.cluster.host.partial_sums import keep_rows
from daskps.cluster.upstream import loads
from daskps.cluster.wire.deadline import Deadline
from daskps.cluster.wire.encoding import round_read, rounded
from daskps.shards.steps import Item, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.cluster.caller.call_future import CallFuture
    from daskps.cluster.caller.routes import Computed
    from daskps.cluster.caller.targets import Target
    from daskps.cluster.host.contributions import RoundId
    from daskps.cluster.host.host import ShardHost
    from daskps.codecs import Codec


@dataclass(frozen=True)
class GraphWork:
    """The facts that all tasks of a run have in common; travels to each worker once."""

    uid: str
    run: int
    #: Number of parts P.
    size: int
    reduce: bytes
    #: Pickled function of the store's `StoreMap` that makes a `Stepper`.
    body: bytes
    codec: Codec | None = None
    #: How pulled weights travel.
    read_codec: Codec | None = None


class TaskContext:
    """All that one thread of a worker needs for the tasks of a run."""

    def __init__(self, work: GraphWork) -> None:
        self.work = work
        self.link = task_link()
        self.worker: str = self.link.node.address
        self.host: ShardHost = HOSTS[self.worker]
        self.meta: StoreMap = self.shared("meta", self._find)
        joined = RunMembership(work.run, work.size)
        self.shards = ShardClient(self.link, self.meta, joined, rank=0, bsp=True)
        self.reduce = loads(work.reduce)
        #: Makes memory that is used again.
        self.empty = self.host.pool.empty
        self._finite = config.load().check_finite
        self._weights: Weights = self.shared("weights", lambda: Weights(self.meta))

    def shared(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what the run's tasks share on this worker, made the first time."""
        return self.host.contributions.shared(self.work.run, key, make)

    def _find(self) -> StoreMap:
        find = self.link.directory("find", uid=self.work.uid)
        return StoreMap(self.link.run(lambda: find))

    @cached_property
    def stepper(self) -> Any:
        """Calls the user's functions, with buffers of its own for each thread."""
        return loads(self.work.body)(self.meta)

    def own(self, rank: int) -> Any:
        """Return the copy of the user's functions that a rank has on this worker.

        State that they keep between calls is the rank's, whichever thread runs it.
        """
        return self.shared(("own", rank), partial(loads, self.work.body))

    def read(self, place: RoundId) -> None:
        """Read the round before a place into the stepper's buffers."""
        self._weights.copy_to(self.stepper.target, place, partial(self._read, place))

    def _read(self, place: RoundId, target: Target) -> None:
        request = routes.read(self.meta, target, None, self.step(clock=place.round))
        what = f"the pull for round {place.round} of run {place.run}"
        codec = self.work.read_codec
        if codec is not None:
            request = request._replace(read_codec=codec.name)
        self.shards.pull(request, Deadline(None, what))
        if codec is not None:
            round_read(codec, target.flats, self.empty)

    def read_rows(self, place: RoundId, targets: Sequence[Target]) -> None:
        """Read rows of the round before a place, by one call after the other."""
        for target in targets:
            self._read(place, target)

    def keep(self, found: Computed) -> Contribution:
        """Return what a rank delivers as it is kept; the arrays stay the caller's.

        Raises
        ------
        PushRejectedError
            If one of them is too large for the run's codec.
        """
        layout, codec, empty = self.meta.layout, self.work.codec, self.empty
        weight, arrays = float(found.rows), found.arrays
        scale = weight if self.reduce == "mean" else 1.0
        if codec is not None:
            words = rounded(layout, arrays, codec, finite=self._finite, empty=empty)
            return Contribution(layout, weight, words, codec, scale)
        rows = {}
        for (table, ids, at, starts), data, _ in found.of_tables:
            item = Item(0, 0, data, ids, at)
            kept = keep_rows(table, item, starts, scale=scale, empty=empty)
            rows[table.index] = kept
        return contribution(layout, arrays, weight, scale, rows=rows, empty=empty)

    def sizes_of(
        self, found: Computed, kept: Contribution
    ) -> tuple[int, int, int, int]:
        """Return bytes delivered and read, each as numbers and in words of codecs."""
        sent = sum(array.nbytes for array in found.arrays.values())
        sent += sum(one.data.nbytes for one in found.of_tables)
        stepper, in_words = self.stepper, self.work.read_codec is not None
        rows = [stepper.params[name] for name in stepper.ids]
        read = sizes_of([*stepper.target.flats, *rows], in_words=in_words)
        return sent, sent if kept.codec is None else kept.nbytes, *read

    def note(self, place: RoundId, receipts: Sequence[Any]) -> CallFuture[None]:
        """Begin to leave the receipts of a round with the directory.

        It outlives all workers. Returns what is done when they are there.
        """
        about = {"run": place.run, "number": place.round, "receipts": receipts}
        return self.link.start(lambda: self.link.directory("note", **about))

    def step(self, **said: Any) -> Step:
        """Return what the run's one rank says."""
        return Step(run=self.work.run, rank=0, **said)


class Weights:
    """The parameters of one round, read once per worker for all its threads."""

    def __init__(self, meta: StoreMap) -> None:
        self._lock = threading.Lock()
        self._target = whole(meta)
        self._place: RoundId | None = None

    def copy_to(
        self, target: Target, place: RoundId, read: Callable[[Target], None]
    ) -> None:
        """Fill `target` with a round, which `read` is called for the first time.

        Under the lock also the copy: a task that was given up long ago must not
        read while another one fills the buffer with its round.
        """
        with self._lock:
            if self._place != place:
                self._place = None
                read(self._target)
                self._place = place
            for out, value in zip(target.flats, self._target.flats, strict=True):
                np.copyto(out, value)


def context_of(work: GraphWork) -> TaskContext:
    """Return this thread's context, which goes with the run."""
    kept = HOSTS[task_link().node.address].contributions
    key = ("context", threading.get_ident())
    context: TaskContext = kept.shared(work.run, key, lambda: TaskContext(work))
    return context
