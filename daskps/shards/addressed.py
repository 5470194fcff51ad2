"""Reads of a shard by the addresses of its words: without a lock, an array or Python.

The functions here write down once more, for a reader that is compiled and runs beside
the interpreter, what :mod:`daskps.shards.reads` decides for one with arrays: which flip
may be read, the copy, and whether it was whole. A part of a *table* of numbers says
where a shard's words are and what of it is read. The table keeps no memory alive: who
uses it holds the segments.

Where processors reorder stores it must not be used: writers are other threads.
"""
# ruff: noqa: PLR0911  (compiled functions take numbers, and by position)

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.kernels.system import copy, load, settle, store
from daskps.shards.deputy import CLOSED, RELEASED
from daskps.shards.memory.format import (
    CLOCK,
    FLIP,
    GATE,
    GENERATION,
    LIVE,
    MAX_RANKS,
    MIXED,
    N_RANKS,
    POLICY,
    RANK_WORDS,
    ROUNDS,
    RUN,
    SIDE,
    STALENESS,
    VERSION,
    WRITING,
)
from daskps.shards.reads import ASK, BSP, NOT_YET, SSP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from daskps.shards.memory.segment import Segment
    from daskps.typing import Array

#: Words of a part of a table: addresses of the header and of both records, and how many
#: bytes from there the ranks begin; who reads; the shard's number and generation, and how
#: many ranges are read; the flip that was read last straight from the weights, and where
#: it stands until when they are copied first.
HEADER_AT, RECORDS_AT, RANKS_FROM = 0, 1, 3
RUN_OF, RANK_OF, SHARD, GENERATION_OF, N_RANGES, SEEN, COPIED_AT, PART_WORDS = range(
    4, 12
)
#: Then of each range: its addresses in both buffers, its bytes, and how many pieces it is
#: cut from; of each of these where its side stands, its first byte in the range, its bytes.
NBYTES, N_PIECES, RANGE_WORDS, PIECE_OF_RANGE = 2, 3, 4, 3
#: Pieces of one part. One that has more is read here only where all are on one side.
MOST_PIECES = 256
#: How often a copy that updates run into is tried again.
TRIES = 4
#: No flip: another one than the last that was seen and the next is a surprise.
NEVER = -2
#: For how long a shard is copied from after an update has run into its weights on their
#: way, in milliseconds.
COPY_MS = 10_000


def part_of(
    segment: Segment,
    shard: tuple[int, int],
    reader: tuple[int, int],
    ranges: Sequence[tuple[str, int, int]],
) -> list[int]:
    """Return the part of a table for the reads of one shard.

    Parameters
    ----------
    segment : Segment
        The shard's memory.
    shard : (int, int)
        Its number, and the generation that is read.
    reader : (int, int)
        Run and rank of a trainer; 0 and -1 outside runs.
    ranges : sequence of (str, int, int)
        The elements to read, of its vector of a dtype.

    Raises
    ------
    ValueError
        For a rank that no run has.
    """
    if not -1 <= reader[1] < MAX_RANKS:
        raise ValueError(f"rank {reader[1]} of at most {MAX_RANKS}")
    records = [_address(record.words) for record in segment.records]
    found = [_address(segment.words), *records, 8 * len(segment.records[0].fixed)]
    found += [*reader, *shard, len(ranges), NEVER, _address(segment.copied_until)]
    for dtype, start, stop in ranges:
        vectors = [v[dtype][start:stop] for v in segment.vectors]
        pieces = [*_pieces(segment, (dtype, start, stop))]
        if len(pieces) > MOST_PIECES:
            pieces = []
        found += [*map(_address, vectors), vectors[0].nbytes, len(pieces)]
        found += [number for piece in pieces for number in piece]
    return found


def _address(array: Array) -> int:
    return int(array.ctypes.data)


def _pieces(
    segment: Segment, part: tuple[str, int, int]
) -> Iterator[tuple[int, int, int]]:
    """Yield where the side of each piece stands, where it begins, and its bytes."""
    (dtype, start, stop), n = part, len(segment.pieces)
    size, sides = np.dtype(dtype).itemsize, len(segment.records[0].fixed) - n
    for at, position in zip(*segment.places[dtype], strict=True):
        low, high = max(start, at), min(stop, at + segment.pieces[position].size)
        if low < high:
            yield 8 * (sides + position), size * (low - start), size * (high - low)


# -- compiled -------------------------------------------------------------------------


def find_flip(part: int, bound: int) -> int:
    """Return the flip that may be read at a clock or a version; or NOT_YET, or ASK.

    It reads for the shard's owner: where that has let go of it, others are asked.
    """
    header = load(part + 8 * HEADER_AT)
    flip = load(header + 8 * FLIP)
    record = load(part + 8 * (RECORDS_AT + (flip & 1)))
    if load(header + 8 * GATE) in (CLOSED, RELEASED):
        return ASK
    if load(header + 8 * GENERATION) != load(part + 8 * GENERATION_OF):
        return ASK
    if load(part + 8 * RUN_OF) == 0:
        return flip if load(record + 8 * VERSION) >= bound else ASK
    rank = load(part + 8 * RANK_OF)
    if load(record + 8 * RUN) != load(part + 8 * RUN_OF):
        return ASK
    if not 0 <= rank < load(record + 8 * N_RANKS):
        return ASK
    policy = load(record + 8 * POLICY)
    if policy == BSP:
        ahead = bound - load(record + 8 * ROUNDS)
        if ahead > 0:
            return NOT_YET
        row = record + load(part + 8 * RANKS_FROM) + 8 * rank * RANK_WORDS
        return flip if ahead == 0 and load(row + 8 * LIVE) != 0 else ASK
    if policy != SSP:
        return flip
    lag = find_lag(part, record, bound)
    return NOT_YET if lag > load(record + 8 * STALENESS) else flip


