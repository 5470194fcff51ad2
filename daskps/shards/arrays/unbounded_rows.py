"""Rows of an unbounded table: which id has which row, and what a new one begins with.

An index in the shard's memory says which row an id has
(:mod:`daskps.kernels.row_index`); the rows themselves are changed by number, as those
of other tables are. The facts about ids (keys, states, what is free, the index) are
words, and those that change go to a log of their own with an undo word of its own: both
words are of the same flip, and what they log is different memory.

A row that nobody has had is not in force, so it gets its first values without a log.
One that another id has lost is logged first: readers of the publication before want it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from daskps.errors import PushRejectedError
from daskps.kernels import index_probe
from daskps.kernels.index_memory import SWEPT, SWEPT_WORDS
from daskps.kernels.row_index import NoRoomError, RowIndex
from daskps.kernels.row_moves import scatter
from daskps.kernels.words_log import WordsLog
from daskps.layout.tables import UnboundedTable
from daskps.row_init import initial_rows
from daskps.shards.arrays.row_operations import (
    RowUpdate,
    entries_of,
    flip_of,
    undo_word,
)

if TYPE_CHECKING:
    from daskps.layout.tables import UnboundedPiece
    from daskps.shards.arrays.row_operations import RowBuffers
    from daskps.typing import Array

#: Words that a table has for itself: two undo words, of rows and of words; how many
#: entries both logs have memory for; how many entries of the side of the index that
#: comes next are zeros; how many each side has memory for; the flip that put a side in
#: force last.
ROWS_UNDO: Final = 0
WORDS_UNDO: Final = 1
LOG_ROOM: Final = 2
WORDS_ROOM: Final = 3
READY: Final = 4
SIDE_ROOM: Final = 5
SWITCHED: Final = 7
#: Of fewer ids a look-up is no more work than to see whether they are the same; what
#: was found of more is too much memory to keep.
FEWEST_LOOKED: Final = 256
MOST_LOOKED: Final = 2**17
_NOBODY = np.empty(0, np.int64)


class Lookup(NamedTuple):
    """The findings of a read, for a push of the same ids that comes next."""

    #: The row sequence of the shard, before and after: every change of rows changes it.
    sequence: int
    #: A copy: the caller may write others into the array.
    ids: Array
    rows: Array
    since: int


class KnownIds(NamedTuple):
    """The facts about some ids of an unbounded table, but for the values of their rows."""

    #: Those that have rows, and the state of each row.
    ids: Array
    states: Array
    #: Those that have none; and of these the ones that were counted, and how often.
    without: Array
    counted: Array
    counts: Array
    #: How many ids have got a row in the shard, and have lost it to others.
    came: Array


class UnboundedRows:
    """The rows that the piece of an unbounded table has, in the memory of its shard.

    Parameters
    ----------
    piece : UnboundedPiece
        The piece.
    words : ndarray, int64
        All of the memory.
    places : ndarray, shape (10,), int64
        Where the areas of the index are in it.
    own : ndarray, shape (8,), int64
        The words that the table has for itself.
    log : ndarray, int64
        The log of words.
    slot_init : tuple of float
        The initial value of each slot.
    """

    def __init__(
        self,
        piece: UnboundedPiece,
        *,
        words: Array,
        places: Array,
        own: Array,
        log: Array,
        slot_init: tuple[float, ...],
    ) -> None:
        self.piece, self.of = piece, piece.of
        self.own, self.places = own, places
        self._words, self.log, self._slot_init = words, log, slot_init
        #: Found by the last read of this process; the push that uses it takes it.
        self.looked: Lookup | None = None
        self.keys, self.state = (
            self._area(area) for area in (index_probe.KEYS, index_probe.STATE)
        )
        self._use(None)

    def _use(self, cache_dir: str | None) -> None:
        """Keep compiled loops in a folder from here on."""
        self._cache_dir = cache_dir
        self.index = RowIndex(self._words, self.places, cache_dir=cache_dir)
        self.head = self.index.head

    @property
    def cache_dir(self) -> str | None:
        """Where compiled loops are kept."""
        return self._cache_dir

    @cache_dir.setter
    def cache_dir(self, value: str | None) -> None:
        if value != self._cache_dir:
            self._use(value)

    def _area(self, area: int) -> Array:
        start, n = self.places[2 * area : 2 * area + 2].tolist()
        return self._words[start : start + n]

    def entries(self, side: int) -> Array:
        """Return all words of a side of the index that may ever be used."""
        return self._area(index_probe.SIDE_0 + side)

    @property
    def hash_seed(self) -> int:
        """The seed with which the ids of its table are hashed."""
        table = self.piece.table
        return table.hash_seed if isinstance(table, UnboundedTable) else 0

    @property
    def side(self) -> int:
        """The side of the index that is in force."""
        return int(self.head[index_probe.SIDE]) & 1

    @property
    def slots(self) -> tuple[int, int]:
        """How many entries the side in force has, and the one that is being built or 0."""
        head, side = self.head, self.side
        at = index_probe.SLOTS_0
        return int(head[at + side]), int(head[at + 1 - side])

    @property
    def is_built(self) -> bool:
        """Whether the other side of the index has all entries, to be put in force."""
        now, other = self.slots
        return other > 0 and int(self.head[index_probe.BUILT]) == 2 * now

    @property
    def n_rows(self) -> int:
        """How many ids have rows, those too whose time is over."""
        return int(self.head[index_probe.USED])

    @property
    def is_stamped(self) -> bool:
        """Whether a row's state is the clock of its last push."""
        return bool(self.of.ttl or self.of.max_rows)

    def since(self, clock: int) -> int:
        """Return the lowest state of a row that is there, at a clock of the table."""
        return max(0, clock - self.of.ttl + 1) if self.of.ttl else 0

    def ids(self, since: int) -> tuple[Array, Array]:
        """Return the ids that have rows, ascending, and these; `since` as of `find`."""
        return self.index.ids(since=since)

    def counts(self, since: int = 0) -> dict[str, int]:
        """Return how many rows and candidates there are, came, and had to go."""
        head, rows = self.head, self.n_rows
        if since > 1:
            rows = int(np.count_nonzero(self.state[: self.end] >= since))
        return {
            "rows": rows,
            "candidates": int(head[index_probe.CANDIDATES]),
            "admissions": int(head[index_probe.ADMITTED]),
            "evictions": int(head[index_probe.EVICTED]),
        }

    @property
    def end(self) -> int:
        """Rows from here on have never been anybody's."""
        return self.index.end

    def find(self, ids: Array, since: int = 0) -> Array:
        """Return the row of each id, -1 where it has none.

        Rows whose state is below `since` are none.
        """
        rows = np.empty(len(ids), np.int64)
        self.index.look_up(ids, rows, since=since)
        return rows

    def find_again(self, ids: Array, since: int, sequence: int) -> Array:
        """As :meth:`find`, under the lock at a row sequence; a read may have found them."""
        looked, self.looked = self.looked, None
        if (
            looked is not None
            and looked.sequence == sequence
            and looked.since == since
            and len(looked.ids) == len(ids)
            and np.logical_and.reduce(looked.ids == ids)
        ):
            return looked.rows
        return self.find(ids, since)

    def find_before(self, ids: Array, since: int = 0) -> Array:
        """As :meth:`find`, before the publication whose log there is."""
        n = entries_of(int(self.own[WORDS_UNDO]))
        return self.index.rows_before(self._logged(0), n, ids, since=since)

    def begin(self, flip: int) -> None:
        """Say whose words the log has from here on."""
        self.own[WORDS_UNDO] = undo_word(flip, 0)

    def _logged(self, flip: int) -> WordsLog:
        """Return the log, with 0 that of the last publication.

        Else a larger index that is ready is in force from here on.
        """
        own = self.own
        entries = self.log[: 2 * int(own[WORDS_ROOM])]
        begin = entries_of(int(own[WORDS_UNDO])) if flip else 0
        word = own[WORDS_UNDO : WORDS_UNDO + 1]
        log = WordsLog(entries, word, undo_word(flip, 0), begin)
        if flip and self.is_built:
            log = log._replace(begin=self.index.switch(log))
            own[SWITCHED] = flip
        return log

    def change(
        self, update: RowUpdate, target: RowBuffers, flip: int, clock: int
    ) -> tuple[RowUpdate, Array]:
        """Change which rows there are, as an update of the publication of a flip asks.

        Ids that have no row get one, or all lose theirs. The update is that push of the
        table which `clock` counts.

        Returns
        -------
        update : RowUpdate
            The update that is left to do, by numbers of rows.
        gone : ndarray, int64
            The ids that have lost their rows, or what was counted of them.

        Raises
        ------
        PushRejectedError
            Where there are more changes than the log takes: then the publication has to
            be rolled back.
        """
        try:
            log = self._logged(flip)
            if update.forget:
                rows, _ = self.index.remove(update.ids, log)
                # Those that were only counted too: a copy has to know.
                return update._replace(ids=_NOBODY), update.ids[rows != -1]
            update, gone = self._insert(update, target, log, flip=flip, clock=clock)
            if self.of.ttl and not self.of.max_rows:
                n, since = SWEPT + 2 * len(update.ids), self.since(clock)
                if since > 1:
                    gone = np.concatenate([gone, *self._sweep(n, since, flip)])
            return update, gone
        except NoRoomError as error:
            raise PushRejectedError(
                f"{len(update.ids)} rows of table {self.piece.table.name[:60]!r} change "
                f"more words of its index than their log takes; nothing was applied, "
                f"push them in parts"
            ) from error

    def known(self, ids: Array) -> tuple[KnownIds, Array]:
        """Return what there is about ids, and the rows of those that have some.

        Under the lock.
        """
        rows = self.find(ids)
        there = rows >= 0
        rows, without = rows[there], ids[~there]
        counts = self.index.counts(without)
        came = self.head[[index_probe.ADMITTED, index_probe.EVICTED]]
        is_counted = counts > 0
        counted = without[is_counted], counts[is_counted]
        return KnownIds(ids[there], self.state[rows], without, *counted, came), rows

    def bring(self, known: KnownIds, flip: int) -> Array:
        """Have ids be what another shard knows of them, in a publication with room for it.

        Returns
        -------
        ndarray of int64
            The row of each id that has one; nothing is written to the new ones.
        """
        index, log = self.index, self._logged(flip)
        _, n = index.remove(known.without, log)
        rows, log = self.find(known.ids), log._replace(begin=n)
        stamp = 1 + int(known.states.max(initial=0)) if self.is_stamped else 0
        # Alone: the log has room for one state of each of the others.
        new = np.flatnonzero(rows < 0)
        taken, their_rows = known.ids[new], rows[new]
        log = log._replace(begin=index.take(taken, their_rows, log, stamp=stamp).n)
        rows[new] = their_rows
        if self.is_stamped:
            where = index_probe.STATE, rows, known.states
            log = log._replace(begin=index.set_words(*where, log))
        n = index.set_counts(known.counted, known.counts, log)
        log = log._replace(begin=n)
        at = np.array([index_probe.ADMITTED, index_probe.EVICTED])
        index.set_words(index_probe.HEAD, at, known.came, log)
        return rows

    def _insert(
        self,
        update: RowUpdate,
        target: RowBuffers,
        log: WordsLog,
        *,
        flip: int,
        clock: int,
    ) -> tuple[RowUpdate, Array]:
        """Give rows to ids that have none; of those that get none nothing is left."""
        rows, ids, since = update.rows, update.ids, self.since(clock - 1)
        if rows is None:
            rows = self.find(ids, since)
        is_there = not len(rows) or np.minimum.reduce(rows) >= 0
        if is_there and not self.is_stamped:
            return update._replace(ids=rows, rows=None), _NOBODY
        if since > 1:
            log = self._forget_old(ids[rows < 0], log)
        taken = self.index.take(
            ids,
            rows,
            log,
            stamp=clock if self.is_stamped else 0,
            # A row has the values that are assigned to it from then on.
            admit=1 if update.replace else self.of.admit_after,
            since=since,
        )
        if len(taken.fresh):
            fresh = taken.fresh
            self._fill(ids[fresh], rows[fresh], taken.kept, target, flip=flip)
        if not len(rows) or np.minimum.reduce(rows) >= 0:
            return update._replace(ids=rows, rows=None), taken.gone
        there = rows >= 0
        at = np.arange(len(rows)) if update.at is None else update.at
        return update._replace(ids=rows[there], at=at[there], rows=None), taken.gone

    def _forget_old(self, ids: Array, log: WordsLog) -> WordsLog:
        """Forget those of some ids whose rows' time is over: they begin as others do."""
        old = ids[self.find(ids) >= 0]
        if not len(old):
            return log
        _, n = self.index.remove(old, log)
        return log._replace(begin=n)

    def _sweep(self, n: int, since: int, flip: int) -> list[Array]:
        """Take back the places of some rows whose time is over; return their ids.

        Where there is room in the log: nobody sees whether they are still there.
        """
        gone: list[Array] = []
        end = self.end
        left, at = min(n, end), int(self.head[index_probe.HAND])
        while left > 0:
            at = at if at < end else 0
            stop, log = min(at + left, end), self._logged(flip)
            how = {"part": SWEPT, "room": SWEPT_WORDS}
            ids, found = self.index.expire(at, stop, since, log, **how)
            gone.append(ids)
            left, at = left - (stop - at) if found == stop else 0, found
        self.head[index_probe.HAND] = at
        return gone

    def _fill(
        self, ids: Array, rows: Array, kept: Array, target: RowBuffers, *, flip: int
    ) -> None:
        """Write the first values of new rows, and of their slots."""
        table, of, (w, slots, _) = self.piece.table, self.piece.of, target.table
        kind = ids, (table.dim, w.dtype), of.init
        cache_dir = self._cache_dir
        values = initial_rows(*kind, name=table.name, seed=of.seed, cache_dir=cache_dir)
        new = rows
        if kept.any():
            first = RowUpdate(rows[kept], values[kept], replace=True)
            first.apply(target, flip, cache_dir)
            new, values = rows[~kept], values[~kept]
        scatter(w, new, values, cache_dir=cache_dir)
        for slot, value in zip(slots, self._slot_init, strict=True):
            slot[rows] = value

    def roll_back(self) -> None:
        """Put back what the log of words has, the newest first."""
        index, word = self.index, int(self.own[WORDS_UNDO])
        index.restore(self._logged(0), entries_of(word))
        if index.is_building:
            # It may have been given what is taken back, by a step between publications.
            self.own[READY] = 0
            index.start(0)
        self.own[WORDS_UNDO] = undo_word(flip_of(word), 0)
