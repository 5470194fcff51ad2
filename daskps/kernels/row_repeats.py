"""Ids of rows that repeat: whether any does, which are different, and sums over each."""
# ruff: noqa: PLR0917  (compiled functions take arguments by position)

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.kernels import scratch
from daskps.kernels.compiled import module_of, module_source
from daskps.kernels.inputs import ID, check_input
from daskps.kernels.words import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from daskps.kernels.words import Ids, Ints, Longs
    from daskps.typing import Array

#: The factor that spreads ids over a table of hashes, the width of a word, and the
#: logarithm of that.
_MIX, _BITS, _WORD = 0x9E3779B97F4A7C15, 64, 6
#: Findings about ids.
_REPEATED, _OUTSIDE = 1, 2
#: Rows of a table for each id that is looked at, up to which it is quicker to have a bit
#: for each row than a table of hashes. Measured: 100 alike, 1,000 twice as slow.
_ROWS_PER_ID = 128


def spot(table: Ints, keys: Ids, row: int, bits: int) -> Any:
    """Return where a table of hashes has a key, or the place where it would go."""
    at = np.uint64(row) * np.uint64(_MIX) >> np.uint64(_BITS - bits)
    while table[at] and keys[table[at] - 1] != row:
        at = (at + np.uint64(1)) & np.uint64(table.size - 1)
    return at


def marked(ids: Ids, first: int, n_rows: int, seen: Longs) -> int:
    """Look for repeats and for ids outside, with a bit for each row."""
    found = 0
    for k in range(ids.size):
        row = np.uint64(ids[k] - first)
        if row >= np.uint64(n_rows):
            return _OUTSIDE
        at, bit = row >> np.uint64(_WORD), np.int64(row & np.uint64(63))
        bits = seen[at]
        found |= bits >> bit
        seen[at] = bits | np.int64(1) << bit
    return found & _REPEATED


def hashed(ids: Ids, first: int, n_rows: int, table: Ints, bits: int) -> int:
    """Look for repeats and for ids outside, with a table of hashes."""
    found = 0
    for k in range(ids.size):
        row = ids[k]
        if np.uint64(row - first) >= np.uint64(n_rows):
            return _OUTSIDE
        if found:
            continue
        at = spot(table, ids, row, bits)
        if table[at]:
            found = _REPEATED
        table[at] = k + 1
    return found


def number(ids: Ids, table: Ints, bits: int, where: Longs, distinct: Longs) -> int:
    """Find the distinct ids in order of first appearance; return how many."""
    n = 0
    for k in range(ids.size):
        at = spot(table, distinct, ids[k], bits)
        if not table[at]:
            distinct[n] = ids[k]
            n += 1
            table[at] = n
        where[k] = table[at] - 1
    return n


_module = functools.cache(functools.partial(plain, (marked, hashed, number)))


#: Rows with one id are added up; of bools as bytes it says whether one is true.
_SUMS = """\
T = types.{dtype}
READ_ROWS, WRITE_ROWS = read(T).copy(ndim=2), write(T).copy(ndim=2)


@loop
def sums(rows: READ_ROWS, at: IDS, where: IDS, out: WRITE_ROWS):
    n, given = 0, np.uint64(rows.shape[0])
    for k in range(where.size):
        source, to = np.uint64(at[k]), np.uint64(where[k])
        if source >= given:
            return False
        if to == n:
            n += 1
            for i in range(rows.shape[1]):
                out[to, i] = rows[source, i]
        else:
            for i in range(rows.shape[1]):
                out[to, i] {operator} rows[source, i]
    return True
"""


