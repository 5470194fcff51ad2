"""Fetching the contributions of one round for one shard or several."""

from __future__ import annotations

from dataclasses import astuple
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps.cluster.caller.fetching import Fetch, Fetched, fetch_all
from daskps.cluster.host.contributed_rows import reduce_rows
from daskps.cluster.runs.graph.sums_asked import SumsAsked
from daskps.cluster.wire.packing import unpack_array
from daskps.errors import ContributionLostError, StaleGenerationError
from daskps.reduction import Node, cover, fold, mean, reduce_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.host.contributed_rows import RowNode
    from daskps.cluster.host.contributions import PartialSum, Receipt, RoundId
    from daskps.cluster.runs.graph.context import TaskContext


class Reduced(NamedTuple):
    """The result of a round in one shard, by position of the piece."""

    arrays: dict[int, Any]
    rows: RowNode


class _Opened(NamedTuple):
    """A node of the rank tree, with numbers for words."""

    node: Node
    rows: RowNode


class Sums:
    """The contributions of one round, from all workers to one shard or several."""

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
        #: By worker: bytes of the rows of tables that these have, at all shards.
        self._row_nbytes: dict[str, int] = {}
        for receipt in sorted(receipts):
            worker = receipt.worker
            self.ranks.setdefault(worker, []).append(receipt.rank)
            before = self._row_nbytes.get(worker, 0)
            self._row_nbytes[worker] = before + receipt.row_nbytes
        absent = set(range(self.size)) - {r.rank for r in receipts}
        self.nodes = {
            w: [(rank, rank + 1) for rank in ranks]
            if callable(context.reduce)
            else cover(set(ranks), absent, self.size)
            for w, ranks in self.ranks.items()
        }

    def fetch(self) -> dict[int, Reduced]:
        """Return what the round comes to in each shard."""
        here = self.context.worker
        layout = self.context.meta.layout
        far = [
            SumsAsked(layout, w, self.shards, self.nodes[w], self._row_nbytes[w])
            for w in self.ranks
            if w != here
        ]
        rows: dict[str, list[list[PartialSum]]] = {}

        def sum_here() -> None:
            if here in self.ranks:
                rows[here] = self._here(here)

        asked = [*map(self._fetch_from, far)]
        far_way, store = self.context.shards.far, self.context.meta.uid
        found = fetch_all(
            asked, far_way.lanes, sum_here, counters=far_way.counters, store=store
        )
        for one, came in zip(far, found, strict=True):
            rows[one.worker] = one.parcels(*came)
        return {
            shard: self._reduced(
                [(w, self._opened(shard, rows[w][i])) for w in self.ranks]
            )
            for i, shard in enumerate(self.shards)
        }

    def _opened(self, shard: int, parcels: Sequence[PartialSum]) -> list[_Opened]:
        layout, empty = self.context.meta.layout, self.context.host.pool.empty
        return [_Opened(p.opened(layout, shard, empty), p.rows) for p in parcels]

    def _here(self, worker: str) -> list[list[PartialSum]]:
        return self.context.host.contributions.sums(
            self.place, self.shards, self.ranks[worker], self.nodes[worker]
        )

    def _fetch_from(self, asked: SumsAsked) -> Fetch:
        """Return what is fetched from a worker."""
        about = {
            "place": astuple(self.place),
            "shards": self.shards,
            "ranks": self.ranks[asked.worker],
            "nodes": asked.nodes,
        }
        start, empty = self.context.link.start, self.context.host.pool.empty
        return Fetch(
            asked.worker,
            "sums",
            about,
            make=lambda said: [empty(n, dtype) for dtype, n in asked.sizes(said)],
            ask=lambda: start(partial(self._ask, asked, about)),
            nbytes=asked.nbytes,
        )

    async def _ask(self, asked: SumsAsked, about: dict[str, Any]) -> Fetched:
        worker = asked.worker
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
        dtypes = [dtype for dtype, _ in asked.sizes(said)]
        return Fetched(said, [*map(unpack_array, packed, dtypes)])

    def _reduced(self, nodes: Sequence[tuple[str, list[_Opened]]]) -> Reduced:
        opened = {
            span: node
            for worker, of in nodes
            for span, node in zip(self.nodes[worker], of, strict=True)
        }
        rows = {lo: found.rows for (lo, _), found in opened.items() if found.rows}
        is_mean, empty = self.context.reduce == "mean", self.context.host.pool.empty
        return Reduced(
            self._reduced_arrays({span: found.node for span, found in opened.items()}),
            reduce_rows(rows, self.size, is_mean=is_mean, empty=empty),
        )

    def _reduced_arrays(self, found: dict[tuple[int, int], Node]) -> dict[int, Any]:
        reduce = self.context.reduce
        if callable(reduce):
            nodes = {lo: n for (lo, _), n in found.items()}
            try:
                return reduce_all(nodes, self.size, reduce)
            except Exception as error:
                # As of what a trainer raises: a run may go on after it.
                error.add_note(f"raised in the reduction of round {self.place.round}")
                raise
        empty = self.context.host.pool.empty
        with np.errstate(all="ignore"):  # the shard looks at what it applies
            total = fold(found, 0, self.size, empty) or ({}, {})
            return mean(total, empty) if reduce == "mean" else total[0]
