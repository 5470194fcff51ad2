"""Handler of measures over all elements of a parameter: sums and extremes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daskps.cluster.host.hosted import LOCK_SECONDS
from daskps.cluster.wire.handlers import HOST
from daskps.cluster.wire.measuring import Measuring, Share
from daskps.cluster.wire.packing import pack_array, unpack_array
from daskps.errors import ProtocolError
from daskps.kernels.measures import KINDS, by_block
from daskps.layout.arrays import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.host.hosted import HostedShard
    from daskps.layout.parameters import Piece
    from daskps.typing import Array

#: Tries without the shard's lock.
_TRIES = 2


@HOST.handles("measure")
async def measure(
    host: ShardHost,
    *,
    store: str,
    asked: tuple[str, int, int, int, str],
    given: Sequence[tuple[int, Any]],
) -> list[list[Any]]:
    """Return the measure of each block of elements that lies within one shard.

    `asked` is a :class:`~daskps.cluster.wire.measuring.Measuring`; `given` has each
    shard and the factors of its elements, if any. The answer has for each the shard, a
    number for each block, and the elements before and behind these, all of one version.
    """
    wanted, found = Measuring(*asked), []
    _check(wanted)
    for shard, packed in given:
        hosted = host.get_shard(store, shard)
        piece = _piece(hosted, wanted)
        share = Share.of(wanted, piece.start, piece.stop)
        other = unpack_array(packed, wanted.other) if wanted.other else None
        if other is not None and other.shape != (share.stop - share.start,):
            raise ProtocolError(
                f"{other.size} factors for {share.stop - share.start} elements"
            )

        def work(
            hosted: HostedShard = hosted,
            piece: Piece = piece,
            share: Share = share,
            other: Array | None = other,
        ) -> list[Any]:
            of = _of_one_version(hosted, (piece, share), wanted, other)
            return [hosted.index, *map(pack_array, of)]

        found.append(await host.in_thread(work))
    return found


def _check(asked: Measuring) -> None:
    dtypes = DTYPES if asked.kind == "dot" else ("",)
    if asked.kind not in KINDS or asked.other not in dtypes or asked.n < 0:
        raise ProtocolError(f"an unknown or impossible measure {asked!r:.80}")


def _piece(hosted: HostedShard, asked: Measuring) -> Piece:
    layout = hosted.layout
    position = layout.positions.get((hosted.index, asked.parameter))
    size = layout.parameters[asked.parameter].size if position is not None else -1
    if position is None or not 0 <= asked.start <= size - asked.n:
        raise ProtocolError(
            f"elements {asked.start} to {asked.start + asked.n} of array {asked.parameter} "
            f"of store {hosted.name!r}, which shard {hosted.index} does not have"
        )
    return layout.pieces[hosted.index][position]


def _of_one_version(
    hosted: HostedShard,
    of_shard: tuple[Piece, Share],
    asked: Measuring,
    other: Array | None,
) -> tuple[Array, Array, Array]:
    """Measure the weights in place; in the shard's turn if updates overwrite them."""
    segment, (piece, share) = hosted.shard.segment, of_shard
    copy = segment.payload.duplicate
    position = hosted.layout.positions[hosted.index, asked.parameter]
    # Index, among the shard's elements, of the first element of the share.
    origin = piece.start - asked.start

    def of(flip: int) -> tuple[Array, Array, Array]:
        weights = segment.weights_of(segment.record(flip), position)

        def part(where: slice) -> Array:
            return weights[where.start - origin : where.stop - origin]

        by = None
        if other is not None:
            a, b = share.whole.start - share.start, share.whole.stop - share.start
            by = other[a:b]
        before, behind = (copy(part(where)) for where in share.cut)
        return by_block(asked.kind, part(share.whole), by), before, behind

    for _ in range(0 if hosted.locks_reads else _TRIES):
        flip = segment.flip
        found = of(flip)
        if segment.writing <= flip + 1:
            return found
    return _in_turn(hosted, lambda: of(segment.flip))


def _in_turn(
    hosted: HostedShard, read: Callable[[], tuple[Array, Array, Array]]
) -> tuple[Array, Array, Array]:
    try:
        with hosted.turn(LOCK_SECONDS):
            return read()
    finally:
        # A thread that came meanwhile found the mutex taken and left its ticket.
        hosted.serve()
