"""Handlers of questions about arrays and tables, which change nothing in their shards."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.host.copy_budget import kept
from daskps.cluster.host.hosted import LOCK_SECONDS
from daskps.cluster.protocol.handlers import HOST
from daskps.cluster.protocol.measures import Measuring, Share
from daskps.cluster.protocol.packing import pack_array, unpack_array
from daskps.cluster.protocol.row_messages import most_rows
from daskps.errors import ProtocolError
from daskps.kernels.measures import KINDS, by_block
from daskps.layout.arrays import DTYPES
from daskps.shards.frozen_rows import all_ids
from daskps.shards.row_changes import NEVER, Changed, ChangesRequest, changes_locked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.host.hosted import HostedShard
    from daskps.layout.parameters import Piece
    from daskps.shards.shard import Shard
    from daskps.typing import Array


@HOST.handles("row_changes")
async def _row_changes(
    host: ShardHost,
    *,
    store: str,
    table: int,
    asked: Sequence[tuple[int, int]],
    by: int,
) -> list[list[Any]]:
    """Return for each of some shards the changes of a table since a version.

    `asked` has shard and version; the handler leaves out changes by producer `by`. The
    answer has the shard, and the fields of :class:`~daskps.shards.row_changes.Changed`.
    """
    if by < 0 or any(since < NEVER for _, since in asked):
        raise ProtocolError(f"changes since {asked!r:.60} but those of producer {by}")
    hosted = [host.get_shard(store, shard) for shard, _ in asked]
    wanted = [
        _asked(one, table, since)._replace(by=by)
        for one, (_, since) in zip(hosted, asked, strict=True)
    ]
    found = await asyncio.gather(
        *(
            host.under(one, partial(_changes, asked=of))
            for one, of in zip(hosted, wanted, strict=True)
        )
    )
    return [
        [one.index, changed.version, changed.complete, *_packed(changed)]
        for one, changed in zip(hosted, found, strict=True)
    ]


def _asked(hosted: HostedShard, index: int, since: int) -> ChangesRequest:
    layout = hosted.layout
    ordinal = index - len(layout.parameters)
    if not 0 <= ordinal < len(layout.tables):
        raise ProtocolError(
            f"changes of parameter {index} of store {hosted.name!r}, which is no table"
        )
    position = layout.table_position(hosted.index, index)
    return ChangesRequest(position, since, most=most_rows(layout.tables[ordinal]))


def _changes(shard: Shard, asked: ChangesRequest) -> Changed:
    return changes_locked(shard.segment, asked)


def _packed(changed: Changed) -> list[Any]:
    arrays = changed.ids, changed.rows, changed.found
    return [None if array is None else pack_array(array) for array in arrays]


@HOST.handles("table_ids")
async def _table_ids(
    host: ShardHost, store: str, table: int, shards: Sequence[int]
) -> list[Any]:
    """Return the ids of the rows of a table in each of these shards, ascending.

    `table` is its index among the tables of the store.
    """

    def ids_of(shard: Shard) -> Array:
        return all_ids(shard.segment, len(shard.segment.pieces) + table)

    hosted = [host.get_shard(store, index) for index in shards]
    n = sum(one.shard.segment.tables[table].n_rows for one in hosted)
    room = await host.budget.wait(8 * n)
    return [pack_array(kept(await host.under(one, ids_of), room)) for one in hosted]


#: Tries without the shard's lock.
_TRIES = 2


@HOST.handles("measure")
async def _measure(
    host: ShardHost,
    *,
    store: str,
    asked: tuple[str, int, int, int, str],
    given: Sequence[tuple[int, Any]],
) -> list[list[Any]]:
    """Return the measure of each block of elements that lies within one shard.

    `asked` is a :class:`~daskps.cluster.protocol.measures.Measuring`; `given` has each
    shard and the factors of its elements, if any. The answer has for each the shard, a
    number for each block, and the elements before and behind these, all of one version.
    """
    wanted, found = Measuring(*asked), []
    _check(wanted)
    for shard, packed in given:
        hosted = host.get_shard(store, shard)
        piece = _piece(hosted, wanted)
        share = Share.of(wanted, piece.start, piece.stop)
        other = unpack_array(packed, wanted.other) if wanted.other else None
        if other is not None and other.shape != (share.stop - share.start,):
            raise ProtocolError(
                f"{other.size} factors for {share.stop - share.start} elements"
            )

        def work(
            hosted: HostedShard = hosted,
            piece: Piece = piece,
            share: Share = share,
            other: Array | None = other,
        ) -> list[Any]:
            of = _of_one_version(hosted, (piece, share), wanted, other)
            return [hosted.index, *map(pack_array, of)]

        found.append(await host.in_thread(work))
    return found


def _check(asked: Measuring) -> None:
    dtypes = DTYPES if asked.kind == "dot" else ("",)
    if asked.kind not in KINDS or asked.other not in dtypes or asked.n < 0:
        raise ProtocolError(f"an unknown or impossible measure {asked!r:.80}")


def _piece(hosted: HostedShard, asked: Measuring) -> Piece:
    layout = hosted.layout
    position = layout.positions.get((hosted.index, asked.parameter))
    size = layout.parameters[asked.parameter].size if position is not None else -1
    if position is None or not 0 <= asked.start <= size - asked.n:
        raise ProtocolError(
            f"elements {asked.start} to {asked.start + asked.n} of array {asked.parameter} "
            f"of store {hosted.name!r}, which shard {hosted.index} does not have"
        )
    return layout.pieces[hosted.index][position]


def _of_one_version(
    hosted: HostedShard,
    of_shard: tuple[Piece, Share],
    asked: Measuring,
    other: Array | None,
) -> tuple[Array, Array, Array]:
    """Measure the weights in place; in the shard's turn if updates overwrite them."""
    segment, (piece, share) = hosted.shard.segment, of_shard
    position = hosted.layout.positions[hosted.index, asked.parameter]
    # Index, among the shard's elements, of the first element of the share.
    origin = piece.start - asked.start

    def of(flip: int) -> tuple[Array, Array, Array]:
        weights = segment.weights_of(segment.record(flip), position)
        if segment.payload.device is not None:
            weights = segment.payload.fetch(weights)

        def part(where: slice) -> Array:
            return weights[where.start - origin : where.stop - origin]

        by = None
        if other is not None:
            a, b = share.whole.start - share.start, share.whole.stop - share.start
            by = other[a:b]
        before, behind = (np.array(part(where)) for where in share.cut)
        return by_block(asked.kind, part(share.whole), by), before, behind

    for _ in range(0 if hosted.locks_reads else _TRIES):
        flip = segment.flip
        found = of(flip)
        if segment.writing <= flip + 1:
            return found
    with hosted.turn(LOCK_SECONDS):
        return of(segment.flip)