def find_lag(part: int, record: int, clock: int) -> int:
    """Return the clocks by which the slowest trainer that is waited for is behind."""
    # A record that is being written may say anything.
    n_ranks = min(load(record + 8 * N_RANKS), MAX_RANKS)
    slowest, has_any = clock, False
    for rank in range(n_ranks):
        row = record + load(part + 8 * RANKS_FROM) + 8 * rank * RANK_WORDS
        if load(row + 8 * LIVE) != 0:
            its = load(row + 8 * CLOCK)
            slowest = its if not has_any or its < slowest else slowest
            has_any = True
    return clock - slowest


def copy_ranges(part: int, record: int, to: int) -> int:
    """Copy what is read to an address; return its bytes, -1 where that is not possible.

    That is good once it was seen that nobody has written there meanwhile.
    """
    side, began = load(record + 8 * SIDE), to
    at = part + 8 * PART_WORDS
    for _ in range(load(part + 8 * N_RANGES)):
        nbytes, n_pieces = load(at + 8 * NBYTES), load(at + 8 * N_PIECES)
        if 0 <= side <= 1:
            copy(to, load(at + 8 * side), nbytes)
        elif side != MIXED or (n_pieces == 0 and nbytes > 0):
            return -1
        for i in range(n_pieces if side == MIXED else 0):
            piece = at + 8 * (RANGE_WORDS + i * PIECE_OF_RANGE)
            one, start = load(record + load(piece)), load(piece + 8)
            if not 0 <= one <= 1:
                return -1
            copy(to + start, load(at + 8 * one) + start, load(piece + 16))
        to += nbytes
        at += 8 * (RANGE_WORDS + n_pieces * PIECE_OF_RANGE)
    return to - began


def say_row(part: int, record: int, bound: int, row: int) -> None:
    """Say which shard is read, its version, and by how many clocks others are behind."""
    lag = 0
    if load(part + 8 * RUN_OF) != 0 and load(record + 8 * POLICY) != BSP:
        lag = max(0, find_lag(part, record, bound))
    store(row, load(part + 8 * SHARD))
    store(row + 8, load(record + 8 * VERSION))
    store(row + 16, lag)


def is_whole(part: int, flip: int) -> bool:
    """Return whether nobody has written what was read at a flip so far."""
    header = load(part + 8 * HEADER_AT)
    settle()
    done = load(header + 8 * WRITING) <= flip + 1
    return done and load(header + 8 * FLIP) >= flip


def look_straight(part: int, flip: int, milliseconds: int) -> bool:
    """Return whether weights may be sent as they lie, at a flip that is seen now.

    Not where updates come so fast that one would run into it, or one just did.
    """
    seen = load(part + 8 * SEEN)
    store(part + 8 * SEEN, flip)
    return flip <= seen + 1 and milliseconds >= load(load(part + 8 * COPIED_AT))


def find_sources(part: int, flip: int, to: int, most: int) -> int:
    """Write where what is read lies, and its bytes; return how many pieces that is.

    That is -1 where there are more, or not all of it is on one side.
    """
    side = load(load(part + 8 * (RECORDS_AT + (flip & 1))) + 8 * SIDE)
    if not 0 <= side <= 1:
        return -1
    at, n = part + 8 * PART_WORDS, 0
    for _ in range(load(part + 8 * N_RANGES)):
        nbytes = load(at + 8 * NBYTES)
        if nbytes > 0:
            if n == most:
                return -1
            store(to + 16 * n, load(at + 8 * side))
            store(to + 16 * n + 8, nbytes)
            n += 1
        at += 8 * (RANGE_WORDS + load(at + 8 * N_PIECES) * PIECE_OF_RANGE)
    return n


def read_part(part: int, bound: int, row: int, to: int) -> int:
    """Read one shard; return how many bytes that is, -1 where it must be asked.

    Parameters
    ----------
    part : int
        Address of its part of a table.
    bound : int
        Clock of the trainer; outside runs the least version.
    row, to : int
        Addresses for shard, version and lag, and for what is read.
    """
    for _ in range(TRIES):
        flip = find_flip(part, bound)
        if flip < 0:
            return -1
        record = load(part + 8 * (RECORDS_AT + (flip & 1)))
        say_row(part, record, bound, row)
        nbytes = copy_ranges(part, record, to)
        if nbytes >= 0 and is_whole(part, flip):
            return nbytes
    return -1


#: The functions above, and what they are compiled for.
SIGNATURES: dict[Callable[..., Any], str] = {
    find_lag: "types.int64, types.int64, types.int64",
    find_flip: "types.int64, types.int64",
    copy_ranges: "types.int64, types.int64, types.int64",
    say_row: "types.int64, types.int64, types.int64, types.int64",
    is_whole: "types.int64, types.int64",
    look_straight: "types.int64, types.int64, types.int64",
    find_sources: "types.int64, types.int64, types.int64, types.int64",
    read_part: "types.int64, types.int64, types.int64, types.int64",
}