class Repeats:
    """The distinct ones of ids, in order of first appearance.

    Parameters
    ----------
    ids : ndarray, shape (k,), int64
        The distinct ones.
    where : ndarray, shape (n,), int64
        Of each id that was given, its number among them.
    cache_dir : str or None
        Where the compiled loops are kept, as in `build`.
    """

    def __init__(self, ids: Array, where: Array, cache_dir: str | None) -> None:
        self.ids = ids
        self._where, self._cache_dir = where, cache_dir

    def sum(
        self,
        rows: Array,
        at: Array | None = None,
        *,
        empty: Callable[[int, Any], Array] = scratch.empty,
    ) -> Array:
        """Return the sum of the rows of each id, added up in order of appearance.

        Parameters
        ----------
        rows : ndarray, shape (m, dim), any dtype but float16
            Contiguous. Row i belongs to id i.
        at : ndarray, shape (n,), int64, optional
            Row `at[i]` belongs to id i.
        empty : callable, optional
            Makes the memory of the sums, as ``np.empty(n, dtype)`` does. By default it is
            used again once nobody has a view of it.

        Returns
        -------
        ndarray, shape (k, dim), dtype of `rows`
            Integers wrap around; of bools it says whether one is true.

        Raises
        ------
        ValueError
            If an array is not as described, or a position is outside.
        """
        if rows.ndim != 2 or not rows.flags.c_contiguous or rows.dtype == np.float16:
            raise ValueError(
                f"expected contiguous rows, and float16 widened, got {rows.dtype} of "
                f"shape {rows.shape} with strides {rows.strides}"
            )
        at = np.arange(len(self._where)) if at is None else at
        check_input(at, ID, self._where.shape)
        n, dim, bare = len(self.ids), rows.shape[1], _bare(rows.dtype)
        out = empty(n * dim, bare).reshape(n, dim)
        loop = _sums(rows.dtype, self._cache_dir)
        if not loop(rows.view(bare), at, self._where, out):
            raise ValueError(f"a position is none of {len(rows)} rows")
        return out.view(rows.dtype)

    def grouped(self, at: Array | None = None) -> tuple[Array, Array]:
        """Return the positions of each id one behind the other, as loops of devices sum them.

        Parameters
        ----------
        at : ndarray, shape (n,), int64, optional
            The positions; 0, 1 and so on without it.

        Returns
        -------
        order : ndarray, shape (n,), int64
            Positions, those of one id in order of appearance.
        ends : ndarray, shape (k,), int64
            Where those of each id end.
        """
        order = np.argsort(self._where, kind="stable")
        ends = np.cumsum(np.bincount(self._where, minlength=len(self.ids)))
        return order if at is None else at[order], ends

    def last(self, at: Array | None = None) -> Array:
        """Return the position of the last appearance of each id.

        Parameters
        ----------
        at : ndarray, shape (n,), int64, optional
            The numbers that stand for the positions 0, 1 and so on.

        Returns
        -------
        ndarray, shape (k,), int64
            Positions.
        """
        found = np.empty(len(self.ids), np.int64)
        # Of several for one place NumPy keeps the last.
        found[self._where] = np.arange(len(self._where)) if at is None else at
        return found


def are_distinct(
    ids: Array, first: int, n_rows: int, *, cache_dir: str | None = None
) -> bool:
    """Return whether no id repeats.

    Parameters
    ----------
    ids : ndarray, shape (k,), int64
        Contiguous.
    first, n_rows : int
        Ids must be in [first, first + n_rows).
    cache_dir : str, optional
        Where the compiled loops are kept, as in `build`.

    Returns
    -------
    bool
        True if each is another one.

    Raises
    ------
    ValueError
        If one is outside.
    """
    k = len(ids)
    check_input(ids, ID, (k,))
    functions = _module(cache_dir).function
    if n_rows <= _ROWS_PER_ID * k:
        n = (n_rows >> _WORD) + 1
        zeros = np.zeros if 8 * n < scratch.SMALLEST else scratch.zeros
        seen = zeros(n, np.int64)
        found = functions("marked")(ids, first, n_rows, seen)
    else:
        table, bits = hash_table(k)
        found = functions("hashed")(ids, first, n_rows, table, bits)
    if found == _OUTSIDE:
        raise ValueError(f"an id is no row from {first} to {first + n_rows - 1}")
    return bool(found != _REPEATED)


def repeats(ids: Array, *, cache_dir: str | None = None) -> Repeats:
    """Find the distinct ids, and which of them each id is.

    Parameters
    ----------
    ids : ndarray, shape (k,), int64
        Contiguous.
    cache_dir : str, optional
        Where the compiled loops are kept, as in `build`.

    Returns
    -------
    Repeats
        The distinct ones.
    """
    k = len(ids)
    check_input(ids, ID, (k,))
    table, bits = hash_table(k)
    where, distinct = scratch.empty(2 * k, np.int64).reshape(2, k)
    n = _module(cache_dir).function("number")(ids, table, bits, where, distinct)
    return Repeats(distinct[:n], where, cache_dir)


def warm(dtypes: Iterable[str], *, cache_dir: str | None = None) -> None:
    """Compile what looks for repeats and sums them, so that the first push finds it.

    Parameters
    ----------
    dtypes : iterable of str
        Of the tables.
    cache_dir : str, optional
        Where the compiled loops are kept, as in `build`.
    """
    for name in ("marked", "hashed", "number"):
        _module(cache_dir).function(name)
    for dtype in {"float32" if dtype == "float16" else dtype for dtype in dtypes}:
        _sums(np.dtype(dtype), cache_dir)


@functools.cache
def _sums(dtype: np.dtype[Any], cache_dir: str | None) -> Callable[..., Any]:
    """Return the loop that sums rows of a dtype."""
    text = _SUMS.format(
        dtype=_bare(dtype).name, operator="|=" if dtype.kind == "b" else "+="
    )
    return module_of(module_source(text), cache_dir).function("sums")


def _bare(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a dtype without a sign, where sums wrap around to the same bits."""
    return dtype if dtype.kind == "f" else np.dtype(f"u{dtype.itemsize}")


def hash_table(k: int) -> tuple[Array, int]:
    """Return an empty table of hashes for so many ids, at most half full.

    Parameters
    ----------
    k : int
        How many.

    Returns
    -------
    table : ndarray, shape (2 ** bits,), int32
        Zeros.
    bits : int
        Of a place in it.
    """
    bits = max(1, (2 * k).bit_length())
    n = 1 << bits
    zeros = np.zeros if 4 * n < scratch.SMALLEST else scratch.zeros
    return zeros(n, np.int32), bits
