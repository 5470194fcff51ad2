"""What callers ask of a host: to multiply learning rates, and by what they are."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.host.applying import take
from daskps.cluster.wire.handlers import HOST
from daskps.cluster.wire.messages import unpack_identity
from daskps.cluster.wire.packing import pack_error
from daskps.errors import ProtocolError, StaleGenerationError
from daskps.shards.installing import factors_of
from daskps.shards.steps import SCALE, Item, Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.host.hosted import HostedShard

_NO_DATA = np.empty(0)


@HOST.handles("scale_lr")
async def scale_lr(
    host: ShardHost,
    *,
    store: str,
    shards: Sequence[tuple[int, int]],
    scaled: tuple[float, Sequence[int] | None],
    identity: Sequence[Any],
    touched: Sequence[tuple[int, int]] | None,
    run: int,
) -> list[list[Any]]:
    """Multiply learning rates in some shards, in each in one publication.

    `shards` has each and its generation, `scaled` the factor and the indices of the
    parameters and tables, None for all, `identity` that of the step that this is, `run`
    the run in rounds whose trainers wait for it, 0 for none.
    Returns shard, version and error of each.
    """
    who, (factor, indices) = unpack_identity(identity, touched), scaled
    if not 0 < factor < math.inf:
        raise ProtocolError(f"a factor {factor!r:.60} in step {identity!r:.60}")
    hosted_shards, found = [host.get_shard(store, shard) for shard, _ in shards], []
    for hosted, (_, generation) in zip(hosted_shards, shards, strict=True):
        items = [
            Item(position, 0, _NO_DATA) for position in _positions(hosted, indices)
        ]
        step = Step(SCALE, lr=float(factor), clock=run, generation=generation, **who)
        make = partial(_always, items)
        try:
            version = await host.in_thread(partial(take, host, hosted, step, make))
        except StaleGenerationError:
            raise
        except Exception as error:  # noqa: BLE001 - its caller's
            found.append([hosted.index, 0, pack_error(error)])
            continue
        found.append([hosted.index, version, None])
    return found


def _positions(hosted: HostedShard, indices: Sequence[int] | None) -> list[int]:
    """Return where a shard has pieces of some parameters and tables."""
    layout, shard = hosted.layout, hosted.index
    if indices is None:
        return list(range(len(layout.pieces[shard]) + len(layout.tables)))
    n, at = len(layout.parameters), layout.positions
    return [
        at[shard, i] if i < n else layout.table_position(shard, i)
        for i in indices
        if i >= n or (shard, i) in at
    ]


def _always(items: Sequence[Item], flip: int) -> Sequence[Item]:
    """Return items that are made of nothing that could be overwritten."""
    return items


@HOST.handles("lr_factors")
async def lr_factors(host: ShardHost, store: str) -> list[list[tuple[int, float]]]:
    """Return by what learning rates are multiplied, of each shard here where they are."""
    shards = [hosted.shard.segment for hosted in host.of(store)]
    return [[*factors_of(segment, segment.flip).items()] for segment in shards]
