"""Fetching the contributions of one round for the shards of one host."""

from __future__ import annotations

from dataclasses import astuple
from functools import partial
from typing import TYPE_CHECKING, Any

from daskps import codecs
from daskps.cluster.caller.fetching import Fetch, Fetched, fetch_all
from daskps.cluster.host.contributions import PartialSum
from daskps.cluster.host.reductions import Said
from daskps.cluster.wire.packing import unpack_array
from daskps.cluster.wire.wellformed import fits
from daskps.errors import ContributionLostError, ProtocolError, StaleGenerationError
from daskps.layout.arrays import compute_dtype
from daskps.reduction import Node, cover, fold, mean, reduce_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from daskps.cluster.host.contributions import Receipt, RoundId
    from daskps.cluster.runs.graph.context import TaskContext
    from daskps.typing import Array


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
        here = self.context.worker
        far = [w for w in self.ranks if w != here]
        rows: dict[str, list[list[PartialSum]]] = {}

        def sum_here() -> None:
            if here in self.ranks:
                rows[here] = self._here(here)

        asked = [*map(self._asked_of, far)]
        far_way, store = self.context.shards.far, self.context.meta.uid
        found = fetch_all(
            asked, far_way.lanes, sum_here, counters=far_way.counters, store=store
        )
        rows |= {w: self._parcels(*of) for w, of in zip(far, found, strict=True)}
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

    def _asked_of(self, worker: str) -> Fetch:
        """Return what is fetched from a worker."""
        about = {
            "place": astuple(self.place),
            "shards": self.shards,
            "ranks": self.ranks[worker],
            "nodes": self.nodes[worker],
        }
        layout = self.context.meta.layout
        nbytes = sum(map(layout.shard_nbytes, self.shards)) * len(self.nodes[worker])
        start = self.context.link.start
        return Fetch(
            worker,
            "sums",
            about,
            make=partial(self._room, worker),
            ask=lambda: start(partial(self._ask, worker, about)),
            nbytes=nbytes,
        )

    async def _ask(self, worker: str, about: dict[str, Any]) -> Fetched:
        try:
            shards = self.context.meta.hosts.get(worker, ())
            async with self.context.shards.far.liveness.over(
                worker, shards, self.place.run
            ):
                said, packed = await self.context.link.control(worker, "sums", **about)
        except (OSError, StaleGenerationError) as error:
            raise ContributionLostError(
                f"worker {worker} went with what it had computed for {self.place}; "
                f"the round is begun anew"
            ) from error
        dtypes = [dtype for dtype, _ in self._sizes(said)]
        return Fetched(said, [*map(unpack_array, packed, dtypes)])

    def _room(self, worker: str, said: Any) -> list[Array]:
        """Return arrays for what a host says that it sends, and refuse what is none."""
        n, layout = len(self.nodes[worker]), self.context.meta.layout
        if not fits(said, Said) or any(len(row) != n for row in said):
            raise ProtocolError(f"worker {worker} has other sums than were asked for")
        for shard, row in zip(self.shards, said, strict=True):
            for _, _, about in row:
                # Each piece once: what is named twice would take memory twice.
                if not dict(about).keys() <= set(range(len(layout.pieces[shard]))):
                    raise ProtocolError(f"sums of pieces that shard {shard} has not")
                if len(dict(about)) < len(about):
                    raise ProtocolError(f"sums of a piece of shard {shard} twice")
        return [self.context.host.pool.empty(n, d) for d, n in self._sizes(said)]

    def _sizes(self, said: Said) -> Iterator[tuple[str, int]]:
        """Give dtype and length of each array."""
        layout = self.context.meta.layout
        for shard, row in zip(self.shards, said, strict=True):
            for name, _, about in row:
                for position, _ in about:
                    piece = layout.pieces[shard][position]
                    numbers = compute_dtype(piece.parameter.dtype)
                    yield codecs.named(name).dtype if name else numbers, piece.size

    def _parcels(self, said: Said, arrays: Sequence[Array]) -> list[list[PartialSum]]:
        """Put what a host has sent together, by shard and node."""
        coming = iter(arrays)

        def parcel(name: str, scale: float, about: Sequence[Any]) -> PartialSum:
            node = {p: next(coming) for p, _ in about}, dict(about)
            return PartialSum(node, codecs.named(name) if name else None, scale)

        return [[parcel(*of) for of in row] for row in said]

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
