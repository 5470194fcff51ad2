"""Reading weights of which each piece lies in a buffer of its own."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from daskps.shards.memory.format import MIXED, SIDE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from daskps.shards.memory.format import Record
    from daskps.shards.memory.segment import Segment
    from daskps.typing import Array


def runs(
    segment: Segment, record: Record, part: tuple[str, int, int]
) -> Iterator[Array]:
    """Yield what a record has for a part of the vector of a dtype.

    Parameters
    ----------
    segment : Segment
        The memory.
    record : Record
        One of its records, which may be overwritten meanwhile: what a reader finds is
        good once it has seen that it was not.
    part : (str, int, int)
        The dtype, and the elements from where to where.

    Yields
    ------
    ndarray
        Weights, one view after the other, as few as possible: one where all lie in
        the same buffer.
    """
    (dtype, start, stop), side = part, record.plain[SIDE]
    if side != MIXED:
        yield segment.vectors[side][dtype][start:stop]
        return
    (starts, positions), sides = segment.places[dtype], record.weight_sides
    # The piece that the next element lies in is the one before `i`.
    n, at, i = len(starts), start, bisect_right(starts, start)
    while at < stop:
        side = sides[positions[i - 1]]
        while i < n and starts[i] < stop and sides[positions[i]] == side:
            i += 1
        end = min(stop, starts[i]) if i < n else stop
        yield segment.vectors[side][dtype][at:end]
        at, i = end, i + 1
