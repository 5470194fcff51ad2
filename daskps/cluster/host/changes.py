"""Handler that tells callers which rows others have changed."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from daskps.cluster.wire.handlers import HOST
from daskps.cluster.wire.packing import pack_array
from daskps.cluster.wire.rows import most_rows
from daskps.errors import ProtocolError
from daskps.shards.row_changes import NEVER, Changed, ChangesAsked, changes_locked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.host.hosted import HostedShard
    from daskps.shards.shard import Shard


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
