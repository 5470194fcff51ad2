"""The rows that a piece of a table has, by id: looking them up, and changing them.

All of it is words in the memory of a shard, in the areas of
:mod:`daskps.kernels.index_probe`; each process that maps the memory can use it. Changes
are logged (:mod:`daskps.kernels.words_log`) and rolled back with the publication that they
belong to, the index too: nothing is looked at twice to be sure of it.

The index has two sides. One is in force; when it fills up, the other one, larger, is built a
part at a time between publications, while changes go to both, and then it is in force.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from daskps.kernels import index_changes as changes
from daskps.kernels import index_probe as at
from daskps.kernels import scratch, words_log
from daskps.kernels.index_memory import IndexMemory
from daskps.kernels.inputs import ID, check_input, check_output
from daskps.kernels.words import plain

if TYPE_CHECKING:
    from daskps.kernels.words_log import WordsLog
    from daskps.typing import Array

_WHY = {
    changes.NO_LOG: "log",
    changes.NO_ROW: "rows",
    changes.NO_SLOT: "slots",
}


class NoRoomError(Exception):
    """There is no room for what was asked: `what` is "rows", "slots" or "log".

    Some words may have changed; all of them are in the log.
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"no room for more {what} of a table")
        self.what = what


class TakenRows(NamedTuple):
    """The result of giving rows to ids."""

    #: Positions of those whose rows are new and get their first values.
    fresh: Array
    #: For each of them, whether what its row holds is in force still: log it first.
    kept: Array
    #: Ids that lost their rows for others.
    gone: Array
    #: Entries of the log.
    n: int


LOOPS: Final = (
    at.look_up,
    at.counts,
    changes.take,
    changes.remove,
    changes.expire,
    changes.set_counts,
    changes.set_words,
    changes.copy_entries,
    changes.enter_new,
    words_log.put,
    words_log.put_back,
)
_module = functools.cache(functools.partial(plain, LOOPS))


