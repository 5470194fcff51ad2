"""Questions to the owners of shards: a measure of an array, ids and changes of a table.

Local shards are looked at, where that is possible; others are asked, each owner once.
A shard that has no more memory for new unbounded rows refuses a push by itself: the
error of that push names the shards that have applied it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps.cluster.protocol.measures import Measuring, Share
from daskps.cluster.protocol.packing import pack_array, unpack_array
from daskps.cluster.protocol.row_messages import most_rows
from daskps.errors import DaskPSError, IllegalStateError
from daskps.kernels.measures import BLOCK, by_block, computed_in, n_blocks, total
from daskps.layout.arrays import counted
from daskps.shards.row_changes import NEVER, Changed, ChangesRequest, changes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.protocol.deadline import Deadline
    from daskps.errors import PushRejectedError
    from daskps.layout.arrays import Layout
    from daskps.layout.tables import Table
    from daskps.shards.steps import Step
    from daskps.typing import Array


#: Names for the users of stores, which import nothing of `shards`.
__all__ = ["NEVER", "Changed", "Question", "ask", "find_ids", "look", "measured"]

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
        local = shards.carriers.find_shard(shard)
        if local is None or local[1].locks_reads or not local[0].is_live():
            return None
        position = layout.table_position(shard, table.index)
        asked, segment = (
            ChangesRequest(position, version, most, by),
            local[1].shard.segment,
        )
        for _ in range(_TRIES):
            one = changes(segment, asked)
            if one is not None:
                break
        else:
            return None
        # Of one that was handed over nothing is new, whatever its next owner does.
        if not local[1].shard.is_current:
            return None
        found[shard] = one
        servings.add(id(local[0]))
    shards.counters.local_calls += len(servings)
    _count(shards, found)
    return found


async def ask(
    shards: ShardClient, question: Question, deadline: Deadline
) -> dict[int, Changed]:
    """Ask the owners of shards for changes, by message."""
    table, since, by = question
    if shards.remote.sockets_to({shards.meta.owners[shard] for shard in since}):
        shards.counters.fell_back("changes of rows, which sockets do not carry")
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
    """Return the ids of all rows of an unbounded table, ascending.

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


async def measured(
    shards: ShardClient, asked: Measuring, other: Array | None, deadline: Deadline
) -> Any:
    """Return one number of some elements of a parameter.

    Parameters
    ----------
    shards : ShardClient
        The store.
    asked : Measuring
        The number, and the elements that it is of.
    other : ndarray, shape (n,), optional
        The vector that a "dot" multiplies them by.
    deadline : Deadline
        Its end.

    Returns
    -------
    numpy scalar
        As :func:`daskps.kernels.measures.total` returns it.

    Raises
    ------
    ValueError
        NumPy's own, for the least or largest of no elements.
    """
    layout = shards.meta.layout
    dtype = layout.parameters[asked.parameter].dtype
    shares = _shares(layout, asked)

    def say(shard: int) -> tuple[int, Any]:
        part = shares[shard].start, shares[shard].stop
        return shard, None if other is None else pack_array(other[slice(*part)])

    rows = await shards.ask_owners(
        "measure", shares, say, deadline, key="given", asked=tuple(asked)
    )
    of = None if other is None else other.dtype
    joined = _Joined(asked, dtype, other)
    for shard, blocks, *cut in rows:
        joined.take(shares[shard], blocks, cut)
    return total(asked.kind, joined.finish(), asked.n, dtype, by=of)


def _shares(layout: Layout, asked: Measuring) -> dict[int, Share]:
    found = {}
    for piece in layout.pieces_of[asked.parameter]:
        share = Share.of(asked, piece.start, piece.stop)
        if share.start < share.stop:
            found[piece.shard] = share
    return found


class _Joined:
    """The numbers of all blocks, joined from the answers of the shards."""

    def __init__(self, asked: Measuring, dtype: str, other: Array | None) -> None:
        self._asked, self._dtype, self._other = asked, dtype, other
        self._in = computed_in(
            asked.kind, dtype, None if other is None else other.dtype
        )
        self._blocks = np.empty(n_blocks(asked.n), self._in)
        #: Elements of blocks that several shards have, and how many are missing.
        self._cut: dict[int, tuple[Array, int]] = {}
        self._n = 0

    def take(self, share: Share, blocks: Any, cut: Any) -> None:
        """Take the answer of a shard."""
        self._blocks[share.first : share.end] = unpack_array(blocks, self._in.name)
        self._n += share.end - share.first
        for where, packed in zip(share.cut, cut, strict=True):
            if where.start < where.stop:
                self._fill(where, unpack_array(packed, self._dtype))

    def _fill(self, where: slice, elements: Array) -> None:
        block = where.start // BLOCK
        first = block * BLOCK
        length = min(BLOCK, self._asked.n - first)
        held, missing = self._cut.get(block, (np.empty(length, self._dtype), length))
        held[where.start - first : where.stop - first] = elements
        self._cut[block] = held, missing - len(elements)

    def finish(self) -> Array:
        """Return the numbers of all blocks."""
        if self._n + len(self._cut) != len(self._blocks):
            raise IllegalStateError(f"shards lack blocks of {self._asked}")
        for block, (held, missing) in self._cut.items():
            if missing:
                raise IllegalStateError(f"shards lack elements of {self._asked}")
            other = self._other
            first = block * BLOCK
            by = None if other is None else other[first : first + len(held)]
            self._blocks[block] = by_block(self._asked.kind, held, by)[0]
        return self._blocks


#: How long the hosts may take to answer.
_ASK_SECONDS = 5.0


async def name_applied(
    shards: ShardClient, step: Step, error: PushRejectedError, n_before: int = 0
) -> None:
    """Add to an error the shards that have applied the push that ended with it.

    Parameters
    ----------
    shards : ShardClient
        The store.
    step : Step
        The push.
    error : PushRejectedError
        The error that it ended with.
    n_before : int
        Number of parts of a large push that all shards have applied before this one.
    """
    meta = shards.meta
    if not meta.layout.grows:
        return
    owner = -1 - step.rank if step.run else step.producer
    try:
        asked = shards.control(
            "has_step", run=step.run, owner=owner, sequence=step.sequence
        )
        found = await asyncio.wait_for(asked, _ASK_SECONDS)
    except (OSError, DaskPSError) as why:
        said = f"which shards have applied it could not be found out: {why}"
    else:
        said = applied_by(sorted(shard for of in found for shard in of))
    if n_before:
        before = counted(n_before, "part")
        said = f"all shards have applied {before} of the push; of the next one {said}"
    error.args = (f"{error}. Of store {meta.name!r}: {said}",)


def applied_by(have: Sequence[int]) -> str:
    """Return in words which shards have applied a step."""
    if not have:
        return "no shard has applied it"
    named = ", ".join(map(str, have[:20])) + (", ..." if len(have) > 20 else "")
    return f"{counted(len(have), 'shard')} ({named}) had applied it"
