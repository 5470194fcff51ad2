"""The memory of an index of rows, as it is: its areas, and what the words in them say.

Nothing here is compiled. :mod:`daskps.kernels.row_index` changes rows and ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from daskps.kernels import index_probe as at
from daskps.kernels import words_log
from daskps.kernels.id_hash import hashes

if TYPE_CHECKING:
    from daskps.typing import Array

#: A larger index is built when one of so many entries is in use. Of 10 M rows one id took
#: Rows that a push looks at for those whose time is over, at least, and beside two for each
#: id that it names; it forgets so many at a time, as the log takes.
SWEPT: Final = 64
#: Entries of the log of words that an id takes which comes or goes, at most about.
WORDS_OF_AN_ID: Final = 40
SWEPT_WORDS: Final = SWEPT * WORDS_OF_AN_ID
#: 37 ns to find then, and 54 to 65 with two of three in use.
_FULL: Final = 2
#: Up to so many entries the next index is twice as large, then half as large again.
_SMALL: Final = 1 << 16
_WORD_MASK = (1 << 64) - 1


class IndexMemory:
    """The memory of an index of rows, by its areas.

    Parameters
    ----------
    words : ndarray, int64
        Memory that has its areas.
    places : ndarray, shape (10,), int64
        Where each area begins in it, and how many words it has: those that may ever be used.

    Raises
    ------
    ValueError
        If the areas are not inside of the memory, or are none.
    """

    def __init__(self, words: Array, places: Array) -> None:
        words_log.check(words, places)
        if len(places) != 2 * at.N_AREAS or places[1] < at.N_HEAD:
            raise ValueError(
                f"expected {at.N_AREAS} areas, got places {places.tolist()}"
            )
        self.words = words
        self.places = places
        head, keys, state = (
            words[places[2 * a] : places[2 * a] + places[2 * a + 1]]
            for a in (at.HEAD, at.KEYS, at.STATE)
        )
        self.head: Array = head
        self._keys, self._state = keys, state

    def begin(
        self,
        *,
        seed: int,
        rows: int,
        slots: int,
        max_rows: int = 0,
        buckets: int = 0,
        first_bucket: int = 0,
    ) -> None:
        """Make it one without rows, in memory that is all zeros.

        Parameters
        ----------
        seed : int
            Of the table's hash: 64 bits, with a sign or without.
        rows : int
            How many rows there is memory for.
        slots : int
            How many entries the index has.
        max_rows, buckets : int
            How many rows the whole table holds at most, and in how many buckets; 0 for any
            number.
        first_bucket : int
            The first bucket of this piece.
        """
        seed &= _WORD_MASK
        self.head[at.SEED] = seed - (seed >> 63 << 64)
        self.head[at.ROWS], self.head[at.SLOTS_0] = rows, slots
        self.head[at.MAX_ROWS], self.head[at.BUCKETS] = max_rows, buckets
        self.head[at.FIRST_BUCKET] = first_bucket

    @property
    def end(self) -> int:
        """Rows from here on have never been handed out."""
        head = self.head
        end = head[at.ROWS if head[at.BUCKETS] else at.END]
        return max(0, min(int(end), len(self._state)))

    def ids(self, *, since: int = 0) -> tuple[Array, Array]:
        """Return all ids that have rows, ascending, and their rows.

        Parameters
        ----------
        since : int
            As in `look_up`.

        Returns
        -------
        ids, rows : ndarray, int64
            As many of both.
        """
        rows = self.rows(since=since)
        ids = self._keys[rows]
        order = np.argsort(ids)  # each is there once
        return ids[order], rows[order]

    def rows(self, *, since: int = 0) -> Array:
        """Return all rows that an id has, ascending.

        Parameters
        ----------
        since : int
            As in `look_up`.

        Returns
        -------
        ndarray, int64
            Their numbers.
        """
        return np.flatnonzero(self._state[: self.end] >= max(1, since))

    def candidates(self, *, by_hash: bool = False) -> tuple[Array, Array]:
        """Return all ids that have been counted and have no rows, and their counts.

        Parameters
        ----------
        by_hash : bool
            Whether they come in the order of their hashes.

        Returns
        -------
        ids, counts : ndarray, int64
            By id, ascending, unless by hash.
        """
        if not self.head[at.CANDIDATES]:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        side = int(self.head[at.SIDE]) & 1
        start, _ = self.places[2 * (at.SIDE_0 + side) :][:2]
        n = int(self.head[at.SLOTS_0 + side])
        entries = self.words[start : start + 2 * n].reshape(n, 2)
        ids, counts = entries[entries[:, 1] < 0].T
        by = hashes(ids, int(self.head[at.SEED])) if by_hash else ids
        order = np.argsort(by, kind="stable")
        return ids[order], -counts[order]

    @property
    def slots_wanted(self) -> int:
        """How many entries the other side should have; 0 while this one will do."""
        head, side = self.head, int(self.head[at.SIDE]) & 1
        slots = int(head[at.SLOTS_0 + side])
        if (head[at.USED] + head[at.CANDIDATES]) * _FULL < slots:
            return 0
        return slots * 2 if slots < _SMALL else slots + slots // 2

    @property
    def is_building(self) -> bool:
        """Whether the other side is being built."""
        return bool(self.head[at.SLOTS_0 + 1 - (int(self.head[at.SIDE]) & 1)] > 0)

    def start(self, slots: int) -> None:
        """Begin to build the other side, between publications.

        Parameters
        ----------
        slots : int
            How many entries it has; there is memory for them, all zeros. 0 gives up what
            has been built.

        Raises
        ------
        ValueError
            If it has no room for so many, or they are too few.
        """
        head, other = self.head, 1 - (int(self.head[at.SIDE]) & 1)
        most = int(self.places[2 * (at.SIDE_0 + other) + 1]) // 2
        used = int(head[at.USED] + head[at.CANDIDATES])
        if slots and not used < slots <= most:
            raise ValueError(f"an index of {used} ids with {slots} of {most} entries")
        head[at.SLOTS_0 + other] = 0
        head[at.BUILT] = 0
        head[at.SLOTS_0 + other] = slots
