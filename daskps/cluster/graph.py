"""The tasks of graph execution: one gradient per part, one reduction per host.

A gradient task reads the last complete round, calls the user's function and leaves
what comes out on its worker. A reduction task fetches its own slices of that, whole
subtrees of the rank tree already summed, and has its shards apply them: it is the one
rank of the shards' run. Both may run twice: a read asks for exactly its round, and a
shard takes each round once.
"""

from __future__ import annotations

import threading
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from distributed import get_worker

from daskps.cluster import plans
from daskps.cluster.client import ShardClient, gather
from daskps.cluster.contributions import Place, contribution
from daskps.cluster.host import HOSTS, ShardHost
from daskps.cluster.link import link_of
from daskps.cluster.messages import Call, Part, unpack_array
from daskps.cluster.meta import Meta
from daskps.cluster.upstream import loads
from daskps.errors import ConsistencyError, ContributionLostError
from daskps.layout import compute_dtype
from daskps.reduction import Node, Tree, cover, mean, reduce_all
from daskps.shards.base import NOTHING, Item

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.plans import Delivery, Target


@dataclass(frozen=True)
class Work:
    """What all tasks of one run have in common; travels to each worker once."""

    uid: str
    run: int
    #: Number of parts P.
    size: int
    reduce: bytes
    #: Pickled function of the store's `Meta` that makes a `Stepper`.
    body: bytes


@dataclass(frozen=True, slots=True)
class Duty:
    """Whose gradient a task computes, for which round, and where its data should be."""

    place: Place
    rank: int
    home: str


@dataclass(frozen=True, slots=True)
class Reduction:
    """Which round a task reduces for which shards, all of one host."""

    place: Place
    shards: tuple[int, ...]


class Receipt(NamedTuple):
    """What a gradient task returns: where its contribution lies, and its loss."""

    rank: int
    worker: str
    #: What was delivered, None for no array at all.
    kind: str | None
    rows: int
    loss_sum: float | None
    #: Whether the part was not where it ran.
    moved: bool


class _Desk:
    """What one thread of a worker needs for the tasks of a run."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.link = link_of(get_worker())
        self.worker: str = self.link.node.address
        self.host: ShardHost = HOSTS[self.worker]
        meta = self.host.contributions.shared(work.run, "meta", self._find)
        self.meta: Meta = meta
        self.shards = ShardClient(self.link, meta)
        self.reduce = loads(work.reduce)
        self._stepper: Any = None

    def _find(self) -> Meta:
        find = self.link.directory("find", uid=self.work.uid)
        return Meta(self.link.run(lambda: find))

    @property
    def stepper(self) -> Any:
        """The user's function with its buffers, a copy of its own for each thread."""
        if self._stepper is None:
            self._stepper = loads(self.work.body)(self.meta)
        return self._stepper

    def call(self, **head: Any) -> Call:
        return Call(self.work.uid, (), run=self.work.run, rank=0, **head)


def _desk(work: Work) -> _Desk:
    """Return this thread's desk, which goes with the run."""
    kept = HOSTS[get_worker().address].contributions
    key = ("desk", threading.get_ident())
    desk: _Desk = kept.shared(work.run, key, lambda: _Desk(work))
    return desk


