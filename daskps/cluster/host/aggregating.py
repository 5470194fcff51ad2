"""Contributions that the owners of shards reduce, outside of runs.

The sums go back to the caller, or stay for the shards to take. In the second case the
host keeps them until all owners have reduced theirs: then a failure on one owner leaves
all shards unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.upstream import loads
from daskps.cluster.wire.handlers import HOST
from daskps.cluster.wire.messages import Call, Part, unpack_identity, unpack_item
from daskps.cluster.wire.packing import pack_array
from daskps.errors import (
    ConsistencyError,
    DaskPSError,
    ProtocolError,
    PushRejectedError,
)
from daskps.layout.arrays import FLOATS
from daskps.reduction import Node, check_reduce, reduce_all
from daskps.shards.steps import ASSIGN, GRADIENT, Item, Step

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.host.kept_aggregates import ReducedPieces


@HOST.handles("aggregate", user_code=True)
async def aggregate(
    host: ShardHost,
    *,
    store: str,
    contributions: Sequence[Sequence[tuple[int, int, Any]]],
    reduce: bytes,
    token: str = "",
) -> list[tuple[int, int, Any]]:
    """Reduce contributions to the shards held here; the shards stay as they are.

    Each contribution is a list of (shard, position, data); so is the result. With a
    `token` the host keeps the result, in the dtypes of the parameters, and returns
    none.
    """
    function = loads(reduce)
    check_reduce(function)
    if not contributions:
        raise ProtocolError("a reduction of no contributions")

    def work() -> ReducedPieces:
        keys = sorted({(s, p) for rows in contributions for s, p, _ in rows})
        nodes: dict[int, Node] = {}
        for rank, rows in enumerate(contributions):
            arrays = {}
            for shard, position, data in rows:
                layout = host.get_shard(store, shard).layout
                packed = position, 0, data, None
                item = unpack_item(layout, shard, packed, kind=GRADIENT, codec=None)
                if len(item.data) != layout.pieces[shard][position].size:
                    raise PushRejectedError(
                        f"{len(item.data)} elements of a contribution to piece "
                        f"{position} of shard {shard}, which has others as well"
                    )
                # Copied: the sum is made in place, and the caller may be in this
                # process.
                arrays[keys.index((shard, position))] = np.array(item.data)
            nodes[rank] = arrays, dict.fromkeys(arrays, 1.0)
        with np.errstate(all="ignore"):
            reduced = _reduced(nodes, len(contributions), function)
        found = {keys[key]: array for key, array in reduced.items()}
        return _fitted(host, store, found) if token else found

    reduced: ReducedPieces = await host.in_thread(work)
    if token:
        host.aggregates.keep(token, reduced)
        return []
    return [(*key, pack_array(array)) for key, array in reduced.items()]


def _reduced(nodes: Mapping[int, Node], size: int, function: Any) -> dict[int, Any]:
    """Return the sums of contributions, by a name or a function of the user's.

    Raises
    ------
    DaskPSError
        If the function raises an error that a caller would take for an unreachable
        host, or for moved shards, and would ask again until its time is over.
    """
    try:
        return reduce_all(nodes, size, function)
    except (OSError, ConsistencyError) as error:
        raised = f"the reduce function raised {type(error).__name__}: {error}"
        raise DaskPSError(raised) from error


def _fitted(host: ShardHost, store: str, found: ReducedPieces) -> ReducedPieces:
    """Return reduced pieces in the form that shards can take.

    Raises
    ------
    PushRejectedError
        If a sum is too large for the dtype of its parameter.
    """
    fitted = {}
    for (shard, position), array in found.items():
        parameter = (
            host.get_shard(store, shard).layout.pieces[shard][position].parameter
        )
        with np.errstate(over="ignore"):
            values = array.astype(parameter.dtype, copy=False)
        if parameter.dtype in FLOATS and not np.isfinite(values).all():
            raise PushRejectedError(
                f"what contributions to {parameter.name[:60]!r} come to is not finite as "
                f"{parameter.dtype}; nothing was changed, scale them before"
            )
        fitted[shard, position] = values
    return fitted


@HOST.handles("take_aggregate")
async def take_aggregate(
    host: ShardHost,
    *,
    store: str,
    token: str,
    generations: Sequence[tuple[int, int]],
    identity: Sequence[Any],
    touched: Sequence[tuple[int, int]] | None,
) -> list[tuple[int, int]]:
    """Have shards take the kept sums; return their versions.

    `generations` has each shard and its generation, `identity` that of the push.
    """
    found = host.aggregates.find(token)
    who = unpack_identity(identity, touched)
    if not generations:
        raise ProtocolError(f"an aggregate {identity!r:.60} for no shard")
    parts = []
    for shard, generation in generations:
        step = Step(
            ASSIGN,
            tuple(Item(p, 0, data) for (s, p), data in found.items() if s == shard),
            generation=generation,
            **who,
        )
        parts.append(Part(shard, step))
    answers = await host.call(Call(store, tuple(parts)))
    for answer in answers:
        if answer.error is not None:
            raise answer.error
        if answer.parked:
            raise TimeoutError(
                f"shard {answer.shard} did not take an aggregate in time"
            )
    return [(answer.shard, answer.version) for answer in answers]


@HOST.handles("drop_aggregate")
async def drop_aggregate(host: ShardHost, store: str, token: str) -> None:
    """Drop the sums kept for shards to take."""
    host.aggregates.drop(token)
