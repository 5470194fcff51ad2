"""Initial values of rows that an unbounded table does not have.

A pull inserts nothing, and takes no time of a shard for rows that the shard does not
have: the reading process works out their values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from daskps.config import cache_dir
from daskps.row_init import initial_rows

if TYPE_CHECKING:
    from daskps.cluster.caller.row_routes import IdSplit
    from daskps.layout.tables import UnboundedTable
    from daskps.typing import Array


class AbsentRows(NamedTuple):
    """A read of ids; the shards will say which of these they have."""

    table: UnboundedTable
    split: IdSplit
    #: The array that the rows go to, and the row of it that the first id goes to.
    out: Array
    start: int
    #: The answers of the shards: 1 for each id, in the order of the cut, that has a
    #: row.
    marks: Array

    def fill(self) -> None:
        """Write the initial values of the rows that no shard has."""
        if self.marks.all():
            return
        absent = np.flatnonzero(self.marks == 0)
        (_, ids, given, _), table = self.split, self.table
        where = absent if given is None else given[absent]
        self.out.reshape(-1, table.dim)[self.start + where] = initial_rows(
            ids[absent],
            (table.dim, table.dtype),
            table.of.init,
            name=table.name,
            seed=table.of.seed,
            cache_dir=cache_dir(),
        )
