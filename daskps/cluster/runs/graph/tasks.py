"""The tasks of graph execution: one gradient per part, one reduction per shard.

A gradient task reads the last complete round, calls the user's function and leaves
what comes out on its worker. A reduction task fetches its own slices of that, whole
subtrees of the rank tree already summed, and has its shards apply them: it is the one
rank of the shards' run. Where a worker has many shards, one is for all of them. Both
may run twice: a read asks for exactly its round, and a shard takes each round once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from daskps.cluster.caller import routes
from daskps.cluster.host.contributions import Receipt
from daskps.cluster.runs.graph.context import GraphWork, context_of
from daskps.cluster.runs.graph.sums import reduce_sums, rows_given
from daskps.cluster.runs.portable import sends_errors
from daskps.cluster.wire.deadline import Deadline
from daskps.errors import ConsistencyError
from daskps.shards.steps import NOTHING
from daskps.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.caller.routes import Computed
    from daskps.cluster.host.contributions import RoundId
    from daskps.cluster.keys import Anchor


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
    context, place, rank = context_of(work), duty.place, duty.rank
    try:
        context.host.contributions.begin(place)
        began = time.monotonic()
        context.read(place)
        read = time.monotonic()
        # Code that takes data from the part may be the user's too.
        with user_code("the trainer"):
            found: Computed = context.stepper(
                part,
                rank,
                place.round,
                context.shared,
                reader=context.reader(place),
                own=context.own(rank),
            )
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
    context, shards = context_of(work), [anchor.shard for anchor in anchors]
    noted = None
    if 0 in shards:
        noted = context.note(place, [*map(tuple, sorted(receipts))])
    # The host that owns them, not the place of an anchor: the step is forwarded.
    found = reduce_sums(context, place, shards, receipts)
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
    request = request._replace(rows=rows_given(context.meta.layout, found))
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
