"""Fetching the contributions of one round for the shards of one host."""

from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from daskps import codecs
from daskps.cluster.client import gather
from daskps.cluster.contributions import Parcel
from daskps.cluster.messages import unpack_array
from daskps.errors import ContributionLostError, StaleGenerationError
from daskps.layout import compute_dtype
from daskps.reduction import Node, Tree, cover, mean, reduce_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.contributions import Receipt
    from daskps.cluster.desk import Desk
    from daskps.cluster.graph import Reduction


class Sums:
    """The contributions of one round, from all workers to the shards of one host."""

    def __init__(
        self, desk: Desk, duty: Reduction, receipts: Sequence[Receipt]
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
            shard: self._reduced(
                [(w, self._opened(shard, rows[w][i])) for w in self.ranks]
            )
            for i, shard in enumerate(self.shards)
        }

    def _opened(self, shard: int, parcels: Sequence[Parcel]) -> list[Node]:
        layout, empty = self.desk.meta.layout, self.desk.host.scratch.empty
        return [parcel.opened(layout, shard, empty) for parcel in parcels]

    def _here(self, worker: str) -> list[list[Parcel]]:
        return self.desk.host.contributions.sums(
            self.place, self.shards, self.ranks[worker], self.nodes[worker]
        )

    async def _ask(self, worker: str) -> list[list[Parcel]]:
        try:
            shards = self.desk.meta.hosts.get(worker, ())
            async with self.desk.shards.watching(worker, shards, self.place.run):
                rows = await self.desk.link.control(
                    worker,
                    "sums",
                    place=astuple(self.place),
                    shards=list(self.shards),
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

    def _unpacked(self, shard: int, packed: tuple[str, float, Sequence[Any]]) -> Parcel:
        name, scale, rows = packed
        codec = codecs.named(name) if name else None
        pieces = self.desk.meta.layout.pieces[shard]
        arrays = {}
        for p, _, data in rows:
            numbers = compute_dtype(pieces[p].parameter.dtype)
            arrays[p] = unpack_array(data, codec.dtype if codec else numbers)
        return Parcel((arrays, {p: weight for p, weight, _ in rows}), codec, scale)

    def _reduced(self, rows: Sequence[tuple[str, list[Node]]]) -> dict[int, Any]:
        reduce = self.desk.reduce
        pairs = [
            (*span, node)
            for worker, nodes in rows
            for span, node in zip(self.nodes[worker], nodes, strict=True)
        ]
        if callable(reduce):
            return reduce_all({lo: node for lo, _, node in pairs}, self.size, reduce)
        empty = self.desk.host.scratch.empty
        tree = Tree(self.size, empty)
        for lo, hi, node in pairs:
            tree.put_sum(lo, hi, node)
        covered = {r for lo, hi, _ in pairs for r in range(lo, hi)}
        for rank in self.absent - covered:
            tree.put(rank, None)
        return mean(tree.root(), empty) if reduce == "mean" else tree.root()[0]
