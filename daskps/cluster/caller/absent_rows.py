"""Rows that a table of any ids does not have: what they would begin with.

A pull inserts nothing, and takes nothing of a shard's time for rows that it has not: who
reads works them out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from daskps.config import cache_dir
from daskps.row_init import initial_rows

if TYPE_CHECKING:
    from daskps.cluster.caller.row_routes import RowCut
    from daskps.layout.tables import UnboundedTable
    from daskps.typing import Array


class AbsentIds(NamedTuple):
    """Ids of which it is known that they have no row, and where theirs would go."""

    table: UnboundedTable
    ids: Array
    #: Of shape (n, dim), and which of its rows they are.
    out: Array
    at: Array

    def fill(self) -> None:
        """Write what the rows begin with."""
        table = self.table
        self.out[self.at] = initial_rows(
            self.ids,
            (table.dim, table.dtype),
            table.of.init,
            name=table.name,
            seed=table.of.seed,
            cache_dir=cache_dir(),
        )


class AbsentRows(NamedTuple):
    """A read of ids of which the shards will say which ones they have."""

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
        (table, ids, given, _), start = self.cut, self.start
        out = self.flat.reshape(-1, table.dim)
        where = absent if given is None else given[absent]
        AbsentIds(self.table, ids[absent], out, start + where).fill()
