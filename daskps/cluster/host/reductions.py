"""Handlers for hosts that keep contributions: sums for reductions, and clean-up."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from daskps.cluster.host.contributions import RoundId
from daskps.cluster.wire.handlers import FETCHES, HOST
from daskps.cluster.wire.packing import pack_array
from daskps.errors import ProtocolError
from daskps.limits import MOST_PARTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.host.host import ShardHost
    from daskps.typing import Array

#: By shard and node of the rank tree: the codec of words, "" for numbers; the factor
#: for the words; position and weight of each array; and for the rows of each table
#: position, weight and number. The ids and rows follow the arrays.
Said = list[
    list[tuple[str, float, list[tuple[int, float]], list[tuple[int, float, int]]]]
]


@FETCHES.handles("sums")
def sums_here(
    host: ShardHost,
    *,
    place: tuple[int, int, int],
    shards: Sequence[int],
    ranks: Sequence[int],
    nodes: Sequence[tuple[int, int]],
) -> tuple[Said, list[Array]]:
    """Return the sums of this worker's contributions to a round, for other shards.

    The description of the arrays, and the arrays in its order.

    Raises
    ------
    ProtocolError
        If no reduction asks for such sums: they could take any time or memory.
    """
    ends = [0, *(end for node in nodes for end in node)]
    is_tree = all(lo < hi for lo, hi in nodes) and ends == sorted(ends)
    if not is_tree or ends[-1] > MOST_PARTS or len(set(shards)) < len(shards):
        raise ProtocolError(
            f"sums over nodes {list(nodes)!r:.60} for shards {list(shards)!r:.60}"
        )
    rows = host.contributions.sums(
        RoundId(*place), shards, ranks, [(lo, hi) for lo, hi in nodes]
    )
    said, arrays = Said(), list[Any]()
    for row in rows:
        said.append([])
        for (found, weights), codec, scale, of_tables in row:
            about = [(position, weights[position]) for position in found]
            of_rows = [(p, node.weight, len(node.ids)) for p, node in of_tables.items()]
            said[-1].append((codec.name if codec else "", scale, about, of_rows))
            arrays += found.values()
            for node in of_tables.values():
                arrays += node.ids, node.rows.reshape(-1)
    return said, arrays


@HOST.handles("sums")
async def sums(
    host: ShardHost,
    *,
    place: tuple[int, int, int],
    shards: Sequence[int],
    ranks: Sequence[int],
    nodes: Sequence[tuple[int, int]],
) -> tuple[Said, list[Any]]:
    """Return the result of :func:`sums_here` by message."""
    work = partial(
        sums_here, host, place=place, shards=shards, ranks=ranks, nodes=nodes
    )
    small = host.contributions.nbytes <= host.inline_nbytes
    said, arrays = work() if small else await host.in_thread(work)
    return said, [pack_array(array) for array in arrays]


@HOST.handles("free")
async def free(host: ShardHost, run: int, attempt: int, last: int) -> None:
    """Drop the contributions to an attempt's rounds up to `last`."""
    host.contributions.free(run, attempt, last)


@HOST.handles("end_graph")
async def end_graph(host: ShardHost, run: int) -> None:
    """Drop all contributions to a run, and refuse later ones."""
    host.contributions.end(run)
    host.pool.clear()
