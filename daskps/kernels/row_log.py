"""Rows changed in place, with a log of what they were before.

A process may be killed at any store: then the next owner of the memory puts back the
entries that count. So an entry counts before its row changes, and nothing else of the
table changes at all.
"""
# ruff: noqa: PLR0917  (table, ids, where their values are, values, log)

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from daskps.kernels import scratch
from daskps.kernels.compiled import module_of
from daskps.kernels.inputs import ID, check_input, check_output
from daskps.kernels.row_moves import NOWHERE, gather, scatter
from daskps.kernels.row_repeats import hash_table, spot
from daskps.kernels.rows import MOVES_SOURCE
from daskps.kernels.words import plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.kernels.words import Ids, Ints, Longs
    from daskps.typing import Array

    #: Updates copies of weights and slots, given what came for them.
    RowChange = Callable[[Array, Array, tuple[Array, ...]], object]

#: Elements that are widened or added up at a time: they stay in a second-level cache.
_BLOCK = 16_384


class TableRows(NamedTuple):
    """The rows of a table that are here, and their slots."""

    w: Array
    slots: tuple[Array, ...] = ()
    #: Id of the first of them.
    first: int = 0


class UndoLog(NamedTuple):
    """Where the rows that change are kept as they were, an entry each."""

    #: Of each entry: which row, from 0; its weights, its slots.
    rows: Array
    w: Array
    slots: tuple[Array, ...]
    #: One word. It becomes `base` and the number of entries that count.
    word: Array
    base: int
    #: The first entry to use.
    begin: int = 0


