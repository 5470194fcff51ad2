"""Contributions reduced by the owners of shards, which may take over the result."""

from __future__ import annotations

import uuid
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.caller.owner_steps import take_each
from daskps.cluster.caller.routes import route_of
from daskps.cluster.upstream import dumps
from daskps.cluster.wire.packing import pack_array, unpack_array
from daskps.errors import LayoutError
from daskps.layout.arrays import compute_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.producer import Producer
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.wire.deadline import Deadline
    from daskps.typing import Array
    from daskps.version import Version

#: One contribution's rows for one host: shard, position of the piece, data.
PartRows = list[tuple[int, int, Any]]


async def aggregate(
    shards: ShardClient,
    contributions: Sequence[Mapping[int, Array]],
    reduce: Any,
    deadline: Deadline,
) -> dict[str, Array]:
    """Return the reduced arrays by name, in the compute dtype of the parameters."""
    meta = shards.meta
    plan = partial(_by_host, meta, contributions, reduce=dumps(reduce))
    found = await shards.control_each("aggregate", plan, deadline)
    wanted = {index for arrays in contributions for index in arrays}
    parameters = [p for p in meta.layout.parameters if p.index in wanted]
    flats = {p.index: np.empty(p.size, compute_dtype(p.dtype)) for p in parameters}
    for answers in found:
        for shard, position, data in answers:
            piece = meta.layout.pieces[shard][position]
            flat = flats[piece.parameter.index]
            flat[piece.start : piece.stop] = unpack_array(data, flat.dtype.name)
    return {p.name: flats[p.index].reshape(p.shape) for p in parameters}


def check_same_layout(mine: StoreMap, its: StoreMap) -> None:
    """Refuse a store that is cut in another way.

    Raises
    ------
    LayoutError
        Naming both.
    """
    if mine.layout.to_wire() != its.layout.to_wire():
        raise LayoutError(
            f"store {its.name!r} has other parameters than {mine.name!r}, or other "
            f"shards; aggregate takes into= a store of the same names, shapes, dtypes "
            f"and number of shards"
        )


async def aggregate_into(
    shards: ShardClient,
    contributions: Sequence[Mapping[int, Array]],
    reduce: Any,
    *,
    source: Producer,
    deadline: Deadline,
) -> Version:
    """Leave the reduced arrays with the shards; return the versions that this led to.

    Each host keeps its reduced arrays until all hosts have theirs: a failure on one
    host, as of a function of the user's, changes no shard. Then the shards take the
    arrays, under one number of the producer: a message that is sent again counts once.
    """
    meta, pickled = shards.meta, dumps(reduce)
    indices = {index: None for of in contributions for index in of}
    route, token = route_of(meta, tuple(indices), ()), uuid.uuid4().hex

    async def reduces() -> dict[str, str]:
        plan = partial(_by_host, meta, contributions, reduce=pickled, token=token)
        await shards.control_each("aggregate", plan, deadline)
        return {"token": token}

    what = "take_aggregate", {"touched": route.touched}, tuple(route.slices)
    try:
        return await take_each(shards, source, what, deadline, before=reduces)
    finally:
        # A host that this does not reach drops its arrays after a while.
        shards.tell("drop_aggregate", token=token)


def _by_host(
    meta: StoreMap, contributions: Sequence[Mapping[int, Array]], **how: Any
) -> dict[str, dict[str, Any]]:
    """Return the message to each host that gets a part of any contribution."""
    where = meta.where
    hosts: dict[str, list[PartRows]] = {
        w: [[] for _ in contributions] for w in where.hosts
    }
    for rank, arrays in enumerate(contributions):
        for shard, of in route_of(meta, tuple(arrays), ()).slices.items():
            hosts[where.owners[shard]][rank] += [
                (shard, position, pack_array(arrays[index][start:stop]))
                for position, index, start, stop in of
            ]
    return {w: {"contributions": of, **how} for w, of in hosts.items() if any(of)}
