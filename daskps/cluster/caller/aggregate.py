"""Reducing contributions on the owners of the shards, which stay as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.caller.routes import route_of
from daskps.cluster.upstream import dumps
from daskps.cluster.wire.packing import pack_array, unpack_array
from daskps.layout.arrays import compute_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.wire.deadline import Deadline
    from daskps.typing import Array

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
    pickled = dumps(reduce)

    def plan() -> dict[str, dict[str, Any]]:
        return {
            worker: {"contributions": rows, "reduce": pickled}
            for worker, rows in _by_host(meta, contributions).items()
            if any(rows)
        }

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


def _by_host(
    meta: StoreMap, contributions: Sequence[Mapping[int, Array]]
) -> dict[str, list[PartRows]]:
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
    return hosts
