"""Changes of the rows that a table piece has: every word is logged before it changes.

Longs that are not in force need no log: those of rows that were never handed out, of an
index that nobody reads yet, and of the side of the index that is being built. Counters are
logged once, before the first one changes; of several entries of a word the oldest has its
value before. Changes of the side in force go to the other one too, as far as it has been
built.

The buckets of a table with at most so many rows are numbered, and each has its rows; shards
have some of them each, in order, and which one an id is in follows from its hash. So how many
shards there are changes no row's fate.

Functions share a *book*, a few words of the caller: where the log goes on, what is asked, and
what has become of the last id.
"""
# ruff: noqa: PLR0917  (compiled functions take arguments by position)

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from daskps.kernels.id_hash import bucket
from daskps.kernels.index_probe import (
    ADMITTED,
    AHEAD,
    BUCKETS,
    BUILT,
    CANDIDATES,
    END,
    EVICTED,
    FIRST_BUCKET,
    FREE,
    HEAD,
    KEYS,
    MAX_ROWS,
    ROWS,
    SEED,
    SIDE,
    SIDE_0,
    SLOTS_0,
    STATE,
    USED,
    enter_all,
    find,
    home,
    in_force,
    leave_all,
)
from daskps.kernels.system import fetch, hold, store
from daskps.kernels.words_log import N, put

if TYPE_CHECKING:
    from daskps.kernels.words import Ids, Long, Longs

#: Why an id could not get a row.
NO_LOG: Final = -2
NO_ROW: Final = -3
NO_SLOT: Final = -4
ELSEWHERE: Final = -5
#: A book has beside the log: the state of rows that are pushed, how often ids are
#: pushed before they get one, the lowest state that counts, how many entries the log had;
STAMP: Final = 3
ADMIT: Final = 4
SINCE: Final = 5
BEGIN: Final = 6
#: and of the last id, whether its row is new, whether what that holds is in force still,
#: -1 where nobody has had it, and which row another id has lost, or -1.
_IS_FRESH = 7
_KEPT = 8
_LOST = 9
BOOK_WORDS: Final = 10
#: In place of these, how many rows are forgotten with one look at the log, and how many
#: entries that has to have room for.
PART: Final = 7
ROOM: Final = 8


