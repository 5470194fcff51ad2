"""The changes that a step makes in a round's table and in a record, word by word.

Functions of plain integers, compiled. They only read, or write words that nothing in
force names: the stores that put these in force (the turn of a mailbox, the flip of a
publication) are the caller's, afterwards.

In all of them `size` is the number of ranks and `n_slices` that of the mailbox's slices;
a table is laid out as :class:`daskps.shards.rounds.mailbox.MailboxTable` says, a record as
:class:`daskps.shards.memory.format.Record`. Between two steps of a trainer its caches may have
been swept: what are thirty calls in Python then takes ten times as long as in a loop of
its own, one compiled call does not.
"""
# ruff: noqa: PLR0913, PLR0917  (compiled functions take numbers, and by position)

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from daskps.kernels import plain
from daskps.shards.memory.format import (
    CLOCK,
    FIRST,
    LIVE,
    NEXT,
    RANK_WORDS,
    ROUNDS,
    VERSION,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.kernels.words import Floats, GivenFloats, Longs

#: Longs at the head of a table: its round, the kind of it, the sum of the ranks'
#: weights (a float64), the ranks that are in, those of them that ticked, and those that
#: have brought rows.
HEAD = 8
ROUND, KIND, WEIGHT, N_IN, N_TICKED, N_BROUGHT = range(6)
#: Bits of a rank's word.
TICKED, FINISHED = 1, 2
#: A word of bits has 32 ranks: where a rank's word is, and its bit there.
SHIFT, MASK = 5, 31
#: First rank of a slice that holds nothing.
FREE = -1
#: Where :func:`climb` says what it found: the node [lo, hi) that is complete, the slice
#: for its sum, whether the round is complete; then the index of each slice that is added,
#: the lowest first.
LO, HI, INTO, LAST, SLICES = range(5)


def empty(table: Longs, record: Longs, ranks_at: int, size: int, n_slices: int) -> None:
    """Make a table that of a record's open round, in which only finished ranks are in."""
    slices = HEAD + 2 * size
    for at in range(len(table)):
        table[at] = 0
    table[ROUND] = record[ROUNDS]
    for rank in range(size):
        at = ranks_at + rank * RANK_WORDS
        table[HEAD + size + rank] = record[at + NEXT]
        if record[at + LIVE] == 0:
            table[HEAD + rank] = FINISHED
            table[N_IN] += 1
    for index in range(n_slices):
        table[slices + index] = FREE


def climb(
    table: Longs,
    size: int,
    n_slices: int,
    rank: int,
    brings: int,
    path: Longs,
    found: Longs,
) -> int:
    """Note in `found` what a rank completes by its tick; return the slices it meets.

    `brings` is 1 where the rank has arrays. `path` holds lo, hi, border and left of each
    node above the rank, as :func:`daskps.reduction.path`; it is empty where
    contributions are not summed. A rank that is in already completes nothing.
    """
    slices, n = HEAD + 2 * size, 0
    found[LO], found[HI], found[INTO] = rank, rank + 1, FREE
    found[LAST] = table[HEAD + rank] == 0 and table[N_IN] + 1 == size
    for index in range(n_slices):
        if table[slices + index] == FREE:
            found[INTO] = index
            break
    for at in range(0, len(path), 4):
        lo, hi, border, left = path[at], path[at + 1], path[at + 2], path[at + 3]
        first, stop = (lo, border) if left else (border, hi)
        n_out = table[HEAD + rank]
        for other in range(first, stop):
            n_out += table[HEAD + other] == 0
        if n_out:
            break
        for index in range(n_slices):
            if table[slices + index] == first:
                found[SLICES + n] = index
                n += 1
                break
        found[LO], found[HI] = lo, hi
    if not brings and n < 2:
        found[INTO] = found[SLICES] if n else FREE
    return n


def look(
    table: Longs,
    size: int,
    n_slices: int,
    rank: int,
    brings: int,
    clock: int,
    sequence: int,
    kind: int,
    path: Longs,
    found: Longs,
) -> int:
    """Return what :func:`climb` does for a step with a tick that joins as it is.

    -1 for any other: one of another round, repeated, of another kind, or of a rank that
    has finished or has pushed before its tick.
    """
    bits = HEAD + 2 * size + 2 * n_slices + (rank >> SHIFT)
    if (
        table[ROUND] != clock
        or table[HEAD + rank] != 0
        or table[HEAD + size + rank] > sequence
        or table[bits] & (1 << (rank & MASK)) != 0
        or (kind != 0 and table[KIND] != 0 and table[KIND] != kind)
    ):
        return -1
    return climb(table, size, n_slices, rank, brings, path, found)


def join(
    table: Longs,
    other: Longs,
    size: int,
    n_slices: int,
    found: Longs,
    n: int,
    rank: int,
    bits: int,
    after: int,
    kind: int,
    weight: float,
) -> None:
    """Write to `other` what a table becomes by a rank, whose sum is in found[INTO].

    That is FREE where there is no sum to keep. `after` is the rank's next sequence
    number, `bits` come to its word.
    """
    slices = HEAD + 2 * size
    # A loop: assigning a whole array takes the compiler ten times as long.
    for at in range(len(table)):
        other[at] = table[at]
    for i in range(n):
        other[slices + found[SLICES + i]] = FREE
    into = found[INTO]
    if into != FREE:
        other[slices + into] = found[LO]
        other[slices + n_slices + into] = found[HI]
    other[slices + 2 * n_slices + (rank >> SHIFT)] &= ~(1 << (rank & MASK))
    other[N_IN] += table[HEAD + rank] == 0
    other[HEAD + rank] |= bits
    other[HEAD + size + rank] = after
    if kind:
        other[KIND] = kind
    other[N_TICKED] += bits == TICKED
    other.view(np.float64)[WEIGHT] += weight


def note(
    record: Longs,
    ranks_at: int,
    table: Longs,
    size: int,
    rank: int,
    bits: int,
    after: int,
    weight: float,
) -> int:
    """Note a complete round in the record of its flip; return how many pushed.

    `rank` is who completes it, as in :func:`join`, or -1 for nobody.
    """
    for one in range(size):
        state, following = table[HEAD + one], table[HEAD + size + one]
        if one == rank:
            state, following = state | bits, after
        at = ranks_at + one * RANK_WORDS
        record[at + CLOCK] += state & TICKED
        record[at + LIVE] = state < FINISHED
        record[at + NEXT] = record[at + FIRST] = following
    record[ROUNDS] += 1
    if table.view(np.float64)[WEIGHT] + weight <= 0:
        return 0
    record[VERSION] += 1
    return int(table[N_TICKED]) + (bits == TICKED)


def form4(
    out: Floats, a: GivenFloats, scale: float, b: GivenFloats, divisor: float
) -> bool:
    """Write (a * scale + b) / divisor to `out`, each operation rounded to float32.

    Returns whether all of it is finite.
    """
    s, d, bad = np.float32(scale), np.float32(divisor), np.uint32(0)
    largest = np.float32(3.4028234663852886e38)
    for i in range(len(out)):
        found = (a[i] * s + b[i]) / d
        out[i] = found
        bad |= np.uint32(not abs(found) <= largest)
    return not bad


def form8(
    out: Floats, a: GivenFloats, scale: float, b: GivenFloats, divisor: float
) -> bool:
    """As :func:`form4`, in float64."""
    bad = np.uint64(0)
    for i in range(len(out)):
        found = (a[i] * scale + b[i]) / divisor
        out[i] = found
        bad |= np.uint64(not abs(found) <= 1.7976931348623157e308)
    return not bad


class Compiled(NamedTuple):
    """The functions of this module, compiled, by the same names.

    `Round.work.look` is :func:`look` above: read the Python.
    """

    empty: Callable[..., None]
    climb: Callable[..., int]
    look: Callable[..., int]
    join: Callable[..., None]
    note: Callable[..., int]
    form4: Callable[..., bool]
    form8: Callable[..., bool]


@cache
def compiled(cache_dir: str | None = None) -> Compiled:
    """Return the functions, compiled; once for all shards of a process."""
    words = empty, climb, look, join, note, form8
    module = plain(words, cache_dir, alone=False)
    singles = plain((form4,), cache_dir, floats="float32", alone=False)
    # Each trainer's step calls several of them, with words and arrays that fit.
    found = {name: module.entry(name) for name in Compiled._fields if name != "form4"}
    return Compiled(**found, form4=singles.entry("form4"))
