"""The rows of a reduced round, as a call to shards brings them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from daskps.cluster.caller.row_routes import RowCut, RowsGiven

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskps.cluster.host.contributed_rows import RowNode
    from daskps.layout.arrays import Layout
    from daskps.layout.tables import Table


def reduced_rows(
    layout: Layout, by_shard: Mapping[int, RowNode]
) -> tuple[RowsGiven, ...]:
    """Return what some shards get of each table that a rank has named.

    Parameters
    ----------
    layout : Layout
        The store's layout.
    by_shard : mapping of int to RowNode
        The sums, by shard: of no rows where a rank has named others of the table.
    """
    named = {
        table.index: table
        for shard, found in by_shard.items()
        for table in layout.tables
        if layout.table_position(shard, table.index) in found
    }
    return tuple(_joined(layout, by_shard, named[index]) for index in sorted(named))


def _joined(layout: Layout, by_shard: Mapping[int, RowNode], table: Table) -> RowsGiven:
    """Return the rows of one table, those of each shard one after the other."""
    nodes = {
        shard: found[layout.table_position(shard, table.index)]
        for shard, found in sorted(by_shard.items())
    }
    starts = [0]
    for shard in range(layout.n_shards):
        starts.append(starts[-1] + (len(nodes[shard].ids) if shard in nodes else 0))
    ids, rows = [n.ids for n in nodes.values()], [n.rows for n in nodes.values()]
    if len(nodes) == 1:
        return RowsGiven(RowCut(table, ids[0], None, starts), rows[0].reshape(-1))
    cut = RowCut(table, np.concatenate(ids), None, starts)
    return RowsGiven(cut, np.concatenate(rows).reshape(-1))
