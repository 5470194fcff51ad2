"""Targets of a pull: the parameters and rows it reads, and the arrays it fills."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.backend import checked, device_of, find
from daskps.cluster.caller import routes
from daskps.cluster.caller.device_arrays import kept, put
from daskps.cluster.caller.row_reads import AbsentRows
from daskps.cluster.caller.row_routes import IdSplit, slices_of
from daskps.cluster.caller.targets import Target, find_overlap
from daskps.cluster.protocol.row_messages import most_rows
from daskps.layout.tables import UnboundedTable
from daskps.store.intake import asked_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from daskps.cluster.caller.routes import Request
    from daskps.cluster.caller.row_routes import RowSlice
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.layout.tables import Table
    from daskps.typing import Array


def reading(
    meta: StoreMap, targets: Sequence[Target], least: int | None = None
) -> Request:
    """Return what reads targets, one after the other."""
    request, others = routes.read(meta, targets[0], least), targets[1:]
    if not others:
        return request
    rest = [routes.read(meta, of, least) for of in others]
    return request._replace(rest=tuple(rest))


def device_for(device: str | None, out: Any) -> str:
    """Return the checked name of the device that a pull's new arrays go to.

    Raises
    ------
    ValueError, TypeError
        For no name of a device, and together with `out`.
    """
    where = checked(device)
    if where and out is not None:
        raise ValueError(
            "a pull goes to the arrays of out=, wherever these are, or to new ones on "
            "device=; pass one of the two"
        )
    return where


def sign_of(meta: StoreMap, names: Iterable[str]) -> Target:
    """Return a read of one element of each parameter, to wait as a read of all does."""
    chosen = [meta.layout[name] for name in names]
    spans = {p.index: (0, 1, np.empty(1, p.dtype)) for p in chosen}
    return routes.spanning(meta, spans, lambda: None)


def target_of(
    meta: StoreMap,
    names: str | Iterable[str] | None,
    out: Mapping[str, Array] | None,
    device: str = "",
) -> Target:
    """Return where a pull goes: new arrays, those of a `device`, or those of `out`."""
    if names is None and out is None and not device:
        return routes.whole(meta)
    out = None if out is None else _checked_mapping(out)
    chosen = chosen_names(meta, names if names is not None else out)
    if out is not None and (unasked := [n for n in out if n not in chosen]):
        raise ValueError(
            f"out has {unasked[:8]}, which names= does not ask for; name them, or "
            f"leave names= out to pull what out names"
        )
    outs, flats = Outs(out or {}, meta, device), {}
    for name in chosen:
        p = meta.layout[name]
        flats[p.index] = outs.place(name, p.shape, p.dtype)
    if out:
        check_apart(out.items())
    return routes.into(meta, flats, outs.filled)


class Outs:
    """Arrays that a read fills: those of its caller, and new ones for the rest.

    Parameters
    ----------
    given : mapping of str to ndarray
        The caller's, by name; arrays of a device too.
    meta : StoreMap
        The store.
    device : str, default ""
        The device of this process that new ones are on.
    """

    def __init__(
        self, given: Mapping[str, Array], meta: StoreMap, device: str = ""
    ) -> None:
        self._given, self._meta, self._device = given, meta, device
        self._arrays: dict[str, Array] = {}
        #: Arrays in another order than C, and what is read for each.
        self._detours: list[tuple[Array, Array]] = []

    def place(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: str,
        what: str = "the parameter",
    ) -> Array:
        """Return where the elements of a name go, flat and in C order.

        Raises
        ------
        TypeError, ValueError
            For an array of the caller's that they do not fit.
        """
        array: Any
        values: Array
        if name in self._given:
            array = self._given[name]
        elif self._device:
            array = find(self._device).array(shape, dtype)
        else:
            array = np.empty(shape, dtype)
        device = None if isinstance(array, np.ndarray) else device_of(array)
        if device is None and not isinstance(array, np.ndarray):
            raise TypeError(
                f"out[{name!r}] is an ndarray, found {type(array).__name__}"
            )
        if array.shape != shape or array.dtype != np.dtype(dtype):
            raise ValueError(
                f"out[{name!r}] has shape {array.shape} and dtype {array.dtype}, {what} "
                f"{shape} and {dtype}; they must be equal"
            )
        self._arrays[name] = values = array
        if device is not None:
            meta, there = self._meta, None
            if device.name == meta.device:
                there = kept(meta.device, meta.owners, array)
            if there is not None:
                values = there.reshape(-1)
                return values
            values = np.empty(shape, dtype)
            self._detours.append((array, values))
            return values.reshape(-1)
        if not array.flags.writeable:
            raise ValueError(f"out[{name!r}] is read-only")
        if not array.flags.c_contiguous:
            values = np.empty(shape, dtype)
            self._detours.append((array, values))
        return values.reshape(-1)

    def filled(self) -> dict[str, Array]:
        """Return arrays by name, once all has been read."""
        for array, values in self._detours:
            put(array, values)
        return dict(self._arrays)


def pulled(
    meta: StoreMap,
    names: Any,
    rows: Any,
    out: Mapping[str, Array] | None,
    *,
    device: str = "",
) -> list[Target]:
    """Return where a pull goes that may read rows: a target for one call each.

    Parameters
    ----------
    meta : StoreMap
        The store.
    names : str or iterable of str, optional
        Names of the arrays to read, in the first of these calls.
    rows : mapping of str to array_like of int, optional
        Ids by the names of tables.
    out : mapping of str to ndarray, optional
        Arrays to fill, by the names of parameters and tables.
    device : str, default ""
        The device of this process that arrays go to.

    Returns
    -------
    list of Target
        One for each call; `finish` of each returns the result of all.
    """
    if rows is None:
        return [target_of(meta, names, out, device)]
    given = _checked_rows(rows)
    out = {} if out is None else _checked_mapping(out)
    of_arrays = {n: array for n, array in out.items() if n not in given}
    dense = target_of(meta, names, of_arrays if out else None, device)
    return with_rows(meta, dense, given, out, device=device)


def with_rows(
    meta: StoreMap,
    dense: Target,
    rows: Mapping[str, Any],
    out: Mapping[str, Any],
    *,
    device: str = "",
) -> list[Target]:
    """Return where a read of arrays goes, and rows with it; see :func:`pulled`."""
    outs, wanted = Outs(out, meta, device), []
    what = "the rows that are asked for"
    for name, given in rows.items():
        table = _table_of(meta, name)
        ids, shape = asked_ids(table, given)
        flat = outs.place(name, (*shape, table.dim), table.dtype, what)
        wanted.append((table, ids, flat))
    if out:
        check_apart(out.items())

    def finish() -> Any:
        return {**dense.finish(), **outs.filled()}

    return _in_parts(meta, dense, wanted, finish)


def _in_parts(
    meta: StoreMap,
    dense: Target,
    wanted: Sequence[tuple[Table, Array, Array]],
    finish: Callable[[], Any],
) -> list[Target]:
    """Return a target for each of the calls that read rows, the arrays with the first."""
    flats = [*dense.flats, *(flat for _, _, flat in wanted)]
    layout, first = meta.layout, len(dense.flats)
    parts: list[dict[int, list[RowSlice]]] = [{}]
    absent: list[AbsentRows] = []
    for number, (table, ids, _) in enumerate(wanted, first):
        most = most_rows(table)
        for i, start in enumerate(range(0, len(ids), most)):
            if i == len(parts):
                parts.append({})
            split = IdSplit.of(table, ids[start : start + most], layout.n_shards)
            marks = None
            if isinstance(table, UnboundedTable):
                marks = len(flats)
                flats.append(np.ones(len(split.ids), np.uint8))
                absent.append(AbsentRows(table, split, flats[number], start, flats[-1]))
            each = slices_of(layout, split, number, start, marks=marks)
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
    """Return where a look for unbounded rows goes: a target for one call each.

    `finish` of each target returns one array of bool of that shape, for all ids. No
    rows travel.
    """
    layout, most = meta.layout, most_rows(table)
    # The caller's may be of other shards.
    table = layout.table_by_name[table.name]
    flats = [np.empty(0, table.dtype)]
    found = np.zeros(len(ids), bool)
    splits: list[tuple[int, IdSplit, Array]] = []
    targets = []

    def finish() -> Array:
        for start, split, marks in splits:
            part = found[start : start + len(marks)]
            part[slice(None) if split.at is None else split.at] = marks
        return found.reshape(shape)

    for start in range(0, max(1, len(ids)), most):
        split = IdSplit.of(table, ids[start : start + most], layout.n_shards)
        flats.append(np.zeros(len(split.ids), np.uint8))
        splits.append((start, split, flats[-1]))
        each = slices_of(layout, split, 0, 0, marks=len(flats) - 1, finds=True)
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
    for name, given in _checked_rows(rows).items():
        ids, shape = asked_ids(_table_of(meta, name), given)
        found[name] = ids.reshape(shape).copy()
    return found


def _checked_rows(rows: Any) -> Mapping[str, Any]:
    """Return a mapping of names to ids, or refuse what is none."""
    if not isinstance(rows, Mapping):
        raise TypeError(
            f"rows is a mapping of the names of tables to ids, found "
            f"{type(rows).__name__}; pass {{'emb': ids}}"
        )
    return rows


def _table_of(meta: StoreMap, name: Any) -> Table:
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


def _checked_mapping(out: Any) -> Mapping[str, Array]:
    """Return a mapping of names to arrays, or refuse what is none."""
    if not isinstance(out, (dict, Mapping)):
        raise TypeError(
            f"out is a mapping of parameter names to arrays, found "
            f"{type(out).__name__}; pass {{'w': array}}"
        )
    return out


def check_apart(outs: Iterable[tuple[Any, Array]]) -> None:
    """Refuse arrays that share memory: one would take what was read for another."""
    if overlap := find_overlap(outs):
        first, second = overlap
        raise ValueError(
            f"out[{first!r}] and out[{second!r}] share memory; give each an array of "
            f"its own"
        )


def chosen_names(meta: StoreMap, names: Any) -> list[str]:
    """Return the parameters that are asked for, each once; all for None."""
    if names is None:
        return list(meta.layout.by_name)
    given = given_names(names)
    for name in given:
        meta.layout[name]
    return list(dict.fromkeys(given))


def given_names(names: Any) -> list[Any]:
    """Return names as a list, whatever they are; one may stand for itself."""
    try:
        return [names] if isinstance(names, str) else list(names)
    except TypeError:
        raise TypeError(
            f"names is the name of a parameter or a list of them, found {names!r:.60}"
        ) from None