def in_blocks(
    table: TableRows,
    ids: Array,
    at: Array | None,
    data: Array,
    log: UndoLog,
    change: RowChange,
    *,
    cache_dir: str | None = None,
) -> None:
    """Change rows some thousand elements at a time, as no compiled loop can.

    Parameters
    ----------
    table, ids, at, data, log
        As in `Kernel.rows`, checked.
    change : callable
        Given copies of rows, what came for them, and copies of their slots, it
        updates the copies.
    cache_dir : str, optional
        Where the compiled loops are kept, as in `build`.
    """
    step = max(1, _BLOCK // max(1, table.w.shape[1]))
    for lo in range(0, len(ids), step):
        # A copy: the caller may change them meanwhile.
        part = np.array(ids[lo : lo + step])
        entries = slice(log.begin + lo, log.begin + lo + len(part))
        kept = [a[entries] for a in (log.w, *log.slots)]
        arrays = table.w, *table.slots
        for a, copies in zip(arrays, kept, strict=True):
            gather(a, part, copies, first=table.first, cache_dir=cache_dir)
        source = slice(lo, lo + len(part)) if at is None else at[lo : lo + step]
        given = data[source]
        log.rows[entries] = part - table.first
        mark = module_of(MOVES_SOURCE, cache_dir).function("mark")
        mark(log.word, log.base + entries.stop)
        made = [np.array(copies) for copies in kept]
        change(made[0], given, tuple(made[1:]))
        rows = log.rows[entries]
        for a, copies in zip(arrays, made, strict=True):
            scatter(a, rows, copies, cache_dir=cache_dir)


def restore(table: TableRows, log: UndoLog, n: int) -> None:
    """Put back what rows were before the first `n` entries of a log.

    Where a process is killed meanwhile, another one does it again, with the same
    result.

    Parameters
    ----------
    table : TableRows
        The rows.
    log : UndoLog
        Their log; its `begin` and `base` do not count here.
    n : int
        How many entries count.

    Raises
    ------
    ValueError
        If an array is not as `Kernel.rows` wants it, the log has fewer entries, or one
        names no row of the table: nothing outside is touched.
    """
    rows = logged_rows(table, log, n)
    pairs = zip((table.w, *table.slots), (log.w, *log.slots), strict=True)
    for a, kept in pairs:
        # The newest first: what a row was before the oldest of its entries stays.
        a[rows[::-1]] = kept[:n][::-1]


def logged_rows(table: TableRows, log: UndoLog, n: int) -> Array:
    """Refuse a log that `restore` cannot put back; return its first `n` numbers of rows.

    Parameters
    ----------
    table, log, n
        As in `restore`.

    Returns
    -------
    ndarray, int64
        Those of the log.

    Raises
    ------
    ValueError
        As `restore`.
    """
    check_log(table, log._replace(begin=0), n)
    rows: Array = log.rows[:n]
    for bad in np.flatnonzero(rows.view(np.uint64) >= len(table.w))[::-1]:
        raise ValueError(
            f"entry {bad} of an undo log names row {rows[bad]} of {len(table.w)}"
        )
    return rows


def find_oldest(
    rows: Longs, n: int, first: int, ids: Ids, table: Ints, bits: int, entries: Longs
) -> None:
    """Find the first entry of a log for each id, -1 where there is none."""
    for k in range(n):
        at = spot(table, rows, rows[k], bits)
        if not table[at]:
            table[at] = k + 1
    for k in range(ids.size):
        entries[k] = table[spot(table, rows, ids[k] - first, bits)] - 1


_module = functools.cache(functools.partial(plain, (find_oldest,)))


def oldest_entries(
    log: UndoLog,
    n: int,
    ids: Array,
    at: Array | None,
    *,
    first: int,
    cache_dir: str | None = None,
) -> tuple[Array, Array]:
    """Return the first entries of a log for ids that have one, and where they are read.

    With these gathered there, what was read is what rows were before. Another process may
    write the log meanwhile: that is right where the entries were still there afterwards,
    and nothing outside is read or written in any case.

    Parameters
    ----------
    log : UndoLog
        Its `begin` and `base` do not count here.
    n : int
        How many entries count.
    ids : ndarray, shape (k,), int64
        The ids that were read, contiguous, maybe with repeats.
    at : ndarray, shape (k,), int64, or None
        Row i is read to row `at[i]`; to row i without it.
    first : int
        Id of the first row of the table.
    cache_dir : str, optional
        Where the compiled loop is kept, as in `build`.

    Returns
    -------
    tuple of (ndarray, ndarray), int64
        Entries, and rows of what is read.

    Raises
    ------
    ValueError
        If an array is not as described.
    """
    for some in (ids,) if at is None else (ids, at):
        check_input(some, ID, ids.shape)
    n = min(n, len(log.rows))
    table, bits = hash_table(n)
    entries = scratch.empty(len(ids), ID)
    loop = _module(cache_dir).function("find_oldest")
    loop(log.rows, n, first, ids, table, bits, entries)
    there = np.flatnonzero(entries >= 0)
    return entries[there], there if at is None else at[there]


def warm(*, cache_dir: str | None = None) -> None:
    """Compile what reads a log, so that its first use finds it."""
    _module(cache_dir).function("find_oldest")


def check_log(table: TableRows, log: UndoLog, n: int) -> None:
    """Refuse a log that cannot take or give `n` entries of a table.

    Parameters
    ----------
    table : TableRows
        The rows.
    log : UndoLog
        Their log.
    n : int
        How many entries.

    Raises
    ------
    ValueError
        If an array is of another dtype or shape, or not contiguous and writable.
    """
    entries = len(log.rows)
    if not 0 <= log.begin <= log.begin + n <= entries:
        raise ValueError(
            f"{n} rows from entry {log.begin} on do not fit into an undo log of "
            f"{entries} entries"
        )
    if len(log.slots) != len(table.slots):
        raise ValueError(
            f"expected {len(table.slots)} slots in the log, got {len(log.slots)}"
        )
    check_output(log.rows, ID, (entries,), "the numbers of rows in a log")
    check_output(log.word, ID, (1,), "the word of a log")
    pairs = zip((table.w, *table.slots), (log.w, *log.slots), strict=True)
    for a, kept in pairs:
        check_output(a, a.dtype, (len(table.w), a.shape[-1]), "rows of a table")
        check_output(kept, a.dtype, (entries, a.shape[-1]), "rows of a log")


def check_named(table: TableRows, ids: Array, at: Array | None, data: Array) -> Array:
    """Refuse ids, positions or values that no loop can read; return the positions.

    Parameters
    ----------
    table : TableRows
        The rows.
    ids : ndarray, shape (k,), int64
        The rows, by id.
    at : ndarray, shape (k,), int64, optional
        Where their values are.
    data : ndarray, shape (n, dim)
        The values.

    Returns
    -------
    ndarray, int64
        `at`, or none for all in order.

    Raises
    ------
    ValueError
        If an array is of another dtype or shape, or not contiguous.
    """
    check_input(ids, ID, (ids.size,))
    if at is not None:
        check_input(at, ID, ids.shape)
    n = len(ids) if at is None else len(data)
    check_input(data, data.dtype, (n, table.w.shape[1]))
    return NOWHERE if at is None else at


def check_inside(table: TableRows, ids: Array, at: Array | None, data: Array) -> None:
    """Refuse ids and positions outside; NumPy would count some from the end.

    Parameters
    ----------
    table, ids, at, data
        As in `check_named`.

    Raises
    ------
    ValueError
        If one is outside.
    """
    for a, n in ((ids - table.first, len(table.w)), (at, len(data))):
        if a is not None and len(a):
            # Numbers below 0 are the largest ones without a sign.
            k = int(np.argmax(a.view(np.uint64)))
            if a.view(np.uint64)[k] >= n:
                raise outside(ids, at, k, table)


def outside(ids: Array, at: Array | None, k: int, table: TableRows) -> ValueError:
    """Return the error of an id or a position that a loop has stopped at.

    Parameters
    ----------
    ids, at : ndarray
        The arguments of the loop.
    k : int
        Where it stopped.
    table : TableRows
        The table that should have these rows.

    Returns
    -------
    ValueError
        The error to raise.
    """
    last = table.first + len(table.w) - 1
    place = "" if at is None else f", or its value is none of those at {at[k]}"
    return ValueError(
        f"expected ids of rows from {table.first} to {last}, got {ids[k]} at position "
        f"{k}{place}; rows before it are in the undo log"
    )
