"""What reductions and the directory ask of a host that keeps contributions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daskps.cluster.host.contributions import PartialSum, RoundId
from daskps.cluster.wire.handlers import HOST
from daskps.cluster.wire.messages import pack_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.host.host import ShardHost

Packed = tuple[str, float, list[tuple[int, float, Any]]]


@HOST.handles("sums")
async def sums(
    host: ShardHost,
    *,
    place: tuple[int, int, int],
    shards: Sequence[int],
    ranks: Sequence[int],
    nodes: Sequence[tuple[int, int]],
) -> list[list[Packed]]:
    """Return what this worker's contributions to a round come to, for other shards.

    By shard and node of the rank tree: the codec of words, "" for numbers, what to
    multiply those by, and rows of (position, weight, data).
    """

    def work() -> list[list[Packed]]:
        rows = host.contributions.sums(RoundId(*place), shards, ranks, nodes)
        return [[_packed(parcel) for parcel in row] for row in rows]

    if host.contributions.nbytes <= host.inline_nbytes:
        return work()
    found: list[list[Packed]] = await host.in_thread(work)
    return found


def _packed(parcel: PartialSum) -> Packed:
    arrays, weights = parcel.node
    rows = [(p, weights[p], pack_array(a)) for p, a in arrays.items()]
    return parcel.codec.name if parcel.codec else "", parcel.scale, rows


@HOST.handles("note")
async def note(
    host: ShardHost, *, store: str, run: int, number: int, receipts: Sequence[Any]
) -> None:
    """Keep the receipts of a round: shards live here, and so does their history."""
    host.contributions.note(run, number, receipts)


@HOST.handles("receipts")
async def receipts(
    host: ShardHost, store: str, run: int, since: int
) -> list[tuple[int, list[Any]]]:
    """Return the receipts of a run's rounds from `since` on."""
    host.of(store)
    return host.contributions.receipts(run, since)


@HOST.handles("free")
async def free(host: ShardHost, run: int, attempt: int, last: int) -> None:
    """Drop the contributions to an attempt's rounds up to `last`."""
    host.contributions.free(run, attempt, last)


@HOST.handles("end_graph")
async def end_graph(host: ShardHost, run: int) -> None:
    """Drop all contributions to a run; what still comes is refused."""
    host.contributions.end(run)
    host.pool.clear()