def compute_gradient(work: Work, duty: Duty, part: Any, after: Any) -> Receipt:
    """Compute one rank's contribution to a round and leave it on this worker.

    Parameters
    ----------
    work : Work
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
    desk = _desk(work)
    place, rank = duty.place, duty.rank
    try:
        target: Target = desk.stepper.target
        plan = plans.read(desk.meta, target, None, desk.call(clock=place.round))
        what = f"the pull of rank {rank} for round {place.round}"
        desk.shards.call(plan.calls, plan.outs, None, what)
        shared = desk.host.contributions
        found: Delivery = desk.stepper(
            part,
            rank,
            place.round,
            lambda key, make: shared.shared(work.run, key, make),
        )
    except Exception as error:
        if not isinstance(error, ConsistencyError):
            error.add_note(
                f"raised in trainer {rank} of {work.size} at clock {place.round}"
            )
        raise
    kept = contribution(desk.meta.layout, found.arrays, float(found.rows), desk.reduce)
    desk.host.contributions.leave(place, rank, kept)
    return Receipt(
        rank,
        desk.worker,
        found.kind if found.arrays else None,
        found.rows,
        found.loss_sum,
        duty.home not in ("", desk.worker),
    )


def reduce_round(
    work: Work, duty: Reduction, anchors: Any, receipts: Sequence[Receipt]
) -> list[Receipt]:
    """Reduce a round for the shards of one host and have them apply it.

    Parameters
    ----------
    work : Work
        The run.
    duty : Reduction
        The round and the shards.
    anchors : object
        Their anchors, which place this task.
    receipts : sequence of Receipt
        Where the contributions are; ranks without one sit the round out.

    Returns
    -------
    list of Receipt
        The receipts, in rank order: what the client learns of the round.

    Raises
    ------
    ContributionLostError
        When a contribution is gone; the round is begun anew.
    """
    desk, place = _desk(work), duty.place
    # The host that owns them, not the place of an anchor: the step is forwarded.
    found = _Sums(desk, duty, receipts).fetch()
    kinds = {r.kind for r in receipts if r.kind}
    if len(kinds) > 1:
        raise ConsistencyError(
            f"round {place.round} has contributions of kinds {sorted(kinds)}; all "
            f"trainers of a run must send the same kind"
        )
    weighs = sum(r.rows for r in receipts) > 0
    parts = {
        shard: Part(
            shard,
            items=tuple(Item(p, 0, a) for p, a in arrays.items()) if weighs else (),
        )
        for shard, arrays in found.items()
    }
    call = desk.call(
        kind=kinds.pop() if kinds else NOTHING,
        clock=place.round,
        tick=True,
        sequence=place.round,
        weight=float(weighs),
    )
    calls = plans.by_host(desk.meta, parts, call)
    desk.shards.call(calls, {}, None, f"round {place.round} of run {work.run}")
    return sorted(receipts)


class _Sums:
    """The contributions of one round, from all workers to the shards of one host."""

    def __init__(
        self, desk: _Desk, duty: Reduction, receipts: Sequence[Receipt]
    ) -> None:
        self.desk, self.place, self.shards = desk, duty.place, duty.shards
        self.size = desk.work.size
        self.ranks: dict[str, list[int]] = {}
        for receipt in sorted(receipts):
            self.ranks.setdefault(receipt.worker, []).append(receipt.rank)
        delivering = {r.rank for r in receipts}
        self.absent = set(range(self.size)) - delivering
        self.nodes = {w: self._nodes(ranks) for w, ranks in self.ranks.items()}

    def _nodes(self, ranks: Sequence[int]) -> list[tuple[int, int]]:
        if callable(self.desk.reduce):
            return [(rank, rank + 1) for rank in ranks]
        return cover(set(ranks), self.absent, self.size)

    def fetch(self) -> dict[int, dict[int, Any]]:
        """Return the reduced arrays of each shard, by position of the piece."""
        link = self.desk.link
        here = self.desk.worker
        far = [w for w in self.ranks if w != here]
        started = link.start(lambda: gather(*map(self._ask, far))) if far else None
        rows = {here: self._here(here)} if here in self.ranks else {}
        if started is not None:
            rows.update(zip(far, started.result(), strict=True))
        return {
            shard: self._reduced([(w, rows[w][i]) for w in self.ranks])
            for i, shard in enumerate(self.shards)
        }

    def _here(self, worker: str) -> list[list[Node]]:
        return self.desk.host.contributions.sums(
            self.place, self.shards, self.ranks[worker], self.nodes[worker]
        )

    async def _ask(self, worker: str) -> list[list[Node]]:
        try:
            async with self.desk.shards.watching(worker, self.place.run):
                rows = await self.desk.link.control(
                    worker,
                    "sums",
                    place=astuple(self.place),
                    shards=list(self.shards),
                    ranks=self.ranks[worker],
                    nodes=self.nodes[worker],
                )
        except OSError as error:
            raise ContributionLostError(
                f"worker {worker} went with what it had computed for {self.place}; "
                f"the round is begun anew"
            ) from error
        return [
            [self._unpacked(shard, node) for node in row]
            for shard, row in zip(self.shards, rows, strict=True)
        ]

    def _unpacked(self, shard: int, packed: Sequence[tuple[int, float, Any]]) -> Node:
        pieces = self.desk.meta.layout.pieces[shard]
        arrays = {
            p: unpack_array(data, compute_dtype(pieces[p].parameter.dtype))
            for p, _, data in packed
        }
        return arrays, {p: weight for p, weight, _ in packed}

    def _reduced(self, rows: Sequence[tuple[str, list[Node]]]) -> dict[int, Any]:
        reduce = self.desk.reduce
        pairs = [
            (*span, node)
            for worker, nodes in rows
            for span, node in zip(self.nodes[worker], nodes, strict=True)
        ]
        if callable(reduce):
            return reduce_all({lo: node for lo, _, node in pairs}, self.size, reduce)
        tree = Tree(self.size)
        for lo, hi, node in pairs:
            tree.put_sum(lo, hi, node)
        covered = {r for lo, hi, _ in pairs for r in range(lo, hi)}
        for rank in self.absent - covered:
            tree.put(rank, None)
        return mean(tree.root()) if reduce == "mean" else tree.root()[0]
