"""Handlers of questions about the rows of tables: their ids, and what others changed."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from daskps.cluster.host.copy_budget import kept
from daskps.cluster.wire.handlers import HOST
from daskps.cluster.wire.packing import pack_array
from daskps.cluster.wire.rows import most_rows
from daskps.errors import ProtocolError
from daskps.shards.frozen_rows import all_ids
from daskps.shards.row_changes import NEVER, Changed, ChangesAsked, changes_locked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.host.hosted import HostedShard
    from daskps.shards.shard import Shard
    from daskps.typing import Array


@HOST.handles("row_changes")
async def row_changes(
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


def _asked(hosted: HostedShard, index: int, since: int) -> ChangesAsked:
    layout = hosted.layout
    ordinal = index - len(layout.parameters)
    if not 0 <= ordinal < len(layout.tables):
        raise ProtocolError(
            f"changes of parameter {index} of store {hosted.name!r}, which is no table"
        )
    position = layout.table_position(hosted.index, index)
    return ChangesAsked(position, since, most=most_rows(layout.tables[ordinal]))


def _changes(shard: Shard, asked: ChangesAsked) -> Changed:
    return changes_locked(shard.segment, asked)


def _packed(changed: Changed) -> list[Any]:
    arrays = changed.ids, changed.rows, changed.found
    return [None if array is None else pack_array(array) for array in arrays]


@HOST.handles("table_ids")
async def table_ids(
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
