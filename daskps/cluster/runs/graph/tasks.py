"""The tasks of graph execution: one gradient per part, one reduction per shard.

A gradient task reads the last complete round, calls the user's function and leaves
what comes out on its worker. A reduction task fetches its own slices of that, whole
subtrees of the rank tree already summed, and has its shards apply them: it is the one
rank of the shards' run. Where a worker has many shards, one is for all of them. Both
may run twice: a read asks for exactly its round, and a shard takes each round once.
"""

from __future__ import annotations

import threading
import time
from dataclasses import astuple, dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import config
from daskps.cluster.caller import routes
from daskps.cluster.caller.client import ShardClient
from daskps.cluster.caller.fetching import Fetch, Fetched, fetch_all
from daskps.cluster.caller.link import task_link
from daskps.cluster.caller.routes import whole
from daskps.cluster.caller.row_routes import IdSplit, RowBatch
from daskps.cluster.caller.shard_map import RunMembership, StoreMap
from daskps.cluster.caller.targets import sizes_of
from daskps.cluster.host.contributions import Contribution, Receipt, contribution
from daskps.cluster.host.node import HOSTS
from daskps.cluster.host.partial_sums import SumsRequest, keep_rows, reduced
from daskps.cluster.protocol.deadline import Deadline
from daskps.cluster.protocol.encoding import round_read, rounded
from daskps.cluster.protocol.packing import unpack_array
from daskps.cluster.runs.portable import sends_errors
from daskps.cluster.upstream import loads
from daskps.errors import ConsistencyError, ContributionLostError, StaleGenerationError
from daskps.reduction import cover
from daskps.shards.steps import NOTHING, Item, Step
from daskps.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from daskps.cluster.caller.link import CallFuture
    from daskps.cluster.caller.routes import Computed
    from daskps.cluster.caller.targets import Target
    from daskps.cluster.host.contributions import RoundId
    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.host.partial_sums import NodeSums
    from daskps.cluster.keys import Anchor
    from daskps.codecs import Codec
    from daskps.layout.arrays import Layout


# It travels with each task; with slots it would be pickled half as fast.
@dataclass(frozen=True)
class Duty:
    """A task's gradient: its rank, its round, and where its data should be."""

    place: RoundId
    rank: int
    #: A worker, "" for any.
    home: str


@sends_errors
def compute_gradient(work: GraphWork, duty: Duty, part: Any, after: Any) -> Receipt:
    """Compute one rank's contribution to a round and leave it on this worker.

    Parameters
    ----------
    work : GraphWork
        The run.
    duty : Duty
        The round and the rank.
    part : object
        The rank's data.
    after : object
        Tokens of the round before: this round begins when that is complete.

    Returns
    -------
    Receipt
        Where the contribution is.
    """
    context, place, rank = _context_of(work), duty.place, duty.rank
    try:
        context.host.contributions.begin(place)
        began = time.monotonic()
        context.read(place)
        read = time.monotonic()
        # Code that takes data from the part may be the user's too.
        with user_code("the trainer"):
            found: Computed = context.stepper(context, part, place, rank)
        computed = time.monotonic()
        kept = context.keep(found)
    except Exception as error:
        if not isinstance(error, ConsistencyError):
            error.add_note(
                f"raised in trainer {rank} of {work.size} at clock {place.round}"
            )
        raise
    context.host.contributions.leave(place, rank, kept)
    return Receipt(
        rank,
        context.worker,
        found.kind if found.arrays or found.of_tables else None,
        found.rows,
        found.loss_sum,
        duty.home not in ("", context.worker),
        kept.row_nbytes,
        context.sizes_of(found, kept),
        (computed - read, read - began),
    )


@sends_errors
def reduce_round(
    work: GraphWork,
    place: RoundId,
    anchors: Sequence[Anchor],
    receipts: Sequence[Receipt],
) -> int:
    """Reduce a round for one shard, or all of a host, and have them apply it.

    Parameters
    ----------
    work : GraphWork
        The run.
    place : RoundId
        The round.
    anchors : sequence of Anchor
        The shards' anchors, which place this task.
    receipts : sequence of Receipt
        Where the contributions are; ranks without one sit the round out.

    Returns
    -------
    int
        The number of the round: a token on which the next one depends.

    Raises
    ------
    ContributionLostError
        When a contribution is gone; the round is begun anew.
    """
    context, shards = _context_of(work), [anchor.shard for anchor in anchors]
    noted = None
    if 0 in shards:
        noted = context.note(place, [*map(tuple, sorted(receipts))])
    # The host that owns them, not the place of an anchor: the step is forwarded.
    found = _reduce_sums(context, place, shards, receipts)
    kinds = {r.kind for r in receipts if r.kind}
    if len(kinds) > 1:
        raise ConsistencyError(
            f"round {place.round} has contributions of kinds {sorted(kinds)}; all "
            f"trainers of a run must send the same kind"
        )
    weighs = sum(r.rows for r in receipts) > 0
    step = context.step(
        kind=kinds.pop() if kinds else NOTHING,
        clock=place.round,
        tick=True,
        sequence=place.round,
        weight=float(weighs),
    )
    if not weighs:
        found = {shard: {} for shard in found}
    arrays = {
        shard: {p: one.data for p, one in of.items() if one.ids is None}
        for shard, of in found.items()
    }
    request = routes.pieces(context.meta, arrays, step)
    request = request._replace(rows=row_batches(context.meta.layout, found))
    if noted is not None:
        # Before the round is applied: of a round that is complete, they are there.
        noted.result()
    deadline = Deadline(None, f"round {place.round} of run {work.run}")
    try:
        context.shards.call(request, deadline)
    except Exception as error:
        if not isinstance(error, ConsistencyError):
            error.add_note(f"raised in the update of round {place.round}")
        raise
    return place.round


