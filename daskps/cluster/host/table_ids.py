"""Handler that lists the ids in tables of any ids, for the shards of a host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daskps.cluster.host.copy_budget import kept
from daskps.cluster.wire.handlers import HOST
from daskps.cluster.wire.packing import pack_array
from daskps.shards.frozen_rows import all_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.host.host import ShardHost
    from daskps.shards.shard import Shard
    from daskps.typing import Array


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
