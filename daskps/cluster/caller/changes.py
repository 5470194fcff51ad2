"""Rows of a table as its owners know them: their ids, and those that others changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps.cluster.wire.packing import unpack_array
from daskps.cluster.wire.rows import most_rows
from daskps.shards.row_changes import NEVER, Changed, ChangesAsked, changes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.wire.deadline import Deadline
    from daskps.layout.tables import Table
    from daskps.typing import Array

#: Names for the users of stores, which import nothing of `shards`.
__all__ = ["NEVER", "Changed", "Question", "ask", "find_ids", "look"]

#: Number of tries of a look that updates run into.
_TRIES = 2


class Question(NamedTuple):
    """A question to some shards of a table."""

    table: Table
    #: By shard the version after which changes count; NEVER for all rows.
    since: Mapping[int, int]
    #: The producer whose own changes are left out, 0 for none.
    by: int


def look(shards: ShardClient, question: Question) -> dict[int, Changed] | None:
    """Look for changes in the memory of shards that this process reaches.

    None where any of them must be asked.
    """
    table, since, by = question
    layout, most = shards.meta.layout, most_rows(table)
    found, servings = dict[int, Changed](), set[int]()
    for shard, version in since.items():
        near = shards.ways.find_shard(shard)
        if near is None or near[1].locks_reads or not near[0].is_live():
            return None
        position = layout.table_position(shard, table.index)
        asked, segment = (
            ChangesAsked(position, version, most, by),
            near[1].shard.segment,
        )
        for _ in range(_TRIES):
            one = changes(segment, asked)
            if one is not None:
                break
        else:
            return None
        found[shard] = one
        servings.add(id(near[0]))
    shards.counters.local_calls += len(servings)
    _count(shards, found)
    return found


async def ask(
    shards: ShardClient, question: Question, deadline: Deadline
) -> dict[int, Changed]:
    """Ask the owners of shards for changes, by message."""
    table, since, by = question
    if shards.far.lanes_to({shards.meta.owners[shard] for shard in since}):
        shards.counters.fell_back("changes of rows, which lanes do not carry")
    rows = await shards.ask_owners(
        *("row_changes", since, lambda shard: (shard, since[shard]), deadline),
        key="asked",
        table=table.index,
        by=by,
    )
    found = {shard: _unpacked(table, *said) for shard, *said in rows}
    _count(shards, found)
    return found


def _count(shards: ShardClient, found: Mapping[int, Changed]) -> None:
    shards.counters.rows_pulled += sum(
        len(one.ids)
        for one in found.values()
        if one.ids is not None and one.rows is not None
    )


def _unpacked(table: Table, version: int, complete: bool, *arrays: Any) -> Changed:
    dtypes = "int64", table.dtype, "uint8"
    unpacked = [
        None if array is None else unpack_array(array, dtype)
        for array, dtype in zip(arrays, dtypes, strict=True)
    ]
    return Changed(version, complete, *unpacked)


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
