"""Contributions reduced by the owners of shards, which may take over the result."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.caller.routes import Reply, route_of
from daskps.cluster.upstream import dumps
from daskps.cluster.wire.packing import pack_array, unpack_array
from daskps.errors import ContributionLostError, DaskPSError, LayoutError
from daskps.layout.arrays import compute_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.producer import Producer
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
) -> Reply:
    """Leave the reduced arrays with the shards; return the versions that this led to.

    Each host keeps its reduced arrays until all hosts have theirs: a failure on one
    host, as of a function of the user's, changes no shard. Then the shards take the
    arrays, under one number of the producer: a message that is sent again counts once.
    """
    meta, link = shards.meta, shards.link
    pickled, indices = dumps(reduce), {i: None for of in contributions for i in of}
    route = route_of(meta, tuple(indices), ())
    async with source.turn_async(deadline, shards.settle, route.slices) as turn:
        await link.within(
            lambda: source.identify(link), deadline.remaining(), deadline.what
        )
        identity = source.id, *turn
        while True:
            token = uuid.uuid4().hex

            def reduces(token: str = token) -> dict[str, dict[str, Any]]:
                found = _by_host(meta, contributions).items()
                how = {"reduce": pickled, "token": token}
                return {w: {"contributions": r, **how} for w, r in found if any(r)}

            try:
                await shards.control_each("aggregate", reduces, deadline)
                rows = await shards.ask_owners(
                    *("take_aggregate", route.slices, shards.with_generation, deadline),
                    key="generations",
                    token=token,
                    identity=identity,
                    touched=route.touched,
                )
            except ContributionLostError:
                # A worker died in between: the other hosts know which arrays they have
                # taken.
                deadline.left()
                continue
            finally:
                _drop(shards, token)
            return Reply([(shard, version) for shard, version in rows])


def _drop(shards: ShardClient, token: str) -> None:
    """Tell all hosts, without waiting, that they need keep nothing any more."""

    async def tell(worker: str) -> None:
        about = {"store": shards.meta.uid, "token": token}
        # A host that this message does not reach drops its arrays after a while.
        with contextlib.suppress(OSError, DaskPSError):
            await shards.link.control(worker, "drop_aggregate", **about)

    shards.link.start(lambda: asyncio.gather(*map(tell, shards.meta.hosts)))


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
