"""Initial values of rows that a table of any ids does not have.

A pull inserts nothing, and takes no time of a shard for rows that the shard does not
have: the reading process works out their values.
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
    """Ids that are known to have no row, and the places where their rows would go."""

    table: UnboundedTable
    ids: Array
    #: An array of shape (n, dim), and the rows of it that are for these ids.
    out: Array
    at: Array

    def fill(self) -> None:
        """Write the initial values of the rows."""
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
    """A read of ids; the shards will say which of these they have."""

    table: UnboundedTable
    cut: RowCut
    #: The flat array that the rows go to, and the row of it that the first id goes to.
    flat: Array
    start: int
    #: The answers of the shards: 1 for each id, in the order of the cut, that has a
    #: row.
    marks: Array

    def fill(self) -> None:
        """Write the initial values of the rows that no shard has."""
        if self.marks.all():
            return
        absent = np.flatnonzero(self.marks == 0)
        (table, ids, given, _), start = self.cut, self.start
        out = self.flat.reshape(-1, table.dim)
        where = absent if given is None else given[absent]
        AbsentIds(self.table, ids[absent], out, start + where).fill()
