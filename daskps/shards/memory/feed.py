"""The feed of a table: which of its rows which publication has changed, and whose push.

A feed is off until a reader asks for it (:meth:`Feed.follow`), so that a store without
such readers pays for one comparison. From there on each publication that changes rows
writes their ids to a ring, and to a second ring an *entry*: the range of those ids, the
producer that pushed them, the version that they lead to, and the version after which
they are all that has changed. The record has the number of entries, so an entry counts
once the publication that wrote it is in force; the next one writes over those of one
that was rolled back.

Before either ring is written over, a word says so, and no rollback takes that back:
then some of the past is gone that might have been kept, and nothing is read that is not
there. A reader that asks for changes since a version that the rings have lost gets all
rows.

Nothing here is freed. A feed that no reader has asked for a whole ring of entries is
off again: all entries that readers have seen are gone by then.

A round that is withdrawn was told already, and its rows read otherwise now. Its entries
are the last ones; they get the version of the withdrawal, and so are told again. That
may stop half-way: then some are told again without need.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from daskps.errors import LayoutError
from daskps.limits import MOST_PUSHED_ROWS
from daskps.shards.memory.format import VERSION, integers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.shards.memory.format import Record
    from daskps.typing import Array

#: Words of a feed: whether it is on; how many ids its ring has room for; the number of
#: its first entry, and the version that was in force then; below which place in the
#: ring of ids, and below which number of an entry, all may have been written over; how
#: many entries there were when a reader asked last; the flip of the table's last change
#: when the feed began: no version tells of slots that begin anew.
HEAD_WORDS: Final = 8
ON, ROOM, FIRST, SINCE, LOST_IDS, LOST, ASKED, BEGAN = range(8)
#: Words of an entry.
ENTRY_WORDS: Final = 5
START, STOP, BY, TO, AFTER = range(ENTRY_WORDS)
#: Ids in a ring: at least and at most, and one for so many rows. Where more of the
#: table has changed it is as well to read all of it.
_FEWEST_IDS: Final = 32
_MOST_IDS: Final = 2**19
_ROWS_AN_ID: Final = 4
#: Entries: one for so many ids.
_IDS_AN_ENTRY: Final = 16
_FEWEST_ENTRIES: Final = 16
#: Entries of the first ring of ids of an unbounded table.
FIRST_IDS: Final = 1024
#: Of how many entries a reader looks at first, and how many times as many then.
_LOOKED_AT: Final = 64
_MORE: Final = 16


def room_of(n_rows: int) -> int:
    """Return how many ids are kept of a table with so many rows.

    Of one that no state has all rows of it is those of any push at least.
    """
    fewest = MOST_PUSHED_ROWS if n_rows > MOST_PUSHED_ROWS else _FEWEST_IDS
    return min(max(n_rows // _ROWS_AN_ID, fewest), _MOST_IDS)


def entries_of(room: int) -> int:
    """Return how many entries go with a ring of so many ids."""
    return max(room // _IDS_AN_ENTRY, _FEWEST_ENTRIES)


class MoreMemory(Protocol):
    """Has more memory."""

    def take(self, parts: Sequence[Array]) -> None:
        """Have memory behind these, all zeros; LayoutError where there is none."""


class Feed:
    """The memory of the feed of one table.

    Parameters
    ----------
    ordinal : int
        Number of the table in its shard.
    head : ndarray, shape (8,), int64
        Its words.
    entries : ndarray, shape (n, 5), int64
        The ring of entries.
    ids : ndarray, int64
        The ring of ids.
    """

    def __init__(
        self, ordinal: int, *, head: Array, entries: Array, ids: Array
    ) -> None:
        self._at, self.head = ordinal, integers(head)
        self._entries, self._words, self._ids = entries, integers(entries), ids

    @property
    def is_on(self) -> bool:
        """Whether changes are noted."""
        return self.head[ON] != 0

    @property
    def began(self) -> int:
        """The flip after which it has all changes, as far as it keeps them."""
        return self.head[BEGAN]

    def begin(self, room: int) -> None:
        """Say how many ids it has memory for, in memory that is all zeros."""
        self.head[ROOM] = room

    @property
    def nbytes(self) -> int:
        """Bytes of memory that both rings have."""
        room = self.head[ROOM]
        return 8 * (room + ENTRY_WORDS * entries_of(room))

    def note(self, record: Record, ids: Array, by: int) -> None:
        """Note ids whose rows change, in the publication that writes a record.

        Parameters
        ----------
        record : Record
            Of that publication; it has its version.
        ids : ndarray, int64
            Of the user.
        by : int
            The producer whose push it is, 0 for no producer's.
        """
        if not len(ids):
            return
        head, words, told = self.head, self._words, record.told
        n = told[self._at]
        room = head[ROOM]
        most = entries_of(room)
        if n - head[ASKED] >= most:
            self.stop()
            return
        start, after = 0, head[SINCE]
        if n > head[FIRST]:
            last = (n - 1) % most * ENTRY_WORDS
            start, after = words[last + STOP], words[last + TO]
        stop = start + len(ids)
        # Before the first of them is written over.
        head[LOST_IDS] = max(head[LOST_IDS], stop - room)
        head[LOST] = max(head[LOST], n + 1 - most)
        at = n % most * ENTRY_WORDS
        words[at + START], words[at + STOP], words[at + BY] = start, stop, by
        words[at + TO], words[at + AFTER] = record.plain[VERSION], after
        if len(ids) <= room:
            at = start % room
            rest = room - at
            self._ids[at : at + min(len(ids), rest)] = ids[:rest]
            if len(ids) > rest:
                self._ids[: len(ids) - rest] = ids[rest:]
        told[self._at] = n + 1

    def follow(self, record: Record, n_rows: int, memory: MoreMemory | None) -> None:
        """Note changes from here on, if it does not; under the lock, by the shard's owner.

        Parameters
        ----------
        record : Record
            The one in force.
        n_rows : int
            How many rows its table has now.
        memory : Memory, optional
            Where more memory comes from.
        """
        head, wanted = self.head, min(room_of(n_rows), len(self._ids))
        grows = memory is not None and wanted >= 2 * head[ROOM]
        if head[ON] and not grows:
            return
        # First: else changes would be looked for in another ring than they are in.
        head[ON] = 0
        if memory is not None and grows:
            self._grow(memory, wanted)
        head[FIRST] = head[ASKED] = record.told[self._at]
        head[SINCE] = record.plain[VERSION]
        head[BEGAN] = int(record.changed[self._at - len(record.told)])
        head[LOST_IDS] = head[LOST] = 0
        head[ON] = 1

    def _grow(self, memory: MoreMemory, wanted: int) -> None:
        """Take memory for more ids; where there is none, less of the past is kept."""
        now = self.head[ROOM]
        entries = self._entries[entries_of(now) : entries_of(wanted)]
        with contextlib.suppress(LayoutError):
            memory.take([self._ids[now:wanted], entries])
            self.head[ROOM] = wanted

    def stop(self) -> None:
        """Note no more, and forget what was: somebody may ask again."""
        self.head[ON] = 0

    def again(self, old: Record, record: Record) -> None:
        """Tell once more what the publication in force has told, which is withdrawn.

        Parameters
        ----------
        old : Record
            The one in force.
        record : Record
            That of the withdrawal, which has its version.
        """
        n = record.told[self._at] = old.told[self._at]
        if not self.is_on:
            return
        head, words = self.head, self._words
        most = entries_of(head[ROOM])
        for number in range(n - 1, max(head[FIRST], head[LOST]) - 1, -1):
            at = number % most * ENTRY_WORDS
            # Higher where a process died at this.
            if words[at + TO] < old.plain[VERSION]:
                break
            words[at + BY], words[at + TO] = 0, record.plain[VERSION]

    def read(self, record: Record, since: int, by: int) -> Array | None:
        """Return the ids of rows that have changed since a version; None where it is gone.

        Parameters
        ----------
        record : Record
            The one in force.
        since : int
            The version.
        by : int
            The producer whose own changes are left out; 0 leaves out none.

        Returns
        -------
        ndarray of int64 or None
            In ascending order, each once. Of a reader without the lock anything, where
            rows were changed meanwhile.
        """
        now, n, head = record.plain[VERSION], record.told[self._at], self.head
        if not self.is_on or since > now:
            return None
        head[ASKED] = n
        if since == now:
            return np.empty(0, np.int64)
        entries = self._newer(since, n)
        return None if entries is None else self._ids_of(entries, by)

    def _newer(self, since: int, n: int) -> Array | None:
        """Return the entries after a version, of `n`; None where some are gone."""
        head = self.head
        most = entries_of(head[ROOM])
        first, looked_at = max(head[FIRST], head[LOST], n - most), _LOOKED_AT
        while True:
            start = max(first, n - looked_at)
            entries = self._entries[np.arange(start, n) % most]
            known = np.flatnonzero(entries[:, TO] <= since)
            if len(known):
                return entries[known[-1] + 1 :]
            if start == first:
                break
            looked_at *= _MORE
        after = entries[0, AFTER] if len(entries) else head[SINCE]
        return entries if after <= since else None

    def _ids_of(self, entries: Array, by: int) -> Array | None:
        """Return what entries that follow one another tell; None where some is gone."""
        if not len(entries):
            return np.empty(0, np.int64)
        lengths = entries[:, STOP] - entries[:, START]
        start, stop, room = (
            int(entries[0, START]),
            int(entries[-1, STOP]),
            len(self._ids),
        )
        # A reader without the lock may have found anything.
        is_run = (lengths >= 0).all() and lengths.sum() == stop - start <= room
        if start < self.head[LOST_IDS] or not is_run:
            return None
        ids = self._ids[np.arange(start, stop) % self.head[ROOM]]
        others = (entries[:, BY] != by) | (by == 0)
        return np.unique(ids if others.all() else ids[np.repeat(others, lengths)])
