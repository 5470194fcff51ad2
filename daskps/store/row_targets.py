"""Where the rows of a pull go: which of which tables, and into which arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps.cluster.caller.absent_rows import AbsentRows
from daskps.cluster.caller.row_routes import RowCut, slices_of
from daskps.cluster.caller.targets import Target
from daskps.cluster.wire.rows import most_rows
from daskps.layout.tables import UnboundedTable
from daskps.store.row_intake import asked_ids
from daskps.store.targets import (
    check_apart,
    checked_mapping,
    checked_out,
    target_of,
)

if TYPE_CHECKING:
    from daskps.cluster.caller.row_routes import RowSlice
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.layout.tables import Table
    from daskps.typing import Array


class _Wanted(NamedTuple):
    """Rows of one table, and where they go."""

    table: Table
    ids: Array
    flat: Array


def pulled(
    meta: StoreMap, names: Any, rows: Any, out: Mapping[str, Array] | None
) -> list[Target]:
    """Return where a pull goes that may read rows: a target for one call each.

    Parameters
    ----------
    meta : StoreMap
        The store.
    names : str or iterable of str, optional
        Which arrays are read, in the first of these calls.
    rows : mapping of str to array_like of int, optional
        Ids by the names of tables.
    out : mapping of str to ndarray, optional
        What is to be filled, of those that it has.

    Returns
    -------
    list of Target
        What each of them finishes is the result of all.
    """
    if rows is None:
        return [target_of(meta, names, out)]
    given, out = checked_rows(rows), checked_mapping(out)
    of_arrays = {n: array for n, array in out.items() if n not in given}
    dense = target_of(meta, names, of_arrays if out else None)
    return with_rows(meta, dense, given, out)


def with_rows(
    meta: StoreMap, dense: Target, rows: Mapping[str, Any], out: Mapping[str, Any]
) -> list[Target]:
    """Return where a read of arrays goes, and rows with it; see :func:`pulled`."""
    found: dict[str, Array] = {}
    detours: list[tuple[Array, Array]] = []
    wanted = []
    for name, given in rows.items():
        table = table_of(meta, name)
        ids, shape = asked_ids(table, given)
        whole = (*shape, table.dim)
        if name not in out:
            flat = np.empty(len(ids) * table.dim, table.dtype)
            found[name] = flat.reshape(whole)
        else:
            what = "the rows that are asked for"
            array = checked_out(out[name], name, whole, table.dtype, what=what)
            found[name] = array
            flat = array.reshape(-1)
            if not array.flags.c_contiguous:
                flat = np.empty(array.size, table.dtype)
                detours.append((array, flat.reshape(whole)))
        wanted.append(_Wanted(table, ids, flat))

    check_apart(out.items())

    def finish() -> Any:
        for array, values in detours:
            array[...] = values
        return {**dense.finish(), **found}

    return _in_parts(meta, dense, wanted, finish)


def _in_parts(
    meta: StoreMap, dense: Target, wanted: list[_Wanted], finish: Any
) -> list[Target]:
    """Return a target for each of the calls that read rows, the arrays with the first."""
    flats = [*dense.flats, *(one.flat for one in wanted)]
    layout, first = meta.layout, len(dense.flats)
    parts: list[dict[int, list[RowSlice]]] = [{}]
    absent: list[AbsentRows] = []
    for number, (table, ids, _) in enumerate(wanted, first):
        most = most_rows(table)
        for i, start in enumerate(range(0, len(ids), most)):
            if i == len(parts):
                parts.append({})
            cut = RowCut.of(table, ids[start : start + most], layout.n_shards)
            marks = None
            if isinstance(table, UnboundedTable):
                marks = len(flats)
                flats.append(np.ones(len(cut.ids), np.uint8))
                absent.append(AbsentRows(table, cut, flats[number], start, flats[-1]))
            each = slices_of(layout, cut, number, start, marks=marks)
            for shard, one in each.items():
                parts[i].setdefault(shard, []).append(one)

    def finish_all() -> Any:
        for one in absent:
            one.fill()
        return finish()

    return [
        Target(
            {} if i else dense.slices,
            flats,
            finish_all if absent else finish,
            {shard: tuple(of) for shard, of in part.items()},
        )
        for i, part in enumerate(parts)
    ]


def sought(
    meta: StoreMap, table: Table, ids: Array, shape: tuple[int, ...]
) -> list[Target]:
    """Return where a look for rows of any ids goes: a target for one call each.

    What each of them finishes is an array of bool of that shape, of all. No rows come.
    """
    layout, most = meta.layout, most_rows(table)
    flats = [np.empty(0, table.dtype)]
    found = np.zeros(len(ids), bool)
    cuts: list[tuple[int, RowCut, Array]] = []
    targets = []

    def finish() -> Array:
        for start, cut, marks in cuts:
            part = found[start : start + len(marks)]
            part[slice(None) if cut.at is None else cut.at] = marks
        return found.reshape(shape)

    for start in range(0, max(1, len(ids)), most):
        cut = RowCut.of(table, ids[start : start + most], layout.n_shards)
        flats.append(np.zeros(len(cut.ids), np.uint8))
        cuts.append((start, cut, flats[-1]))
        each = slices_of(layout, cut, 0, 0, marks=len(flats) - 1, finds=True)
        rows = {shard: (one,) for shard, one in each.items()}
        targets.append(Target({}, flats, finish, rows))
    return targets


def given_ids(meta: StoreMap, rows: Any) -> dict[str, Array]:
    """Return ids by the names of tables, in arrays that nobody else changes.

    Raises
    ------
    ValueError, TypeError, UnknownParameterError
        As a read of them does.
    """
    found = {}
    for name, given in checked_rows(rows).items():
        ids, shape = asked_ids(table_of(meta, name), given)
        found[name] = ids.reshape(shape).copy()
    return found


def checked_rows(rows: Any) -> Mapping[str, Any]:
    """Return a mapping of names to ids, or refuse what is none."""
    if not isinstance(rows, Mapping):
        raise TypeError(
            f"rows is a mapping of the names of tables to ids, found "
            f"{type(rows).__name__}; pass {{'emb': ids}}"
        )
    return rows


def table_of(meta: StoreMap, name: Any) -> Table:
    """Return a table by its name.

    Raises
    ------
    ValueError
        For the name of an array.
    UnknownParameterError
        For one that the store does not have.
    """
    table = meta.layout.table_by_name.get(name) if isinstance(name, str) else None
    if table is None:
        array = meta.layout[name]
        raise ValueError(
            f"rows= names {array.name[:60]!r}, which is an array of shape "
            f"{array.shape}; name it in names=, or read a part with "
            f"store[{array.name[:60]!r}][start:stop]"
        )
    return table