def _reduce_sums(
    context: TaskContext,
    place: RoundId,
    shards: Sequence[int],
    receipts: Sequence[Receipt],
) -> dict[int, NodeSums]:
    """Return the sums that a round comes to in some shards, from all workers."""
    size, layout, here = context.work.size, context.meta.layout, context.worker
    asked = [*_asked(context, shards, receipts)]
    remote = [one for one in asked if one.worker != here]
    found: dict[str, list[list[NodeSums]]] = {}

    def sum_here() -> None:
        kept = context.host.contributions
        found.update(
            (here, kept.sums(place, shards, one.ranks, one.nodes))
            for one in asked
            if one.worker == here
        )

    way = context.shards.remote
    came = fetch_all(
        [_fetch_from(context, place, one) for one in remote],
        way.sockets,
        sum_here,
        counters=way.counters,
        store=context.meta.uid,
    )
    for one, fetched in zip(remote, came, strict=True):
        found[one.worker] = one.sums(*fetched)
    sums, empty = {}, context.empty
    for i, shard in enumerate(shards):
        nodes = {
            span: node
            for one in asked
            for span, node in zip(one.nodes, found[one.worker][i], strict=True)
        }
        try:
            pieces, reduce = layout.pieces[shard], context.reduce
            sums[shard] = reduced(nodes, pieces, size, reduce=reduce, empty=empty)
        except Exception as error:
            # As of what a trainer raises: a run may go on after it.
            error.add_note(f"raised in the reduction of round {place.round}")
            raise
    return sums


def _asked(
    context: TaskContext, shards: Sequence[int], receipts: Sequence[Receipt]
) -> Iterator[SumsRequest]:
    """Give each worker that has contributions, and the nodes that it sums them to."""
    size = context.work.size
    absent = set(range(size)) - {receipt.rank for receipt in receipts}
    by_worker: dict[str, list[Receipt]] = {}
    for receipt in sorted(receipts):
        by_worker.setdefault(receipt.worker, []).append(receipt)
    for worker, of in by_worker.items():
        ranks = [receipt.rank for receipt in of]
        nodes = [(rank, rank + 1) for rank in ranks]
        if not callable(context.reduce):
            nodes = cover(set(ranks), absent, size)
        nbytes = sum(receipt.row_nbytes for receipt in of)
        yield SumsRequest(context.meta.layout, worker, shards, nodes, ranks, nbytes)


def _fetch_from(context: TaskContext, place: RoundId, asked: SumsRequest) -> Fetch:
    about = {
        "place": astuple(place),
        "shards": asked.shards,
        "ranks": asked.ranks,
        "nodes": asked.nodes,
    }
    link, worker, empty = context.link, asked.worker, context.empty

    async def ask() -> Fetched:
        held = context.meta.hosts.get(worker, ())
        try:
            async with context.shards.remote.liveness.over(worker, held, place.run):
                said, packed = await link.control(worker, "sums", **about)
        except (OSError, StaleGenerationError) as error:
            raise ContributionLostError(
                f"worker {worker} went with what it had computed for {place}; "
                f"the round is begun anew"
            ) from error
        dtypes = [dtype for dtype, _ in asked.sizes(said)]
        return Fetched(said, [*map(unpack_array, packed, dtypes)])

    return Fetch(
        worker,
        "sums",
        about,
        make=lambda said: [empty(n, dtype) for dtype, n in asked.sizes(said)],
        ask=partial(link.start, ask),
        nbytes=asked.nbytes,
    )


def row_batches(
    layout: Layout, by_shard: Mapping[int, NodeSums]
) -> tuple[RowBatch, ...]:
    """Return the rows that some shards get of each table that a rank has named.

    Parameters
    ----------
    layout : Layout
        The store's layout.
    by_shard : mapping of int to NodeSums
        The sums, by shard: of no rows where a rank has named others of the table.
    """
    found = []
    for table in layout.tables:
        nodes = {
            shard: of[position]
            for shard, of in sorted(by_shard.items())
            if (position := layout.table_position(shard, table.index)) in of
        }
        ids = [node.ids for node in nodes.values() if node.ids is not None]
        if not ids:
            continue
        rows, starts = [node.data for node in nodes.values()], [0]
        for shard in range(layout.n_shards):
            starts.append(
                starts[-1] + (len(nodes[shard].data) if shard in nodes else 0)
            )
        one = len(nodes) == 1
        cut = IdSplit(table, ids[0] if one else np.concatenate(ids), None, starts)
        data = rows[0] if one else np.concatenate(rows)
        found.append(RowBatch(cut, data.reshape(-1)))
    return tuple(found)


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


def _context_of(work: GraphWork) -> TaskContext:
    """Return this thread's context, which goes with the run."""
    kept = HOSTS[task_link().node.address].contributions
    key = ("context", threading.get_ident())
    context: TaskContext = kept.shared(work.run, key, lambda: TaskContext(work))
    return context
