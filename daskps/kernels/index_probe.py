"""The index of a table piece: from an id to its row, compiled.

Entries have two words, an id and a *value*: its row plus 1, or, below 0, how often an id
without a row has been pushed; 0 is an entry without an id, whatever its first word is. They
are found by open addressing: an id's *home* is in proportion to the lower half of its hash
(:mod:`daskps.kernels.id_hash`), and it is there or behind it with no empty entry between.

Readers look ids up without the lock, while a writer changes entries and whatever else: then
a number may be wrong, but a look ends, and stays inside.
"""
# ruff: noqa: PLR0917  (compiled functions take arguments by position)

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from daskps.kernels.row_values import mixed
from daskps.kernels.system import fetch_to_read
from daskps.kernels.words_log import N, put

if TYPE_CHECKING:
    from daskps.kernels.words import Ids, Long, Longs

#: Areas of a table piece, in order: what is counted, the id of each row, the state of each
#: row, and two sides of the index.
HEAD: Final = 0
KEYS: Final = 1
STATE: Final = 2
SIDE_0: Final = 3
N_AREAS: Final = 5
#: Longs of the first area: the seed of the table; rows that were handed out, that there is
#: memory for, that are in use; the first free one, plus 1.
SEED: Final = 0
END: Final = 1
ROWS: Final = 2
USED: Final = 3
FREE: Final = 4
#: Ids with a count instead of a row; ids that got a row, and that lost it to others.
CANDIDATES: Final = 5
ADMITTED: Final = 6
EVICTED: Final = 7
#: The side of the index in force, and the entries of each side.
SIDE: Final = 8
SLOTS_0: Final = 9
#: Entries of the side in force that the other one has too, times 2; odd while more of them
#: are copied.
BUILT: Final = 11
#: The most rows of the whole table, 0 for any number; its buckets, and the first one here.
MAX_ROWS: Final = 12
BUCKETS: Final = 13
FIRST_BUCKET: Final = 14
#: From which row on a push looks for rows whose time is over; not logged, any will do.
HAND: Final = 15
N_HEAD: Final = 16

_LOW = 0xFFFFFFFF
_HALF = 32
#: How many ids before its turn memory is asked for an entry.
AHEAD: Final = 32
#: And for the entry so many words behind it: a quarter of all looks ends in the next line.
_BEHIND: Final = 4


def home(row: Long, seed: Long, slots: Long) -> Any:
    """Return which of so many entries is the home of an id."""
    low = mixed(np.uint64(row) ^ np.uint64(seed)) & np.uint64(_LOW)
    return np.int64(low * np.uint64(slots) >> np.uint64(_HALF))


def probe(words: Ids, start: Long, slots: Long, at: Long, row: Long) -> Any:
    """Return the entry of an id whose home is `at`; -1 minus the one where it would go.

    -1 minus `slots` where it is not, and no entry is empty.
    """
    for _ in range(slots):
        if words[start + 2 * at + 1] == 0:
            return -1 - at
        if words[start + 2 * at] == row:
            return at
        at += 1
        if at == slots:
            at = 0
    return -1 - slots


def find(words: Ids, places: Ids, area: Long, row: Long) -> Any:
    """Return the entry of an id in one side of the index, as `probe`."""
    head = places[2 * HEAD]
    slots = words[head + SLOTS_0 + (area - SIDE_0)]
    at = home(row, words[head + SEED], slots)
    return probe(words, places[2 * area], slots, at, row)


def in_force(words: Ids, places: Ids) -> Any:
    """Return the area of the side in force."""
    return SIDE_0 + (words[places[2 * HEAD] + SIDE] & 1)


