"""Longs changed in place, with a log of what they were before.

The words of one table in one shard are in *areas* of its memory. A process may be killed at
any store: so what a word was counts in the log before the word changes, as with rows in
:mod:`daskps.kernels.row_log`, and the next owner of the memory puts it back.

An entry has two words: the area and the number in it of what is changed, and what was there.
"""
# ruff: noqa: PLR0917  (compiled functions take arguments by position)

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from daskps.kernels.inputs import ID, check_output
from daskps.kernels.system import hold, store

if TYPE_CHECKING:
    from daskps.kernels.words import Ids, Long, Longs
    from daskps.typing import Array

#: Bits of an entry's first word that number a word in its area; the area is above them.
_AT_BITS = 48
_AT_MASK = (1 << _AT_BITS) - 1
#: Longs of an entry.
_ENTRY = 2
#: A book has: the address of the word that counts, the number added to it, and the
#: number of entries; the words behind these are for other modules.
_ADDRESS = 0
_BASE = 1
N: Final = 2


class WordsLog(NamedTuple):
    """Where entries go, and the word that says how many of them count."""

    #: Two words for each entry.
    entries: Array
    #: One int64; it becomes `base` plus the number of entries that count.
    word: Array
    base: int
    #: How many entries there are already.
    begin: int = 0

    def book(self, *more: int) -> Array:
        """Return what compiled loops know of it, and `more` behind that."""
        return np.array([self.word.ctypes.data, self.base, self.begin, *more], np.int64)


def put(
    words: Longs,
    places: Ids,
    area: Long,
    at: Long,
    value: Long,
    entries: Longs,
    book: Longs,
) -> None:
    """Change a word after it has been logged.

    `book` has the address of the word that counts entries, its base, and their number. That
    becomes -1 when there is no room for one, and nothing changes then or later.
    """
    n = book[N]
    if n < 0 or n * _ENTRY + 1 >= entries.size:
        book[N] = -1
        return
    to = places[_ENTRY * area] + at
    entries[n * _ENTRY] = area << _AT_BITS | at
    entries[n * _ENTRY + 1] = words[to]
    store(book[_ADDRESS], book[_BASE] + n + 1)
    hold()
    words[to] = value
    book[N] = n + 1


def put_back(words: Longs, places: Ids, entries: Ids, n: Long) -> Any:
    """Put back what the first entries have, the newest first; return a bad one, or -1."""
    for k in range(n - 1, -1, -1):
        area, at = entries[k * _ENTRY] >> _AT_BITS, entries[k * _ENTRY] & _AT_MASK
        if area < 0 or area >= places.size // _ENTRY or at >= places[_ENTRY * area + 1]:
            return k
        words[places[_ENTRY * area] + at] = entries[k * _ENTRY + 1]
    return -1


def before(log: WordsLog, n: int, area: int) -> tuple[Array, Array]:
    """Return what words of an area were before the first `n` entries of a log.

    Parameters
    ----------
    log : WordsLog
        The log.
    n : int
        How many entries count.
    area : int
        The number of the area.

    Returns
    -------
    at : ndarray, int64
        Those that have changed, ascending, each once.
    old : ndarray, int64
        The old value of each.
    """
    first, old = log.entries[: n * _ENTRY].reshape(n, _ENTRY).T
    mine = np.flatnonzero(first >> _AT_BITS == area)
    # Of several entries of a word the oldest has what it was before them all.
    at, oldest = np.unique(first[mine] & _AT_MASK, return_index=True)
    return at, old[mine[oldest]]


def check(words: Array, places: Array) -> None:
    """Refuse memory and areas that loops cannot use, or areas that are not inside.

    Parameters
    ----------
    words, places : ndarray
        As in `restore`.

    Raises
    ------
    ValueError
        If an array is of another dtype or not contiguous, or an area is outside.
    """
    for a in (words, places):
        check_output(a, ID, (a.size,), "the memory of words and their areas")
    starts, lengths = places[::_ENTRY], places[1::_ENTRY]
    if (
        len(starts) != len(lengths)
        or (places < 0).any()
        or (lengths > len(words) - starts).any()
    ):
        raise ValueError(
            f"areas from {starts.tolist()} of {lengths.tolist()} words are not inside "
            f"{len(words)} words"
        )


def check_log(log: WordsLog, n: int) -> None:
    """Refuse a log that does not have so many entries.

    Parameters
    ----------
    log : WordsLog
        The log.
    n : int
        How many entries it has to have.

    Raises
    ------
    ValueError
        If it has fewer, or is no arrays of words.
    """
    entries = log.entries
    check_output(entries, ID, (entries.size,), "a log of words")
    check_output(log.word, ID, (1,), "the word of a log of words")
    if not 0 <= n <= len(entries) // _ENTRY:
        raise ValueError(
            f"{n} entries are not in a log of words of {len(entries) // _ENTRY}"
        )
