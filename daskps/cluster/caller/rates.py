"""Multiplying the learning rates of a store, and by what they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from daskps.cluster.caller.applying import take_each
from daskps.cluster.caller.routes import runs_of
from daskps.version import Version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.producer import Producer
    from daskps.cluster.wire.deadline import Deadline


class Scaled(NamedTuple):
    """By what the learning rates of which parameters and tables are multiplied."""

    factor: float
    #: Their indices, None for all.
    indices: Sequence[int] | None = None


async def scale_lr(
    shards: ShardClient,
    source: Producer,
    scaled: Scaled,
    *,
    deadline: Deadline,
    run: int = 0,
) -> Version:
    """Have all shards that have any of some parameters multiply their rates, each once.

    Parameters
    ----------
    shards : ShardClient
        The store.
    source : Producer
        Whose step it is.
    scaled : Scaled
        What is multiplied, and by what.
    deadline : Deadline
        Its end.
    run : int, default 0
        The run in rounds whose trainers wait for it.

    Returns
    -------
    Version
        What the shards have come to.

    Raises
    ------
    PushRejectedError, ConsistencyError
        Naming the shards that have done it.
    """
    layout, indices = shards.meta.layout, scaled.indices
    wanted = list(range(layout.n_shards))
    n = len(layout.parameters)
    # Each shard has a piece of each table.
    if indices is not None and all(i < n for i in indices):
        wanted = sorted({piece.shard for i in indices for piece in layout.pieces_of[i]})
    if not wanted:
        return Version.of([])
    touched = None if len(wanted) == layout.n_shards else runs_of(wanted)
    about = {"scaled": tuple(scaled), "touched": touched, "run": run}
    return await take_each(shards, source, ("scale_lr", about, wanted), deadline)


async def lr_factors(shards: ShardClient, deadline: Deadline) -> dict[int, float]:
    """Return by what learning rates are multiplied, by index, of those that are.

    Parameters
    ----------
    shards : ShardClient
        The store.
    deadline : Deadline
        When to give up.

    Returns
    -------
    dict of int to float
        The least that any shard has.
    """
    owners = {*shards.meta.where.owners}
    answers = await shards.control_each(
        "lr_factors", lambda: {worker: {} for worker in owners}, deadline
    )
    found: dict[int, float] = {}
    for index, factor in (row for answer in answers for of in answer for row in of):
        found[index] = min(factor, found.get(index, factor))
    return found
