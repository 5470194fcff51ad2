"""Rows that a table of any ids does not have: what they would begin with."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from daskps import config
from daskps.row_init import initial_rows

if TYPE_CHECKING:
    from daskps.cluster.caller.row_routes import RowCut
    from daskps.layout.tables import UnboundedTable
    from daskps.typing import Array


class AbsentRows(NamedTuple):
    """A read of ids of which the shards have some; who reads works out the others.

    A pull inserts nothing, and takes nothing of a shard's time for rows that it has not.
    """

    table: UnboundedTable
    cut: RowCut
    #: Where the rows go, flat, and which of its rows the first id goes to.
    flat: Array
    start: int
    #: What the shards have said: 1 for each id, in the order of the cut, that has a row.
    marks: Array

    def fill(self) -> None:
        """Write what the rows begin with that no shard has."""
        if self.marks.all():
            return
        absent = np.flatnonzero(self.marks == 0)
        table, at = self.table, self.cut.at
        rows = initial_rows(
            self.cut.ids[absent],
            (table.dim, table.dtype),
            table.of.init,
            name=table.name,
            seed=table.of.seed,
            cache_dir=str(config.load().cache),
        )
        where = absent if at is None else at[absent]
        self.flat.reshape(-1, table.dim)[self.start + where] = rows
