"""Changing rows in place: who is at it, and what becomes of what a dead writer left.

Rows and slots have one buffer and are changed in place, under the undo log of
:mod:`daskps.shards.arrays.rows`. A publication that changes rows

1. stores its flip, with no entries yet, in the undo words of *all* tables that it changes;
2. adds one to the *row sequence*, which is odd from there on;
3. logs and changes rows, a few at a time;
4. stores the flip word, and adds one to the row sequence.

Readers take no lock: what they have gathered is whole iff the sequence was even and is the
same afterwards. Whoever finds it odd, with the lock, has found a writer that died, and
settles what that has left: tables whose undo word is of the coming flip are rolled back.
That ends with the same flip and no entries, so it can be cut off and begun again.

After the flip the log *is* the publication before, of the tables whose undo word has the
flip in force; those of an earlier flip have not changed since, and those of a later one,
which was given up, are gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.shards.arrays.rows import flip_of, undo_word
from daskps.shards.memory.format import ROWS_SEQUENCE

if TYPE_CHECKING:
    from collections.abc import Collection

    from daskps.shards.memory.segment import Segment


def begin(segment: Segment, flip: int, ordinals: Collection[int]) -> None:
    """Say that a publication changes rows of some tables, before it does."""
    for ordinal in ordinals:
        segment.tables[ordinal].buffers.undo[0] = undo_word(flip, 0)
    segment.header[ROWS_SEQUENCE] += 1


def end(segment: Segment) -> None:
    """Say that no rows are being changed any more."""
    segment.header[ROWS_SEQUENCE] += 1


def settle(segment: Segment) -> None:
    """Roll back what a publication has left half-way; under the shard's lock."""
    if not segment.header[ROWS_SEQUENCE] & 1:
        return
    coming = segment.flip + 1
    for table in segment.tables:
        if flip_of(table.buffers.undo[0]) == coming:
            table.buffers.roll_back(segment.cache_dir)
    end(segment)
