"""Fetching the contributions of one round for one shard or several."""

from __future__ import annotations

from dataclasses import astuple
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from daskps.cluster.caller.fetching import Fetch, Fetched, fetch_all
from daskps.cluster.caller.row_routes import RowCut, RowsGiven
from daskps.cluster.host.partial_sums import SumsAsked, reduced
from daskps.cluster.wire.packing import unpack_array
from daskps.errors import ContributionLostError, StaleGenerationError
from daskps.reduction import cover

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from daskps.cluster.host.contributions import Receipt, RoundId
    from daskps.cluster.host.partial_sums import NodeSums
    from daskps.cluster.runs.graph.context import TaskContext
    from daskps.layout.arrays import Layout


def reduce_sums(
    context: TaskContext,
    place: RoundId,
    shards: Sequence[int],
    receipts: Sequence[Receipt],
) -> dict[int, NodeSums]:
    """Return the sums that a round comes to in some shards, from all workers."""
    size, layout, here = context.work.size, context.meta.layout, context.worker
    asked = [*_asked(context, shards, receipts)]
    far = [one for one in asked if one.worker != here]
    found: dict[str, list[list[NodeSums]]] = {}

    def sum_here() -> None:
        kept = context.host.contributions
        found.update(
            (here, kept.sums(place, shards, one.ranks, one.nodes))
            for one in asked
            if one.worker == here
        )

    way = context.shards.far
    came = fetch_all(
        [_fetch_from(context, place, one) for one in far],
        way.lanes,
        sum_here,
        counters=way.counters,
        store=context.meta.uid,
    )
    for one, fetched in zip(far, came, strict=True):
        found[one.worker] = one.sums(*fetched)
    sums, empty = {}, context.host.pool.empty
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
) -> Iterator[SumsAsked]:
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
        yield SumsAsked(context.meta.layout, worker, shards, nodes, ranks, nbytes)


def _fetch_from(context: TaskContext, place: RoundId, asked: SumsAsked) -> Fetch:
    about = {
        "place": astuple(place),
        "shards": asked.shards,
        "ranks": asked.ranks,
        "nodes": asked.nodes,
    }
    link, worker, empty = context.link, asked.worker, context.host.pool.empty

    async def ask() -> Fetched:
        held = context.meta.hosts.get(worker, ())
        try:
            async with context.shards.far.liveness.over(worker, held, place.run):
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


def rows_given(
    layout: Layout, by_shard: Mapping[int, NodeSums]
) -> tuple[RowsGiven, ...]:
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
        cut = RowCut(table, ids[0] if one else np.concatenate(ids), None, starts)
        data = rows[0] if one else np.concatenate(rows)
        found.append(RowsGiven(cut, data.reshape(-1)))
    return tuple(found)