class RowIndex(IndexMemory):
    """The rows of a table piece, by id.

    Parameters
    ----------
    words : ndarray, int64
        Memory that has its areas.
    places : ndarray, shape (10,), int64
        Where each area begins in it, and how many words it has: those that may ever be used.
    cache_dir : str, optional
        Where the compiled loops are kept, as in `build`.

    Raises
    ------
    ValueError
        If the areas are not inside of the memory, or are none.
    """

    def __init__(
        self, words: Array, places: Array, *, cache_dir: str | None = None
    ) -> None:
        super().__init__(words, places)
        self._cache_dir = cache_dir

    def look_up(self, ids: Array, rows: Array, *, since: int = 0) -> int:
        """Find the row of each id; without the lock it may be a wrong one, but it is one.

        Parameters
        ----------
        ids : ndarray, shape (k,), int64
            Any; contiguous.
        rows : ndarray, shape (k,), int64
            Gets the row of each, -1 where it has none.
        since : int
            The lowest state of a row that counts; a row with a lower one is none.

        Returns
        -------
        int
            How many have no row.

        Raises
        ------
        ValueError
            If an array is not as described.
        """
        _check(ids, rows)
        loop = _module(self._cache_dir).function("look_up")
        missing: int = loop(self.words, self.places, ids, rows, since)
        return missing

    def rows_before(
        self, log: WordsLog, n: int, ids: Array, *, since: int = 0
    ) -> Array:
        """Return the rows that ids had before the first `n` entries of a log.

        Parameters
        ----------
        log : WordsLog
            The log; all that has changed since is in it.
        n : int
            How many entries count.
        ids : ndarray, shape (k,), int64
            Any; contiguous.
        since : int
            As in `look_up`, of then.

        Returns
        -------
        ndarray, shape (k,), int64
            A row, or -1.
        """
        found = np.empty(len(ids), np.int64)
        self.look_up(ids, found, since=since)
        keys, old_keys = words_log.before(log, n, at.KEYS)
        states, old_states = words_log.before(log, n, at.STATE)
        heads, old_heads = words_log.before(log, n, at.HEAD)
        # Of all rows only those in the log are looked at: there may be any number.
        rows = np.union1d(keys, states)
        key, state = self._keys[rows], self._state[rows]
        key[np.searchsorted(rows, keys)] = old_keys
        state[np.searchsorted(rows, states)] = old_states
        end = self.end
        if not self.head[at.BUCKETS] and (heads == at.END).any():
            end = int(old_heads[heads == at.END][0])
        found[np.isin(found, rows) | (found >= end)] = -1
        there = (state >= max(1, since)) & (rows < end)
        rows, key = rows[there], key[there]
        if len(rows):
            order = np.argsort(key, kind="stable")
            near = np.minimum(np.searchsorted(key[order], ids), len(order) - 1)
            is_there = key[order[near]] == ids
            found[is_there] = rows[order[near[is_there]]]
        return found

    def take(
        self,
        ids: Array,
        rows: Array,
        log: WordsLog,
        *,
        stamp: int = 0,
        admit: int = 1,
        since: int = 0,
    ) -> TakenRows:
        """Give rows to ids that have none, and say that all of them were pushed.

        Parameters
        ----------
        ids : ndarray, shape (k,), int64
            Each once.
        rows : ndarray, shape (k,), int64
            The findings of `look_up`; nothing has changed since. Where it was -1
            it becomes the new row, and stays -1 where the id gets none; so it becomes where
            a row went to another id.
        log : WordsLog
            Where the words go that change.
        stamp : int
            The state of the rows from now on, more than that of earlier pushes; 0 in
            tables that need no states.
        admit : int
            How often an id is pushed before it gets a row, and then that often.
        since : int
            As in `look_up`.

        Returns
        -------
        TakenRows
            The new rows, by their positions.

        Raises
        ------
        NoRoomError
            If there are too few rows, entries of the index or of the log. All changes
            until then are in the log.
        ValueError
            If an array is not as described, a row is none of the piece, or an id belongs
            to another shard.
        """
        _check(ids, rows)
        k = len(ids)
        told, book = scratch.empty(2 + 3 * k, np.int64), _book(log, stamp, admit, since)
        self._change("take", ids, rows, log.entries, book, told)
        (n_fresh, n_gone), (fresh, kept, gone) = told[:2], told[2:].reshape(3, k)
        n = int(book[words_log.N])
        return TakenRows(fresh[:n_fresh], kept[:n_fresh] != 0, gone[:n_gone], n)

    def remove(self, ids: Array, log: WordsLog) -> tuple[Array, int]:
        """Forget ids, those that are only counted too.

        Parameters
        ----------
        ids : ndarray, shape (k,), int64
            Any.
        log : WordsLog
            Where the words go that change.

        Returns
        -------
        rows : ndarray, shape (k,), int64
            The row that each had, -1 for none, less for one that was only counted.
        n : int
            Entries of the log.

        Raises
        ------
        NoRoomError
            If there is no room in the log.
        ValueError
            If an array is not as described.
        """
        rows = np.empty(len(ids), np.int64)
        _check(ids, rows)
        book = _book(log)
        self._change("remove", ids, rows, log.entries, book)
        return rows, int(book[words_log.N])

    def counts(self, ids: Array) -> Array:
        """Return how often each id was pushed that has no row yet; 0 for others.

        Parameters
        ----------
        ids : ndarray, shape (k,), int64
            Any; contiguous.

        Returns
        -------
        ndarray, shape (k,), int64
            The counts.
        """
        found = np.empty(len(ids), np.int64)
        _check(ids, found)
        _module(self._cache_dir).function("counts")(self.words, self.places, ids, found)
        return found

    def set_counts(self, ids: Array, counts: Array, log: WordsLog) -> int:
        """Have ids that are not there be counted so often.

        Parameters
        ----------
        ids, counts : ndarray, shape (k,), int64
            Each id once, and how often it was pushed.
        log : WordsLog
            Where the words go that change.

        Returns
        -------
        int
            Entries of the log.

        Raises
        ------
        NoRoomError
            If there is no room in the log or the index.
        """
        check_input(ids, ID, (len(ids),))
        check_input(counts, ID, ids.shape)
        book = _book(log)
        self._change("set_counts", ids, counts, log.entries, book)
        return int(book[words_log.N])

    def set_words(self, area: int, where: Array, values: Array, log: WordsLog) -> int:
        """Change words of an area: what is counted, or the states of rows.

        Parameters
        ----------
        area : int
            Its number, as in :mod:`daskps.kernels.index_probe`.
        where, values : ndarray, shape (k,), int64
            The words by their number in the area, and what they become.
        log : WordsLog
            Where the words go that change.

        Returns
        -------
        int
            Entries of the log.

        Raises
        ------
        NoRoomError
            If there is no room in the log.
        ValueError
            If a word is none of the area.
        """
        check_input(where, ID, (len(where),))
        check_input(values, ID, where.shape)
        if (
            len(where)
            and not 0 <= where.min() <= where.max() < self.places[2 * area + 1]
        ):
            raise ValueError(f"words {where.min()} to {where.max()} of area {area}")
        book = _book(log)
        self._change("set_words", area, where, values, log.entries, book)
        return int(book[words_log.N])

    def expire(
        self,
        low: int,
        high: int,
        since: int,
        log: WordsLog,
        *,
        part: int = 1,
        room: int = 0,
    ) -> tuple[Array, int]:
        """Forget rows of a range whose state is below one.

        Parameters
        ----------
        low, high : int
            Rows from `low` to `high - 1`, as far as any were handed out.
        since : int
            The lowest state that stays.
        log : WordsLog
            Where the words go that change.
        part, room : int
            Before each so many rows that it forgets it stops where the log has room for
            fewer entries than that.

        Returns
        -------
        ids : ndarray, int64
            Those that were forgotten.
        stop : int
            The first row that was not looked at.

        Raises
        ------
        NoRoomError
            If there is no room in the log.
        """
        low, high = max(0, low), min(high, self.end)
        told, book = (
            scratch.empty(2 + max(0, high - low), np.int64),
            _book(log, 0, 1, since),
        )
        book[changes.PART], book[changes.ROOM] = part, room
        self._change("expire", low, high, log.entries, book, told)
        stop, n = told[:2].tolist()
        return told[2 : 2 + n], stop

    def _change(self, loop: str, *args: Any) -> None:
        """Run a loop that changes rows."""
        why = _module(self._cache_dir).function(loop)(self.words, self.places, *args)
        if why in _WHY:
            raise NoRoomError(_WHY[why])
        if why < 0:
            raise ValueError("a row or an id that the piece of a table cannot have")

    def restore(self, log: WordsLog, n: int) -> None:
        """Put back what words were before the first `n` entries of a log.

        Parameters
        ----------
        log : WordsLog
            The log.
        n : int
            How many entries count.

        Raises
        ------
        ValueError
            If an entry is outside of the areas, or the log has fewer. All newer entries
            have been put back.

        Notes
        -----
        Where a process is killed meanwhile, another one does it again, with the same result.
        """
        words_log.check_log(log, n)
        loop = _module(self._cache_dir).function("put_back")
        if (bad := loop(self.words, self.places, log.entries, n)) >= 0:
            raise ValueError(
                f"entry {bad} of a log of words names {log.entries[2 * bad]:#x}, which "
                f"is outside of the areas {self.places.tolist()}"
            )

    def fill(self, ids: Array, values: Array) -> None:
        """Enter ids that are not there, before anybody reads the index.

        Parameters
        ----------
        ids : ndarray, shape (k,), int64
            Each once; contiguous. The side in force has an entry for each of them.
        values : ndarray, shape (k,), int64
            The row of each plus 1, or below 0 how often it has been counted.

        Raises
        ------
        ValueError
            If one is there already, or there are too few entries.
        """
        loop = _module(self._cache_dir).function("enter_new")
        if (k := loop(self.words, self.places, ids, values)) >= 0:
            raise ValueError(f"id {ids[k]} is there twice, or there is no entry for it")

    def build(self, at_most: int) -> bool:
        """Copy some entries to the other side, between publications.

        Parameters
        ----------
        at_most : int
            How many entries of the side in force it looks at, at least 1.

        Returns
        -------
        bool
            Whether it has all of them: `switch` comes next.

        Raises
        ------
        ValueError
            If the process before was killed here: `start` again, with memory that is zeros;
            or if no side is being built.
        """
        if not self.is_building or at_most < 1:
            raise ValueError(f"no side of an index to copy {at_most} entries to")
        loop = _module(self._cache_dir).function("copy_entries")
        done = loop(self.words, self.places, at_most)
        if done < 0:
            raise ValueError("the other side of an index was left half-way")
        return bool(done)

    def switch(self, log: WordsLog) -> int:
        """Put the other side in force, in a publication.

        Parameters
        ----------
        log : WordsLog
            Where the words go that change. The side that was in force keeps its entries
            until this publication cannot be rolled back any more; then its memory may be
            given back.

        Returns
        -------
        int
            Entries of the log.

        Raises
        ------
        NoRoomError
            If there is no room in the log.
        ValueError
            If the other side does not have all entries.
        """
        side = int(self.head[at.SIDE]) & 1
        slots = int(self.head[at.SLOTS_0 + side])
        if not self.is_building or self.head[at.BUILT] != 2 * slots:
            raise ValueError("the other side of an index does not have all entries")
        put, book = _module(self._cache_dir).function("put"), _book(log)
        for where, value in (
            (at.SIDE, 1 - side),
            (at.SLOTS_0 + side, 0),
            (at.BUILT, 0),
        ):
            put(self.words, self.places, at.HEAD, where, value, log.entries, book)
        n = int(book[words_log.N])
        if n < 0:
            raise NoRoomError(_WHY[changes.NO_LOG])
        return n


def _book(log: WordsLog, stamp: int = 0, admit: int = 1, since: int = 0) -> Array:
    words_log.check_log(log, log.begin)
    more = [0] * (changes.BOOK_WORDS - changes.BEGIN - 1)
    return log.book(stamp, admit, since, log.begin, *more)


def _check(ids: Array, rows: Array) -> None:
    check_input(ids, ID, (len(ids),))
    check_output(rows, ID, ids.shape, "rows")