def rows_before(words: Longs, places: Ids, number: Long) -> Any:
    """Return how many rows of the whole table are in the buckets before one."""
    head = places[2 * HEAD]
    most, n = words[head + MAX_ROWS], words[head + BUCKETS]
    return number * (most // n) + min(number, most % n)


def seat(words: Longs, places: Ids, row: Long, stamp: Long) -> Any:
    """Return a row of an id's bucket: a free one, or -2 minus the one that has to go.

    -1 if it is the id itself that has to.
    """
    head, keys, state = places[2 * HEAD], places[2 * KEYS], places[2 * STATE]
    seed, n = np.uint64(words[head + SEED]), np.uint64(words[head + BUCKETS])
    mine = np.int64(bucket(row, seed, n))
    start = rows_before(words, places, words[head + FIRST_BUCKET])
    low = rows_before(words, places, mine) - start
    high = rows_before(words, places, mine + 1) - start
    oldest, its_stamp, its_id = np.int64(-1), stamp, row
    for at in range(low, high):
        now = words[state + at]
        if now <= 0:
            return np.int64(at)
        its_key = words[keys + at]
        if now < its_stamp or (now == its_stamp and its_key < its_id):
            oldest, its_stamp, its_id = np.int64(at), now, its_key
    return np.int64(-1) if oldest < 0 else -2 - oldest


def is_here(words: Longs, places: Ids, row: Long) -> Any:
    """Return whether an id's bucket is one of this piece, where there are buckets."""
    head = places[2 * HEAD]
    if words[head + BUCKETS] == 0:
        return True
    seed, n = np.uint64(words[head + SEED]), np.uint64(words[head + BUCKETS])
    mine = np.int64(bucket(row, seed, n))
    low = words[head + FIRST_BUCKET]
    stop = rows_before(words, places, low) + words[head + ROWS]
    return mine >= low and rows_before(words, places, mine + 1) <= stop


def log_counts(words: Longs, places: Ids, entries: Longs, book: Longs) -> None:
    """Log what is counted, as it is."""
    head = places[2 * HEAD]
    for at in range(END, EVICTED + 1):
        if at != ROWS:
            put(words, places, HEAD, at, words[head + at], entries, book)


def vacant(words: Longs, places: Ids, row: Long, book: Longs) -> Any:
    """Return a row for an id: a free one, one that another id loses, -1, or why none."""
    head, state = places[2 * HEAD], places[2 * STATE]
    # A row may have become free in this publication.
    book[_KEPT] = book[BEGIN] > 0
    if words[head + BUCKETS] > 0:
        found = seat(words, places, row, book[STAMP])
        if found < -1:
            found = -2 - found
            book[_LOST], book[_IS_FRESH], book[_KEPT] = found, 2, 1
        return found
    if words[head + FREE] > 0:
        found = words[head + FREE] - 1
        words[head + FREE] = -words[state + found]
        return found
    found = words[head + END]
    if found >= min(words[head + ROWS], places[2 * STATE + 1]):
        return np.int64(NO_ROW)
    words[head + END] += 1
    book[_KEPT] = -1
    return found


def occupy(
    words: Longs, places: Ids, row: Long, row_id: Long, entries: Longs, book: Longs
) -> None:
    """Give a row to an id."""
    now = max(book[STAMP], np.int64(1))
    if book[_KEPT] >= 0:
        put(words, places, KEYS, row, row_id, entries, book)
        put(words, places, STATE, row, now, entries, book)
    elif book[N] >= 0:
        # Nobody looks behind the end.
        words[places[2 * KEYS] + row] = row_id
        words[places[2 * STATE] + row] = now


def renew(words: Longs, places: Ids, row: Long, entries: Longs, book: Longs) -> Any:
    """Say that a row was pushed; whether it begins anew as its time is over."""
    if book[SINCE] > 0 and words[places[2 * STATE] + row] < book[SINCE]:
        book[_IS_FRESH], book[_KEPT] = 1, 1
    if book[STAMP] > 0:
        put(words, places, STATE, row, book[STAMP], entries, book)
    return row


def is_full(words: Longs, places: Ids) -> Any:
    """Return whether the index has room for no more ids."""
    head = places[2 * HEAD]
    slots = words[head + SLOTS_0 + (in_force(words, places) - SIDE_0)]
    return (words[head + USED] + words[head + CANDIDATES] + 1) * 8 > slots * 7


def take_one(words: Longs, places: Ids, row: Long, entries: Longs, book: Longs) -> Any:
    """Give a row to an id; -1 if it gets none yet, less if it cannot."""
    head = places[2 * HEAD]
    area = in_force(words, places)
    at = find(words, places, area, row)
    value = words[places[2 * area] + 2 * at + 1] if at >= 0 else np.int64(0)
    book[_IS_FRESH] = 0
    if value > 0:
        return renew(words, places, value - 1, entries, book)
    if not is_here(words, places, row):
        return np.int64(ELSEWHERE)
    if at < 0 and is_full(words, places):
        return np.int64(NO_SLOT)
    is_counted = 1 - value < book[ADMIT]
    found = np.int64(-1) if is_counted else vacant(words, places, row, book)
    if found < -1:
        return found
    comes_and_goes = found < 0 and not is_counted
    if book[_IS_FRESH] & 2 or (comes_and_goes and value < 0):
        # The id that goes: the one that has the row now, or, if counted, the id itself.
        goer = row if comes_and_goes else words[places[2 * KEYS] + book[_LOST]]
        leave_all(words, places, goer, entries, book)
        book[_LOST] = goer
    if not comes_and_goes:
        now = value - 1 if is_counted else found + 1
        enter_all(words, places, row, now, entries, book)
    # In numbers: as Python, where a test looks at each store, these are no integers.
    words[head + CANDIDATES] += int(value == 0) * int(is_counted) - int(
        value < 0
    ) * int(not is_counted)
    if not is_counted:
        words[head + ADMITTED] += 1
        # No id loses a row whose time is over.
        is_lost = (
            book[_IS_FRESH] & 2 and words[places[2 * STATE] + found] >= book[SINCE]
        )
        words[head + EVICTED] += int(comes_and_goes) | int(is_lost)
        words[head + USED] += found >= 0 and book[_IS_FRESH] & 2 == 0
    if found >= 0:
        occupy(words, places, found, row, entries, book)
        book[_IS_FRESH] |= 1
    return found


def take(
    words: Longs,
    places: Ids,
    ids: Ids,
    rows: Longs,
    entries: Longs,
    book: Longs,
    told: Longs,
) -> Any:
    """Give rows to ids that have none; 0, or why not.

    `told` gets how many rows are new and how many ids have lost theirs; then, each with
    room for one of every id, the positions of those with new rows, whether what these hold
    is in force still, and the ids that lost theirs.
    """
    k, missing = ids.size, missing_of(words, places, rows)
    if missing < 0:
        return missing
    if book[STAMP] > 0:
        touch(words, places, rows, entries, book)
    told[0], told[1] = 0, 0
    if missing:
        log_counts(words, places, entries, book)
    for i in range(k if missing else 0):
        if rows[i] >= 0:
            continue
        if book[N] < 0:
            return NO_LOG
        ask(words, places, ids, i)
        rows[i] = take_one(words, places, ids[i], entries, book)
        if rows[i] < -1:
            return rows[i]
        tell(book, i, k, told)
    if told[1]:
        look_again(words, places, ids, rows, told)
    return 0 if book[N] >= 0 else NO_LOG


def ask(words: Longs, places: Ids, ids: Ids, i: Long) -> None:
    """Ask memory for the home of an id before its turn."""
    if i + AHEAD < ids.size:
        head = places[2 * HEAD]
        area = in_force(words, places)
        slots = words[head + SLOTS_0 + (area - SIDE_0)]
        at = home(ids[i + AHEAD], words[head + SEED], slots)
        fetch(words, places[2 * area] + 2 * at)


def tell(book: Longs, i: Long, k: Long, told: Longs) -> None:
    """Note what has become of the id at a position."""
    if book[_IS_FRESH] & 1:
        told[2 + told[0]], told[2 + k + told[0]] = i, book[_KEPT] > 0
        told[0] += 1
    if book[_IS_FRESH] & 2:
        told[2 + 2 * k + told[1]] = book[_LOST]
        told[1] += 1


def missing_of(words: Longs, places: Ids, rows: Ids) -> Any:
    """Return how many ids have no row, less than 0 if one is none of this piece."""
    missing, most = 0, min(words[places[2 * HEAD] + ROWS], places[2 * STATE + 1])
    for i in range(rows.size):
        if rows[i] >= most:
            return ELSEWHERE
        missing += rows[i] < 0
    return missing


def touch(words: Longs, places: Ids, rows: Ids, entries: Longs, book: Longs) -> None:
    """Say that rows were pushed."""
    state = places[2 * STATE]
    for i in range(rows.size):
        if i + AHEAD < rows.size:
            fetch(words, state + max(rows[i + AHEAD], np.int64(0)))
        if rows[i] >= 0:
            put(words, places, STATE, rows[i], book[STAMP], entries, book)


def look_again(words: Longs, places: Ids, ids: Ids, rows: Longs, told: Longs) -> None:
    """Take back rows of ids that had to go for others of the same push."""
    keys, k, still = places[2 * KEYS], ids.size, 0
    for i in range(k):
        if rows[i] >= 0 and words[keys + rows[i]] != ids[i]:
            rows[i] = -1
    for i in range(told[0]):
        if rows[told[2 + i]] >= 0:
            told[2 + still], told[2 + k + still] = told[2 + i], told[2 + k + i]
            still += 1
    told[0] = still


def free_row(words: Longs, places: Ids, row: Long, entries: Longs, book: Longs) -> None:
    """Take the id of a row out of the index, and put the row where free ones are."""
    head, link = places[2 * HEAD], np.int64(0)
    leave_all(words, places, words[places[2 * KEYS] + row], entries, book)
    if words[head + BUCKETS] == 0:
        link = -words[head + FREE]
    put(words, places, STATE, row, link, entries, book)
    if book[N] >= 0:
        if words[head + BUCKETS] == 0:
            words[head + FREE] = row + 1
        words[head + USED] -= 1


def remove(
    words: Longs, places: Ids, ids: Ids, rows: Longs, entries: Longs, book: Longs
) -> Any:
    """Forget ids; 0, or why not.

    `rows` gets their rows, -1 for none, and less for those that were only counted.
    """
    head = places[2 * HEAD]
    log_counts(words, places, entries, book)
    area = in_force(words, places)
    for k in range(ids.size):
        if book[N] < 0:
            return NO_LOG
        at = find(words, places, area, ids[k])
        value = words[places[2 * area] + 2 * at + 1] if at >= 0 else np.int64(0)
        rows[k] = value - 1
        if value > 0:
            free_row(words, places, value - 1, entries, book)
        elif value < 0:
            leave_all(words, places, ids[k], entries, book)
            words[head + CANDIDATES] -= 1
    return 0 if book[N] >= 0 else NO_LOG


def expire(
    words: Longs,
    places: Ids,
    low: Long,
    high: Long,
    entries: Longs,
    book: Longs,
    told: Longs,
) -> Any:
    """Forget the rows of a range that nobody has pushed for too long; 0, or why not.

    It stops where the log has no room for as many of them as the book says. `told` gets the
    row that it has come to, how many are forgotten, and their ids.
    """
    keys, state, n = places[2 * KEYS], places[2 * STATE], 0
    told[0] = high
    for row in range(low, high):
        if 0 < words[state + row] < book[SINCE]:
            if n % book[PART] == 0 and entries.size - 2 * book[N] < 2 * book[ROOM]:
                told[0] = row
                break
            if n == 0:
                log_counts(words, places, entries, book)
            told[2 + n] = words[keys + row]
            n += 1
            free_row(words, places, row, entries, book)
    told[1] = n
    return 0 if book[N] >= 0 else NO_LOG


def set_counts(
    words: Longs, places: Ids, ids: Ids, counts: Ids, entries: Longs, book: Longs
) -> Any:
    """Count ids that are not there so often; 0, or why not."""
    head = places[2 * HEAD]
    log_counts(words, places, entries, book)
    for k in range(ids.size):
        if is_full(words, places):
            return NO_SLOT
        enter_all(words, places, ids[k], -counts[k], entries, book)
        if book[N] < 0:
            return NO_LOG
        words[head + CANDIDATES] += 1
    return 0


def set_words(
    words: Longs,
    places: Ids,
    area: Long,
    at: Ids,
    values: Ids,
    entries: Longs,
    book: Longs,
) -> Any:
    """Change some words of an area; 0, or why not."""
    for k in range(at.size):
        put(words, places, area, at[k], values[k], entries, book)
    return 0 if book[N] >= 0 else NO_LOG


def enter_new(words: Longs, places: Ids, ids: Ids, values: Ids) -> Any:
    """Give values to ids that have none; return the first that has one, or no entry, or -1."""
    area = in_force(words, places)
    slots = words[places[2 * HEAD] + SLOTS_0 + (area - SIDE_0)]
    for k in range(ids.size):
        at = find(words, places, area, ids[k])
        if at >= 0 or at == -1 - slots:
            return k
        at = places[2 * area] + 2 * (-1 - at)
        words[at], words[at + 1] = ids[k], values[k]
    return -1


def copy_entries(words: Longs, places: Ids, at_most: Long) -> Any:
    """Copy entries of the side in force to the other one, which is not in force.

    Those whose home is among the next `at_most`. Returns 1 when it has all, 0 when there
    are more, -1 if it was cut off before and has to begin anew.
    """
    head = places[2 * HEAD]
    side, seed = words[head + SIDE] & 1, words[head + SEED]
    slots = words[head + SLOTS_0 + side]
    start, to = places[2 * (SIDE_0 + side)], places[2 * (SIDE_0 + 1 - side)]
    built = words[head + BUILT]
    if built & 1:
        return -1
    low = built >> 1
    high, address = min(slots, low + at_most), words.ctypes.data + 8 * (head + BUILT)
    store(address, built | 1)
    hold()
    at = low
    # Behind `high` up to the first that is empty: some of them have their home before it.
    for seen in range(slots):
        value, row = words[start + 2 * at + 1], words[start + 2 * at]
        if value == 0 and seen >= high - low:
            break
        if value != 0 and low <= home(row, seed, slots) < high:
            where = find(words, places, SIDE_0 + 1 - side, row)
            where = where if where >= 0 else -1 - where
            words[to + 2 * where], words[to + 2 * where + 1] = row, value
        at = at + 1 if at + 1 < slots else 0
    store(address, 2 * high)
    return high == slots
