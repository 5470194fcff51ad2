"""Rows added to and replaced, of tables of any dtype, with an undo log."""
# ruff: noqa: PLR0917  (as `Kernel.rows`)

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.kernels import row_log, row_repeats
from daskps.kernels.compiled import module_of
from daskps.kernels.dense import build
from daskps.kernels.finite import finite
from daskps.kernels.row_log import (
    check_inside,
    check_log,
    check_named,
    in_blocks,
    outside,
)
from daskps.kernels.row_moves import as_bytes
from daskps.kernels.rows import MOVES_SOURCE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from daskps.kernels.dense import Kernel
    from daskps.kernels.row_log import TableRows, UndoLog
    from daskps.kernels.rule_kernel import Arrays
    from daskps.typing import Array


def add(
    table: TableRows,
    ids: Array,
    at: Array | None,
    data: Array,
    log: UndoLog,
    *,
    check: bool = False,
    cache_dir: str | None = None,
) -> bool:
    """Add to some rows of a table, and touch no other.

    Parameters
    ----------
    table : TableRows
        The rows, without slots: they stay as they are.
    ids, at
        As in `Kernel.rows`.
    data : ndarray, shape (n, dim), dtype of the rows
        The values to add; contiguous. For float16 they may be float32.
    log : UndoLog
        Without slots.
    check : bool, default False
        Whether to look for NaN and infinity in the values.
    cache_dir : str, optional
        Where the compiled loops are kept, as in `build`.

    Returns
    -------
    bool
        As `Kernel.rows`.

    Raises
    ------
    ValueError
        As `Kernel.rows`.
    """
    dtype = table.w.dtype
    if dtype.kind == "f":
        kernel = _plus(dtype, cache_dir)
        return kernel.rows(table, ids, at, data, (), log, check=check)
    _check(table, ids, at, data, log)
    check_inside(table, ids, at, data)
    in_blocks(table, ids, at, data, log, _add, cache_dir=cache_dir)
    return True


def assign(
    table: TableRows,
    ids: Array,
    at: Array | None,
    data: Array,
    log: UndoLog,
    *,
    check: bool = False,
    cache_dir: str | None = None,
) -> bool:
    """Replace some rows of a table, and touch no other.

    Parameters
    ----------
    table : TableRows
        The rows, without slots: they stay as they are.
    ids, at
        As in `Kernel.rows`.
    data : ndarray, shape (n, dim), dtype of the rows
        The new values; contiguous.
    log : UndoLog
        Without slots.
    check : bool, default False
        Whether to look for NaN and infinity in the values.
    cache_dir : str, optional
        Where the compiled loops are kept, as in `build`.

    Returns
    -------
    bool
        As `Kernel.rows`.

    Raises
    ------
    ValueError
        As `Kernel.rows`.
    """
    places = _check(table, ids, at, data, log)
    check_inside(table, ids, at, data)
    if check and not finite(data if at is None else data[at], cache_dir=cache_dir):
        return False
    loop = module_of(MOVES_SOURCE, cache_dir).function("assign")
    log_w, w, given = (as_bytes(a) for a in (log.w, table.w, data))
    where = log.rows, log_w, log.word, log.begin, log.base
    done = loop(w, table.first, ids, places, given, *where)
    if done < 0:
        raise outside(ids, at, -1 - done, table)
    return True


def warm(dtypes: Iterable[str], *, cache_dir: str | None = None) -> None:
    """Compile the loops of tables but those of rules, so that their first use finds them.

    Parameters
    ----------
    dtypes : iterable of str
        Of the tables.
    cache_dir : str, optional
        Where they are kept, as in `build`.
    """
    dtypes = set(dtypes)
    # Those without a compiled loop of their own go in blocks.
    more = ("scatter",) if dtypes - {"float32", "float64"} else ()
    for name in ("gather", "assign", "mark", *more):
        module_of(MOVES_SOURCE, cache_dir).function(name)
    row_log.warm(cache_dir=cache_dir)
    row_repeats.warm(dtypes, cache_dir=cache_dir)


def _update(w: Any, g: Any) -> Any:
    return w + g


def _add(w: Array, given: Array, _: Arrays) -> None:
    np.add(w, given, w)


@functools.cache
def _plus(dtype: np.dtype[Any], cache_dir: str | None) -> Kernel:
    return build(_update, 0, 0, dtype, cache_dir)


def _check(
    table: TableRows, ids: Array, at: Array | None, data: Array, log: UndoLog
) -> Array:
    if table.slots or data.dtype != table.w.dtype:
        raise ValueError(
            f"expected {table.w.dtype} for rows without slots, got {data.dtype} for rows "
            f"with {len(table.slots)}"
        )
    places = check_named(table, ids, at, data)
    check_log(table, log, len(ids))
    return places
