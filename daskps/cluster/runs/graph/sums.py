"""Fetching the contributions of one round for the shards of one host."""

from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from daskps import codecs
from daskps.cluster.caller.far import gather
from daskps.cluster.host.contributions import PartialSum
from daskps.cluster.wire.messages import unpack_array
from daskps.errors import ContributionLostError, StaleGenerationError
from daskps.layout.arrays import compute_dtype
from daskps.reduction import Node, cover, fold, mean, reduce_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.host.contributions import Receipt, RoundId
    from daskps.cluster.runs.graph.context import TaskContext


class Sums:
    """The contributions of one round, from all workers to the shards of one host."""

    def __init__(
        self,
        context: TaskContext,
        place: RoundId,
        shards: Sequence[int],
        receipts: Sequence[Receipt],
    ) -> None:
        self.context, self.place, self.shards = context, place, shards
        self.size = context.work.size
        #: By worker: whose contributions it has, and the nodes it sums them to.
        self.ranks: dict[str, list[int]] = {}
        for receipt in sorted(receipts):
            self.ranks.setdefault(receipt.worker, []).append(receipt.rank)
        absent = set(range(self.size)) - {r.rank for r in receipts}
        self.nodes = {
            w: [(rank, rank + 1) for rank in ranks]
            if callable(context.reduce)
            else cover(set(ranks), absent, self.size)
            for w, ranks in self.ranks.items()
        }

    def fetch(self) -> dict[int, dict[int, Any]]:
        """Return the reduced arrays of each shard, by position of the piece."""
        link = self.context.link
        here = self.context.worker
        far = [w for w in self.ranks if w != here]
        started = link.start(lambda: gather(*map(self._ask, far))) if far else None
        rows = {here: self._here(here)} if here in self.ranks else {}
        if started is not None:
            rows.update(zip(far, started.result(), strict=True))
        return {
            shard: self._reduced(
                [(w, self._opened(shard, rows[w][i])) for w in self.ranks]
            )
            for i, shard in enumerate(self.shards)
        }

    def _opened(self, shard: int, parcels: Sequence[PartialSum]) -> list[Node]:
        layout, empty = self.context.meta.layout, self.context.host.pool.empty
        return [parcel.opened(layout, shard, empty) for parcel in parcels]

    def _here(self, worker: str) -> list[list[PartialSum]]:
        return self.context.host.contributions.sums(
            self.place, self.shards, self.ranks[worker], self.nodes[worker]
        )

    async def _ask(self, worker: str) -> list[list[PartialSum]]:
        try:
            shards = self.context.meta.hosts.get(worker, ())
            async with self.context.shards.far.liveness.over(
                worker, shards, self.place.run
            ):
                rows = await self.context.link.control(
                    worker,
                    "sums",
                    place=astuple(self.place),
                    shards=self.shards,
                    ranks=self.ranks[worker],
                    nodes=self.nodes[worker],
                )
        except (OSError, StaleGenerationError) as error:
            raise ContributionLostError(
                f"worker {worker} went with what it had computed for {self.place}; "
                f"the round is begun anew"
            ) from error
        return [
            [self._unpacked(shard, node) for node in row]
            for shard, row in zip(self.shards, rows, strict=True)
        ]

    def _unpacked(
        self, shard: int, packed: tuple[str, float, Sequence[Any]]
    ) -> PartialSum:
        name, scale, rows = packed
        codec = codecs.named(name) if name else None
        pieces = self.context.meta.layout.pieces[shard]
        arrays = {}
        for p, _, data in rows:
            numbers = compute_dtype(pieces[p].parameter.dtype)
            arrays[p] = unpack_array(data, codec.dtype if codec else numbers)
        return PartialSum((arrays, {p: weight for p, weight, _ in rows}), codec, scale)

    def _reduced(self, rows: Sequence[tuple[str, list[Node]]]) -> dict[int, Any]:
        reduce = self.context.reduce
        found = {
            span: node
            for worker, nodes in rows
            for span, node in zip(self.nodes[worker], nodes, strict=True)
        }
        if callable(reduce):
            return reduce_all(
                {lo: n for (lo, _), n in found.items()}, self.size, reduce
            )
        empty = self.context.host.pool.empty
        total = fold(found, 0, self.size, empty) or ({}, {})
        return mean(total, empty) if reduce == "mean" else total[0]
