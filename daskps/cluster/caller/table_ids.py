"""Questions to the shards of a table of any ids about the ids that have rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from daskps.cluster.wire.packing import unpack_array

if TYPE_CHECKING:
    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.wire.deadline import Deadline
    from daskps.layout.tables import Table
    from daskps.typing import Array


async def find_ids(shards: ShardClient, table: Table, deadline: Deadline) -> Array:
    """Return the ids of all rows of a table of any ids, ascending.

    Parameters
    ----------
    shards : ShardClient
        The store.
    table : Table
        The table.
    deadline : Deadline
        When to give up.

    Returns
    -------
    ndarray, int64
        The ids; those of each shard are of one version of it.

    Raises
    ------
    ShardLostError, TimeoutError
        As their names say.
    """
    layout = shards.meta.layout
    ordinal = table.index - len(layout.parameters)
    found = await shards.ask_owners(
        "table_ids", range(layout.n_shards), int, deadline, table=ordinal
    )
    ids = [unpack_array(packed, "int64") for packed in found]
    whole = np.concatenate(ids)
    # The ids are sorted runs: a stable sort merges them.
    whole.sort(kind="stable")
    return whole
