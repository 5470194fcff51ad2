"""Changes of rows in place: the marks of a writer, and the roll back of a dead one.

Rows and slots have one buffer and are changed in place, under the undo log of
:mod:`daskps.shards.arrays.row_operations`. A publication that changes rows

1. stores its flip, with no entries yet, in the undo words of *all* tables that it
   changes;
2. sets the lowest bit of the *row sequence*, which is odd from there on;
3. logs and changes rows, a few at a time;
4. stores the flip word, and the next multiple of 4 as the row sequence.

Readers take no lock. A reader's copy is whole where the sequence was even and is the
same afterwards. Where one publication was changing rows, or has begun to since, its log
has the old values of those rows: with these put over the copy it is whole too, as long
as no other publication has begun (:func:`is_logged`). A process that holds the lock and
finds the sequence odd has found a writer that died, and rolls back the tables whose
undo word is of the coming flip. The rollback ends with the same flip and no entries, so
it can be cut off and begun again; and as it empties a log that readers may need, it
first sets the second bit of the sequence, and ends one further.

After the flip the log *is* the publication before, of the tables whose undo word has
the flip in force; those of an earlier flip have not changed since, and those of a later
one, which was given up, are gone.

Two kinds of publication go *forward* instead. One that gives all slots their first
values would need a log as long as the table, and one that withdraws the publication in
force has that one's log in use. They change tables last: the record is whole by then,
and a word says what is left to do. From the odd row sequence on, the next process with
the lock does all of that, again where it was begun, and stores the flip. No log tells
readers of these: the second bit of the sequence is set from the beginning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from daskps.shards.arrays.row_operations import flip_of
from daskps.shards.memory.format import FORWARD, ROWS_SEQUENCE

if TYPE_CHECKING:
    from collections.abc import Collection

    from daskps.shards.memory.segment import Segment


#: Work that is left: fill slots, or take back the rows of the publication in force.
RESET: Final = 1
WITHDRAW: Final = 2
_KIND_BITS: Final = 2
#: Of the row sequence, in its lower bits: rows are changed under their logs; or in a
#: way that no log tells. It is a multiple of 4 while they are not.
LOGGED: Final = 1
UNTOLD: Final = 3


def is_logged(began: int, now: int) -> bool:
    """Return whether logs have all that has happened to rows since a row sequence.

    That is so where nothing has happened, where one publication is changing them, and
    where that one is done: from one multiple of 4 to the next. A rollback goes further.
    """
    return now & UNTOLD != UNTOLD and now <= (began | UNTOLD) + 1


def begin(segment: Segment, flip: int, ordinals: Collection[int]) -> None:
    """Say that a publication changes rows of some tables, before it does."""
    # One that never began to change anything may have left it.
    segment.header[FORWARD] = 0
    for ordinal in ordinals:
        segment.tables[ordinal].begin(flip)
    segment.header[ROWS_SEQUENCE] |= LOGGED


def go_forward(segment: Segment, flip: int, kind: int) -> None:
    """Change tables and flip, as the last thing of a publication whose record is whole."""
    segment.header[FORWARD] = flip << _KIND_BITS | kind
    segment.header[ROWS_SEQUENCE] |= UNTOLD
    roll_back(segment)


def done(header: memoryview[int]) -> None:
    """Say that rows are whole again, after the flip of a publication that changed some."""
    if header[ROWS_SEQUENCE] & LOGGED:
        header[ROWS_SEQUENCE] = (header[ROWS_SEQUENCE] | UNTOLD) + 1


def roll_back(segment: Segment) -> None:
    """Say that no rows are being changed any more; under the shard's lock.

    A publication that stopped half-way is rolled back, or done.
    """
    header, flip = segment.header, segment.flip
    if not header[ROWS_SEQUENCE] & LOGGED:
        return
    word = header[FORWARD]
    if word >> _KIND_BITS == flip + 1:
        if word & (1 << _KIND_BITS) - 1 == RESET:
            _reset(segment)
        else:
            _roll_back(segment, flip)
        segment.flip = flip + 1
    else:
        _roll_back(segment, flip + 1)
    sequence = header[ROWS_SEQUENCE]
    further = 4 if sequence & UNTOLD == UNTOLD else 0
    header[ROWS_SEQUENCE] = (sequence | UNTOLD) + 1 + further


def _roll_back(segment: Segment, flip: int) -> None:
    """Take back what the publication of a flip has changed, and say so before."""
    for table in segment.tables:
        if flip_of(table.buffers.undo[0]) == flip:
            segment.header[ROWS_SEQUENCE] |= UNTOLD
            table.roll_back()


def _reset(segment: Segment) -> None:
    """Give all slots of rows their first values."""
    for table in segment.tables:
        # No entry of a feed says that slots have changed.
        table.feed.stop()
        table.fill_slots(segment.payload.fill)
    segment.payload.wait()