def look_up(words: Ids, places: Ids, ids: Ids, rows: Longs, since: Long) -> Any:
    """Find the row of each id, -1 where it has none; return how many have none."""
    head, state = places[2 * HEAD], places[2 * STATE]
    area = in_force(words, places)
    slots = words[head + SLOTS_0 + (area - SIDE_0)]
    start, seed = places[2 * area], words[head + SEED]
    most = min(words[head + ROWS], places[2 * KEYS + 1])
    # Whatever the memory holds.
    if slots < 0 or slots > places[2 * area + 1] >> 1:
        slots = 0
    # All homes first: beside looks, whose ends nobody foresees, hashes took 2 ns longer.
    for k in range(ids.size):
        rows[k] = home(ids[k], seed, slots)
    missing = 0
    for k in range(-AHEAD, ids.size):
        later = k + AHEAD
        if later < ids.size:
            fetch_to_read(words, start + 2 * rows[later])
            fetch_to_read(words, start + 2 * rows[later] + _BEHIND)
        if k >= 0:
            at = probe(words, start, slots, rows[k], ids[k])
            row = words[start + 2 * at + 1] - 1 if at >= 0 else np.int64(-1)
            if row < 0 or row >= most or (since > 0 and words[state + row] < since):
                row = np.int64(-1)
                missing += 1
            rows[k] = row
    return missing


def counts(words: Ids, places: Ids, ids: Ids, found: Longs) -> None:
    """Find how often each id without a row was counted, 0 for others."""
    area = in_force(words, places)
    for k in range(ids.size):
        at = find(words, places, area, ids[k])
        value = words[places[2 * area] + 2 * at + 1] if at >= 0 else np.int64(0)
        found[k] = max(-value, np.int64(0))


def enter(
    words: Longs,
    places: Ids,
    area: Long,
    row: Long,
    value: Long,
    entries: Longs,
    book: Longs,
) -> None:
    """Give an id a value in one side of the index."""
    at = find(words, places, area, row)
    if at < 0:
        at = -1 - at
        if at == words[places[2 * HEAD] + SLOTS_0 + (area - SIDE_0)]:
            book[N] = -1
            return
        # The first word too: in this publication it may have been another id's.
        put(words, places, area, 2 * at, row, entries, book)
    put(words, places, area, 2 * at + 1, value, entries, book)


def leave(
    words: Longs, places: Ids, area: Long, row: Long, entries: Longs, book: Longs
) -> None:
    """Take an id out of one side of the index."""
    head, start = places[2 * HEAD], places[2 * area]
    slots, seed = words[head + SLOTS_0 + (area - SIDE_0)], words[head + SEED]
    hole = find(words, places, area, row)
    if hole < 0:
        return
    at = hole
    for _ in range(slots):
        at += 1
        if at == slots:
            at = 0
        value = words[start + 2 * at + 1]
        if value == 0:
            break
        # An entry behind a hole goes into it, unless its home is behind the hole too.
        its_id = words[start + 2 * at]
        way, its_way = at - hole, at - home(its_id, seed, slots)
        if way < 0:
            way += slots
        if its_way < 0:
            its_way += slots
        if its_way >= way:
            put(words, places, area, 2 * hole, its_id, entries, book)
            put(words, places, area, 2 * hole + 1, value, entries, book)
            hole = at
    put(words, places, area, 2 * hole + 1, 0, entries, book)


def is_copied(words: Longs, places: Ids, row: Long) -> Any:
    """Return whether the side that is being built has to know of an id."""
    head = places[2 * HEAD]
    built, side = words[head + BUILT], words[head + SIDE] & 1
    if built & 1 or built <= 0:
        return False
    slots = words[head + SLOTS_0 + side]
    return home(row, words[head + SEED], slots) < built >> 1


def enter_all(
    words: Longs, places: Ids, row: Long, value: Long, entries: Longs, book: Longs
) -> None:
    """Give an id a value in the index."""
    side = in_force(words, places) - SIDE_0
    for i in range(1 + is_copied(words, places, row)):
        enter(words, places, SIDE_0 + (side ^ i), row, value, entries, book)


def leave_all(
    words: Longs, places: Ids, row: Long, entries: Longs, book: Longs
) -> None:
    """Take an id out of the index."""
    side = in_force(words, places) - SIDE_0
    for i in range(1 + is_copied(words, places, row)):
        leave(words, places, SIDE_0 + (side ^ i), row, entries, book)
