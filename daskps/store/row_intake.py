"""Rows that a caller hands over, or asks for: made ready, or refused before they leave."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.caller.row_routes import RowCut, RowsGiven
from daskps.errors import NoOptimizerError, PushRejectedError
from daskps.layout.arrays import FLOATS, Layout, compute_dtype
from daskps.layout.ids import as_ids
from daskps.limits import MOST_PUSHED_ROWS, MOST_REMOVED_ROWS
from daskps.store import intake
from daskps.store.row_grad import RowGrad

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from daskps.layout.tables import Table
    from daskps.typing import Array


_NO_ROWS: Mapping[str, RowGrad] = {}
_NO_ARRAYS: Mapping[str, Any] = {}


def parted(layout: Layout, given: Any) -> tuple[Any, Mapping[str, RowGrad]]:
    """Return what a mapping has for arrays, and what it has for tables.

    Where there are no tables, what is refused is left to who looks at the arrays.

    Raises
    ------
    PushRejectedError
        For an array that is given for a table, or rows for an array.
    """
    if not layout.tables:
        return given, _NO_ROWS
    if type(given) is dict and len(given) == 1:
        # As the verbs of a table say it: nothing is nested.
        ((only, value),) = given.items()
        if type(value) is RowGrad and only in layout.table_by_name:
            return _NO_ARRAYS, given
    flat = intake.plain(given)
    rows = {n: v for n, v in flat.items() if isinstance(v, RowGrad)}
    for name in rows:
        if name not in layout.table_by_name:
            shape = layout[name].shape
            raise PushRejectedError(
                f"rows were given for {name[:60]!r}, which is an array of shape "
                f"{shape}; give it an array of that shape"
            )
    dense = {n: v for n, v in flat.items() if n not in rows}
    for name in dense:
        if (table := layout.table_by_name.get(name)) is not None:
            raise PushRejectedError(
                f"an array was given for {name[:60]!r}, which is a table of "
                f"{table.told}; say which of them with daskps.RowGrad(ids, "
                f"values), or use store[{name[:60]!r}].push(ids, values)"
            )
    return dense, rows


def gradients(
    layout: Layout,
    optimizers: Mapping[int, str],
    rows: Mapping[str, RowGrad],
    *,
    weight: float,
    finite: bool,
) -> list[RowsGiven]:
    """Check gradients of rows, and multiply them by a weight.

    Parameters
    ----------
    layout : Layout
        The store's layout.
    optimizers : mapping of int to str
        What has an optimizer.
    rows : mapping of str to RowGrad
        The gradients by the names of tables.
    weight : float
        The factor.
    finite : bool
        Whether NaN and Inf are refused.

    Returns
    -------
    list of RowsGiven
        One for each table, in its compute dtype.

    Raises
    ------
    NoOptimizerError, PushRejectedError
        For what its name says. Nothing has been changed anywhere.
    """
    found = []
    for name, given in rows.items():
        table = layout.table_by_name[name]
        if table.dtype not in FLOATS:
            raise PushRejectedError(
                f"table {name!r} is {table.dtype} and takes no gradient; use add or "
                f"assign"
            )
        if table.index not in optimizers:
            raise NoOptimizerError(
                f"gradients were pushed for table {name!r}, but the store was created "
                f"without an optimizer for it; pass create(..., optimizer=...), or "
                f"use add for a plain +="
            )
        dtype = compute_dtype(table.dtype)
        ids, data = _ready(table, given, dtype, "gradient", finite=finite)
        if weight != 1.0:
            data = _scaled(table, data, weight, finite=finite)
        cut = RowCut.of(table, ids, layout.n_shards)
        if len(ids) > MOST_PUSHED_ROWS:
            _check_room(cut)
        found.append(RowsGiven(cut, data))
    return found


def values(
    layout: Layout, rows: Mapping[str, RowGrad], what: str, *, finite: bool
) -> list[list[RowsGiven]]:
    """Check deltas or new values of rows, kept in the dtypes of their tables.

    Parameters
    ----------
    layout : Layout
        The store's layout.
    rows : mapping of str to RowGrad
        By the names of tables.
    what : str
        "delta" or "value", for messages.
    finite : bool
        Whether NaN and Inf are refused.

    Returns
    -------
    list of list of RowsGiven
        For one call after the other: more rows than a shard takes at once go in parts.

    Raises
    ------
    PushRejectedError
        For what does not fit. Nothing has been changed anywhere.
    """
    calls: list[list[RowsGiven]] = [[]]
    for name, given in rows.items():
        table = layout.table_by_name[name]
        ids, data = _ready(table, given, table.dtype, what, finite=finite)
        for i, start in enumerate(range(0, max(1, len(ids)), MOST_PUSHED_ROWS)):
            part = slice(start, start + MOST_PUSHED_ROWS)
            cut = RowCut.of(table, ids[part], layout.n_shards)
            of_part = slice(start * table.dim, (start + MOST_PUSHED_ROWS) * table.dim)
            if i == len(calls):
                calls.append([])
            calls[i].append(RowsGiven(cut, data[of_part]))
    return calls


def removals(layout: Layout, table: Table, ids: Any) -> list[list[RowsGiven]]:
    """Return what is told of rows that go, for one call after the other.

    Raises
    ------
    PushRejectedError
        For what are no ids, and for a table that has a number of rows.
    """
    table.check_removal(PushRejectedError)
    flat, _ = asked_ids(table, ids, PushRejectedError)
    none = np.empty(0, table.dtype)
    # Always the same: a task that is tried again numbers its steps as it did before.
    starts = range(0, max(1, len(flat)), MOST_REMOVED_ROWS)
    parts = [flat[start : start + MOST_REMOVED_ROWS] for start in starts]
    return [[RowsGiven(RowCut.of(table, p, layout.n_shards), none)] for p in parts]


def asked_ids(
    table: Table, ids: Any, error: type[ValueError] = ValueError
) -> tuple[Array, tuple[int, ...]]:
    """Return ids of a table as one vector, and the shape they came in.

    Raises
    ------
    ValueError
        Or what `error` says, for what are no ids of this table.
    """
    what = f"table {table.name[:60]!r}"
    flat, shape = as_ids(ids, what, error)
    table.check(flat, what, error)
    return flat, shape


def _ready(
    table: Table, given: RowGrad, dtype: str, what: str, *, finite: bool
) -> tuple[Array, Array]:
    """Return ids, and the rows for them as one vector of a dtype."""
    ids, shape = asked_ids(table, given.ids, PushRejectedError)
    name = f"the {what} of table {table.name[:60]!r}"
    array = intake.as_array(given.values, name, PushRejectedError)
    if array.shape != (*shape, table.dim):
        raise PushRejectedError(
            f"{name} has shape {array.shape} for ids of shape {shape}; it must be "
            f"{(*shape, table.dim)}, nothing is broadcast"
        )
    if array.dtype != dtype:
        of = f"the table {table.dtype}"
        array = intake.cast(array, dtype, name, of=of, given=given.values)
    flat = np.ascontiguousarray(array).reshape(-1)
    if finite and dtype in FLOATS:
        _look(table, flat, what)
    return ids, flat


def look(rows: Iterable[RowsGiven]) -> None:
    """Refuse gradients with NaN or infinity that were checked without that look.

    Raises
    ------
    PushRejectedError
        Naming the table.
    """
    for given in rows:
        _look(given.cut.table, given.data, "gradient")


def _look(table: Table, data: Array, what: str) -> None:
    if not intake.is_finite(data):
        raise PushRejectedError(
            f"the {what} of table {table.name[:60]!r} has NaN or Inf (as {data.dtype}); "
            f"{intake.ADVICE}"
        )


def _scaled(table: Table, data: Array, weight: float, *, finite: bool) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        scaled: Array = np.multiply(data, weight, dtype=data.dtype)
    if finite and not intake.is_finite(scaled):
        raise PushRejectedError(
            f"the gradient of table {table.name[:60]!r} times weight={weight:g} is not "
            f"finite as {data.dtype}; use a smaller weight"
        )
    return scaled


def _check_room(cut: RowCut) -> None:
    """Refuse more rows than a shard can take back: one push is one update."""
    for shard in cut.shards():
        ids = cut.ids_of(shard)
        if len(ids) <= MOST_PUSHED_ROWS:
            continue
        if (n := len(np.unique(ids))) > MOST_PUSHED_ROWS:
            raise PushRejectedError(
                f"a gradient for {n:,} rows of table {cut.table.name[:60]!r} in shard "
                f"{shard}, which takes {MOST_PUSHED_ROWS:,} at once; push the batch in "
                f"parts, or create the store with more shards"
            )
