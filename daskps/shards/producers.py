"""Telling a retried push from a new one: a sequence window per producer.

Each row of the record's producer table holds the highest sequence number applied and
a bit for each of the 64 below it, so pushes that overtake each other on the way are
all applied, each once.

A task that is tried again begins with its first number, which may be far below that
window. The shard has applied what is there, or it was meant for others, or it was given
up: with a push that leaves a number behind comes word of that, by whichever try of the
task it is sent (:class:`~daskps.cluster.caller.producer.Producer`). The shard keeps such
numbers, where it has not applied them, and applies each once. So any other number below
the window is a repeat. Of numbers for which there was no room nobody can tell.

When the table is full the producer that was closed first loses its row; if it comes
back it is refused, for the same reason. Its number is kept in a ring; numbers that
fall out of the ring too are refused up to the largest one, because the directory
issues them in rising order.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from daskps.errors import ProducerExpiredError, ShardBusyError
from daskps.shards.memory.areas import RECORD
from daskps.shards.memory.format import (
    CLOSED,
    FLOOR,
    FORGOTTEN,
    HIGH,
    KEPT_BITS,
    KEPT_BLOCK,
    KEPT_OF,
    LOST_FROM,
    LOST_TO,
    MAX_KEPT,
    MAX_PRODUCERS,
    MEANT,
    N_EXPIRED,
    N_KEPT,
    N_PRODUCERS,
    PRODUCER,
    PRODUCER_WORDS,
    SEEN,
    TURN,
    Record,
    Words,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from daskps.shards.memory.segment import Segment
    from daskps.shards.steps import Intervals, Step

WINDOW = 64
#: Shards that have a bit of their own.
MANY = 63
_MASK = (1 << WINDOW) - 1


def repeats(record: Record, producer: int, sequence: int) -> bool:
    """Return whether a push was applied already; changes nothing.

    Raises
    ------
    ProducerExpiredError
        When `sequence` is one of those that were given up and could not be kept, or the
        producer lost its row.
    """
    row = _find_plain(record, producer)
    if row is None:
        _refuse_expired(record, producer)
        return False
    ahead = sequence - row[HIGH]
    if ahead <= -WINDOW:
        return not _is_kept(record, row, sequence)
    return ahead <= 0 and bool(row[SEEN] & (1 << -ahead))


def note_push(record: Record, step: Step, at: int = -1) -> None:
    """Note a new push in the record, in the row that begins at `at` if that is known.

    Else :func:`repeats` and :func:`check_room` come before.
    """
    if at >= 0:
        _note(record.plain[at : at + PRODUCER_WORDS], step)
        return
    sequence = step.sequence
    row = _find_plain(record, step.producer)
    if row is None:
        row = _open(record, step.producer)
    if sequence - row[HIGH] <= -WINDOW:
        _drop_kept(record, step.producer, sequence)
        row[CLOSED] = 0
        return
    high, seen = row[HIGH], row[SEEN]
    for number in step.given_up:
        leaves = high - WINDOW < number <= sequence - WINDOW
        if leaves and (number > high or not seen >> high - number & 1):
            _keep(record, row, number)
    _note(row, step)


def find_new(record: Record, step: Step) -> int:
    """Return where the row of a producer begins that goes on with this push.

    -1 for any other: its first, one that another has overtaken, a repeat, one that tells
    of others.
    """
    at = _find(record, step.producer)
    if at < 0 or step.given_up:
        return -1
    at = record.start_of(at)
    return at if step.sequence > record.plain[at + HIGH] else -1


def _note(row: memoryview[int], step: Step) -> None:
    seen, ahead = row[SEEN] & _MASK, step.sequence - row[HIGH]
    if ahead > 0:
        meant = step.touched
        row[HIGH], row[MEANT] = step.sequence, _mask(meant) if meant else 0
        row[SEEN] = _signed(((seen << ahead) | 1) & _MASK if ahead < WINDOW else 1)
    else:
        row[SEEN] = _signed(seen | 1 << -ahead)
    row[CLOSED], row[FLOOR] = 0, max(row[FLOOR], step.floor)


def _find_kept(record: Record, producer: int, sequence: int) -> int:
    """Return which row has the bit of a push that may be kept, -1 where none has."""
    kept = record.kept[: record.plain[N_KEPT]]
    of = kept[:, KEPT_OF] == producer
    found = np.flatnonzero(of & (kept[:, KEPT_BLOCK] == sequence // WINDOW))
    return int(found[0]) if len(found) else -1


def _is_kept(record: Record, row: memoryview[int], sequence: int) -> bool:
    """Return whether a push below the window was given up and is to be applied."""
    producer = row[PRODUCER]
    at = _find_kept(record, producer, sequence)
    if at >= 0 and int(record.kept[at, KEPT_BITS]) >> sequence % WINDOW & 1:
        return True
    if row[LOST_FROM] <= sequence < row[LOST_TO]:
        raise ProducerExpiredError(
            f"push {sequence} of producer {producer} is one of {row[LOST_FROM]} to "
            f"{row[LOST_TO] - 1}, some of which its task has given up: tasks have given up "
            f"so many that the shard no longer knows which of these it has applied; "
            f"nothing was applied now, look at the values before another task pushes it"
        )
    return False


def _keep(record: Record, row: memoryview[int], number: int) -> None:
    """Keep a push that was given up and leaves the window without being applied."""
    at = _find_kept(record, row[PRODUCER], number)
    if at < 0:
        if record.plain[N_KEPT] == MAX_KEPT:
            _lose_oldest(record)
        at = record.plain[N_KEPT]
        record.kept[at] = row[PRODUCER], number // WINDOW, 0
        record.plain[N_KEPT] = at + 1
    record.kept[at, KEPT_BITS] |= _signed(1 << number % WINDOW)


def _drop_kept(record: Record, producer: int, number: int) -> None:
    """Keep a push no longer: it is applied now."""
    at = _find_kept(record, producer, number)
    record.kept[at, KEPT_BITS] &= ~_signed(1 << number % WINDOW)
    if not record.kept[at, KEPT_BITS]:
        _remove_kept(record, at)


def _lose_oldest(record: Record) -> None:
    """Make room among the kept: what was there longest nobody can tell any more."""
    producer, block, _ = record.kept[0].tolist()
    if (row := _find_plain(record, producer)) is not None:
        _lose(row, block, block)
    _remove_kept(record, 0)


def _lose(row: memoryview[int] | list[int], first: int, last: int) -> None:
    """Note of whole blocks that nobody can tell which of their pushes were applied."""
    start, stop = first * WINDOW, (last + 1) * WINDOW
    row[LOST_FROM] = min(row[LOST_FROM], start) if row[LOST_TO] else start
    row[LOST_TO] = max(row[LOST_TO], stop)


def _remove_kept(record: Record, at: int) -> None:
    n = record.plain[N_KEPT] = record.plain[N_KEPT] - 1
    record.kept[at:n] = record.kept[at + 1 : n + 1]


def find_targets(row: Words) -> Intervals | None:
    """Return where the newest push of a row goes, None for all shards."""
    mask = int(row[MEANT])
    if not mask:
        return None
    runs = tuple((i, i + 1) for i in range(MANY) if mask >> i & 1)
    return (*runs, (MANY, sys.maxsize)) if mask < 0 else runs


def _mask(meant: Intervals | None) -> int:
    """Return a bit for each shard, the sign for all from the 64th on."""
    mask = 0
    for start, stop in meant or ():
        mask |= (1 << min(stop, MANY)) - (1 << min(start, MANY))
        mask |= (stop > MANY) << MANY
    return _signed(mask)


def close_producers(segment: Segment, producers: Iterable[int]) -> None:
    """Mark producers that will not push again; the one closed first makes room first.

    In the record in force, and as no publication, which would cost a run in rounds the
    round before the last one: a mark is no update, and one that is lost is made again.
    """
    record = segment.current
    turn, words = int(record.fixed[TURN]), list[tuple[int, int]]()
    for producer in dict.fromkeys(producers):
        row = find_row(record, producer)
        if row is not None and row[CLOSED] == 0:
            turn += 1
            words += [(TURN, turn), (record.index_of(row, CLOSED), turn)]
    segment.amend(RECORD, words)


def open_row(segment: Segment, producer: int, floor: int) -> None:
    """Give a producer a row and a floor before its first push, where one is free.

    Then no producer has lost its row yet. In the record in force, as the marks are of
    :func:`close_producers`.
    """
    record = segment.current
    if (at := record.plain[N_PRODUCERS]) < MAX_PRODUCERS:
        row = producer, -WINDOW, 0, 0, floor, 0, 0, 0
        words = enumerate(row, record.start_of(at))
        segment.amend(RECORD, (*words, (N_PRODUCERS, at + 1)))


def list_open(record: Record) -> list[int]:
    """Return the ids of the producers that are not closed."""
    rows = record.producers[: record.fixed[N_PRODUCERS]]
    found: list[int] = rows[rows[:, CLOSED] == 0, PRODUCER].tolist()
    return found


def lacks_room(record: Record, producer: int) -> bool:
    """Return whether `producer` is new and no room is left for it."""
    rows = record.producers[: record.fixed[N_PRODUCERS]]
    return (
        len(rows) == MAX_PRODUCERS
        and not rows[:, CLOSED].any()
        and find_row(record, producer) is None
    )


def check_room(record: Record, producer: int) -> None:
    """Refuse a push of a new producer that finds no room.

    Raises
    ------
    ShardBusyError
        Naming the first of those that have a row.
    """
    if lacks_room(record, producer):
        raise ShardBusyError(
            f"all {MAX_PRODUCERS} producers of this shard are still open (the "
            f"first is {int(record.producers[0, PRODUCER])}); end tasks or close "
            f"handles that no longer push, or push through fewer of them"
        )


def find_row(record: Record, producer: int) -> Words | None:
    """Return the row of a producer, None where it has none."""
    at = _find(record, producer)
    return None if at < 0 else record.producers[at]


def _find_plain(record: Record, producer: int) -> memoryview[int] | None:
    """Return the same as plain integers, which every push looks at."""
    at = _find(record, producer)
    return None if at < 0 else record.producer(at)


def _find(record: Record, producer: int) -> int:
    """Return which row is that of a producer, -1 where none is."""
    n, at = record.plain[N_PRODUCERS], record.known.get(producer, MAX_PRODUCERS)
    # Another process may have given the row to another producer.
    if at < n and record.plain[record.start_of(at) + PRODUCER] == producer:
        return at
    found = np.flatnonzero(record.producers[:n, PRODUCER] == producer)
    if not len(found):
        return -1
    if len(record.known) > MAX_PRODUCERS:
        record.known.clear()
    at = record.known[producer] = int(found[0])
    return at


def _open(record: Record, producer: int) -> memoryview[int]:
    at = record.plain[N_PRODUCERS]
    if at < MAX_PRODUCERS:
        record.plain[N_PRODUCERS] = at + 1
    else:
        closed = np.flatnonzero(record.producers[:, CLOSED])
        at = int(closed[np.argmin(record.producers[closed, CLOSED])])
        _expire(record, record.producer(at)[PRODUCER])
    record.producers[at] = producer, -WINDOW, 0, 0, 0, 0, 0, 0
    return record.producer(at)


def _expire(record: Record, producer: int) -> None:
    """Remember a producer that loses its row, in the place of the oldest such."""
    ring, n = record.expired, int(record.fixed[N_EXPIRED])
    if n >= len(ring):
        oldest = int(ring[n % len(ring)])
        record.fixed[FORGOTTEN] = max(int(record.fixed[FORGOTTEN]), oldest)
    ring[n % len(ring)] = producer
    record.fixed[N_EXPIRED] = n + 1
    kept = record.kept[: record.plain[N_KEPT]]
    kept = kept[kept[:, KEPT_OF] != producer]
    record.kept[: len(kept)], record.plain[N_KEPT] = kept, len(kept)


def _refuse_expired(record: Record, producer: int) -> None:
    n = int(record.fixed[N_EXPIRED])
    forgotten = 0 < producer <= record.fixed[FORGOTTEN]
    if forgotten or (record.expired[:n] == producer).any():
        raise ProducerExpiredError(
            f"producer {producer} was closed and lost its place among the "
            f"{MAX_PRODUCERS} of this shard, so a repeat of its pushes cannot be told "
            f"from a new one; nothing was applied now, look at the values before "
            f"another task pushes it"
        )


def _signed(bits: int) -> int:
    return bits - (1 << WINDOW) if bits >= 1 << (WINDOW - 1) else bits


# -- shards that are cut anew ------------------------------------------------------


class KnownPushes(NamedTuple):
    """All that shards know of the pushes that they have applied, as plain numbers."""

    rows: Sequence[Sequence[int]] = ()
    expired: Sequence[int] = ()
    forgotten: int = 0


def noted(record: Record) -> KnownPushes:
    """Return what a shard knows of pushes.

    Of those that were given up nobody can tell, where they count for other shards.
    """
    rows = record.producers[: record.fixed[N_PRODUCERS]].tolist()
    for producer, block, _ in record.kept[: record.plain[N_KEPT]].tolist():
        _lose(next(row for row in rows if row[PRODUCER] == producer), block, block)
    expired = record.expired[: record.fixed[N_EXPIRED]].tolist()
    return KnownPushes(rows, expired, int(record.fixed[FORGOTTEN]))


def joined(every: Iterable[KnownPushes]) -> KnownPushes:
    """Return what all shards know together, of one cut: it was applied if any has it."""
    rows, expired, forgotten = dict[int, list[int]](), set[int](), 0
    for one in every:
        for row in one.rows:
            if (known := rows.setdefault(row[PRODUCER], [*row])) != row:
                _join(known, row)
            known[MEANT] = 0  # of shards that there are no more
        expired.update(one.expired)
        forgotten = max(forgotten, one.forgotten)
    return KnownPushes([*rows.values()], sorted(expired), forgotten)


def _join(row: list[int], other: Sequence[int]) -> None:
    seen, high = 0, max(row[HIGH], other[HIGH])
    for of in (row, other):
        if (behind := high - of[HIGH]) < WINDOW:
            seen |= (of[SEEN] & _MASK) << behind
    is_open = not (row[CLOSED] and other[CLOSED])
    row[HIGH], row[SEEN] = high, _signed(seen & _MASK)
    row[CLOSED] = 0 if is_open else max(row[CLOSED], other[CLOSED])
    row[FLOOR] = max(row[FLOOR], other[FLOOR])
    if other[LOST_TO]:
        _lose(row, other[LOST_FROM] // WINDOW, other[LOST_TO] // WINDOW - 1)


def take_over(record: Record, applied: KnownPushes) -> None:
    """Have a new shard know what those knew whose elements it has.

    Raises
    ------
    ShardBusyError
        Where more producers are open, all together, than one shard has room for.
    """
    record.fixed[FORGOTTEN] = applied.forgotten
    for producer in applied.expired:
        _expire(record, producer)
    # Those that were closed make room, the first one first.
    for row in sorted(applied.rows, key=lambda of: of[CLOSED] or sys.maxsize):
        check_room(record, row[PRODUCER])
        _open(record, row[PRODUCER])
        record.producers[_find(record, row[PRODUCER])] = row
    closed = (row[CLOSED] for row in applied.rows)
    record.fixed[TURN] = max(closed, default=0)
