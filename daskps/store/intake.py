"""Arrays and rows that a caller hands over, checked before any of them leaves.

Everything that can be wrong with them is found here, before any shard has seen
anything, so that a refused call changes nothing anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import config
from daskps.cluster.caller.device_arrays import are_finite, kept, on_host
from daskps.cluster.caller.row_routes import IdSplit, RowBatch
from daskps.combination import Combination, check_together
from daskps.errors import PushRejectedError
from daskps.kernels import finite as finite_of
from daskps.layout.ids import as_ids
from daskps.layout.trees import flatten, is_tree
from daskps.limits import MOST_PUSHED_ROWS, MOST_REMOVED_ROWS
from daskps.store.specs import RowGrad
from daskps.store.values import (
    ADVICE,
    COMPUTED,
    is_finite,
    not_finite,
    ready,
    takes_none,
    times,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.layout.arrays import Layout
    from daskps.layout.tables import Table
    from daskps.typing import Array

_NO_ROWS: Mapping[str, RowGrad] = {}
_NO_ARRAYS: Mapping[str, Any] = {}


def plain(given: Any) -> dict[str, Any]:
    """Return a flat mapping of names to what was given for them."""
    # A dict first: an abstract class takes ten times as long to say yes.
    if not isinstance(given, dict) and not is_tree(given):
        raise TypeError(
            f"expected a mapping of parameter names to arrays, or a list or tuple of "
            f"arrays, found {type(given).__name__}; pass {{'w': array}}"
        )
    return flatten(given)


def parted(layout: Layout, given: Any) -> tuple[Any, Mapping[str, RowGrad]]:
    """Return what a mapping has for arrays, and what it has for tables.

    Without tables this refuses nothing: the check of the arrays does.

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
    flat = plain(given)
    rows = {n: v for n, v in flat.items() if isinstance(v, RowGrad)}
    for name in rows:
        if name not in layout.table_by_name:
            raise _rows_for_array(layout, name)
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
    given: Any,
    *,
    finite: bool,
    model: bool = False,
    what: str = "gradient",
    near: StoreMap | None = None,
) -> dict[int, Array]:
    """Check a mapping of gradients, or of other values.

    Parameters
    ----------
    layout : Layout
        The store's layout.
    optimizers : mapping of int to str
        The parameters that have an optimizer.
    given : mapping
        Nested mapping of name to array of the parameter's shape.
    finite : bool
        Whether NaN and Inf are refused.
    model : bool
        Whether the arrays are no gradients: those need an optimizer.
    what : str
        "delta" or "value" where they stay in the parameters' dtypes.
    near : StoreMap, optional
        The store, where arrays of its device may stay there.

    Returns
    -------
    dict of int to ndarray, shape (n,)
        By parameter index, C order, contiguous; gradients in the parameter's
        compute dtype.

    Raises
    ------
    UnknownParameterError, NoOptimizerError, PushRejectedError
        For what its name says. Nothing has been changed anywhere.
    """
    found, by_name = {}, layout.by_name
    there: dict[int, Array] = {}
    for name, value in plain(given).items():
        p = by_name.get(name)
        if p is None or type(value) is RowGrad:
            raise _not_taken(layout, name)
        dtype = COMPUTED.get(p.dtype) if what == "gradient" else p.dtype
        if dtype is None or (not model and p.index not in optimizers):
            raise takes_none(p)
        if (
            near is not None
            and (array := _kept(near, value, p.shape, dtype)) is not None
        ):
            found[p.index] = there[p.index] = array
            continue
        found[p.index] = ready(value, p, dtype, what, shape=p.shape, finite=finite)
    if there and not are_finite([*there.values()], look=finite):
        for index, array in on_host(there).items():
            p = layout.parameters[index]
            ready(array, p, array.dtype.name, what, shape=(p.size,), finite=True)
    return found


def _kept(
    near: StoreMap, value: Any, shape: tuple[int, ...], dtype: str
) -> Array | None:
    """Return an array that can stay on its device, flat; None for any other."""
    if type(value) is np.ndarray:
        return None
    array = kept(near.device, near.owners, value)
    if array is None or array.shape != shape or array.dtype != np.dtype(dtype):
        return None
    return array.reshape(-1)


def values(
    layout: Layout,
    given: Any,
    what: str,
    *,
    finite: bool,
    near: StoreMap | None = None,
) -> dict[int, Array]:
    """Check a mapping of deltas or new values, as :func:`gradients` does gradients."""
    how: dict[str, Any] = {"finite": finite, "near": near}
    return gradients(layout, {}, given, model=True, what=what, **how)


def _not_taken(layout: Layout, name: str) -> ValueError:
    """Return why rows are refused where arrays alone are taken, or raise for a name.

    Handles and trainers push rows apart from arrays: only `aggregate` brings any here.
    """
    if name in layout.table_by_name:
        check_together(Combination("aggregate", table=name))
    return _rows_for_array(layout, name)


def _rows_for_array(layout: Layout, name: str) -> PushRejectedError:
    # Says which names there are, where this is none.
    shape = layout[name].shape
    return PushRejectedError(
        f"rows were given for {name[:60]!r}, which is an array of shape {shape}; give it "
        f"an array of that shape"
    )


def look(
    layout: Layout,
    arrays: Mapping[int, Array],
    advice: Callable[[], str] = lambda: ADVICE,
) -> None:
    """Look for NaN and Inf in gradients that were checked with ``finite=False``.

    Parameters
    ----------
    layout : Layout
        The store's layout.
    arrays : mapping of int to ndarray, shape (n,)
        Gradients by parameter index.
    advice : callable
        Returns a way out for the error message; a caller that knows more gives it.

    Raises
    ------
    PushRejectedError
        Where there are any. Nothing has been changed anywhere.
    """
    for index, array in arrays.items():
        if not is_finite(array):
            raise not_finite(array, layout.parameters[index], "gradient", advice)


def check_sums(made: Mapping[str, Array]) -> None:
    """Refuse sums of finite arrays that are not finite.

    Raises
    ------
    PushRejectedError
        Naming the first of them.
    """
    for name, array in made.items():
        if not is_finite(array):
            raise PushRejectedError(
                f"the sum of the contributions to {name[:60]!r} overflows {array.dtype}; "
                f"scale them down, or set the configuration value daskps.finite to 'allow'"
            )


def row_gradients(
    layout: Layout,
    optimizers: Mapping[int, str],
    rows: Mapping[str, RowGrad],
    *,
    weight: float,
    finite: bool,
    near: StoreMap | None = None,
) -> list[RowBatch]:
    """Check gradients of rows, and multiply them by a weight.

    Parameters
    ----------
    layout : Layout
        The store's layout.
    optimizers : mapping of int to str
        The parameters and tables that have an optimizer.
    rows : mapping of str to RowGrad
        The gradients by the names of tables.
    weight : float
        The factor.
    finite : bool
        Whether NaN and Inf are refused.
    near : StoreMap, optional
        As in :func:`gradients`.

    Returns
    -------
    list of RowBatch
        One for each table, in its compute dtype.

    Raises
    ------
    NoOptimizerError, PushRejectedError
        For what its name says. Nothing has been changed anywhere.
    """
    found = []
    for name, given in rows.items():
        table = layout.table_by_name[name]
        dtype = COMPUTED.get(table.dtype)
        if dtype is None or table.index not in optimizers:
            raise takes_none(table)
        how: dict[str, Any] = {"near": near, "finite": finite}
        ids, data = _rows_of(table, given, dtype, "gradient", **how)
        if weight != 1.0:
            data = times(table, data, weight, finite=finite)
        split = IdSplit.of(table, ids, layout.n_shards)
        if len(ids) > MOST_PUSHED_ROWS:
            _check_room(split)
        found.append(RowBatch(split, data))
    return found


def row_values(
    layout: Layout,
    rows: Mapping[str, RowGrad],
    what: str,
    *,
    finite: bool,
    near: StoreMap | None = None,
) -> list[list[RowBatch]]:
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
    near : StoreMap, optional
        As in :func:`gradients`.

    Returns
    -------
    list of list of RowBatch
        For one call after the other: more rows than a shard takes at once go in parts.

    Raises
    ------
    PushRejectedError
        For what does not fit. Nothing has been changed anywhere.
    """
    calls: list[list[RowBatch]] = [[]]
    for name, given in rows.items():
        table = layout.table_by_name[name]
        how: dict[str, Any] = {"near": near, "finite": finite}
        ids, data = _rows_of(table, given, table.dtype, what, **how)
        for i, start in enumerate(range(0, max(1, len(ids)), MOST_PUSHED_ROWS)):
            part = slice(start, start + MOST_PUSHED_ROWS)
            split = IdSplit.of(table, ids[part], layout.n_shards)
            of_part = slice(start * table.dim, (start + MOST_PUSHED_ROWS) * table.dim)
            if i == len(calls):
                calls.append([])
            calls[i].append(RowBatch(split, data[of_part]))
    return calls


def removals(layout: Layout, table: Table, ids: Any) -> list[list[RowBatch]]:
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
    return [[RowBatch(IdSplit.of(table, p, layout.n_shards), none)] for p in parts]


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


def _rows_of(
    table: Table,
    given: RowGrad,
    dtype: str,
    what: str,
    *,
    near: StoreMap | None,
    finite: bool,
) -> tuple[Array, Array]:
    """Return ids, and the rows for them as one vector of a dtype."""
    ids, shape = asked_ids(table, given.ids, PushRejectedError)
    whole = (*shape, table.dim)
    there = None if near is None else _kept(near, given.values, whole, dtype)
    if there is not None and are_finite([there], look=finite):
        return ids, there
    return ids, ready(given.values, table, dtype, what, shape=whole, finite=finite)


def look_at_rows(rows: Iterable[RowBatch]) -> None:
    """Look for NaN and Inf in rows, as :func:`look` does in arrays."""
    for given in rows:
        if not is_finite(given.data):
            raise not_finite(given.data, given.split.table, "gradient")


def _check_room(split: IdSplit) -> None:
    """Refuse more rows than a shard can take back: one push is one update."""
    for shard in split.shards():
        ids = split.ids_of(shard)
        if len(ids) <= MOST_PUSHED_ROWS:
            continue
        if (n := len(np.unique(ids))) > MOST_PUSHED_ROWS:
            raise PushRejectedError(
                f"a gradient for {n:,} rows of table {split.table.name[:60]!r} in shard "
                f"{shard}, which takes {MOST_PUSHED_ROWS:,} at once; push the batch in "
                f"parts, or create the store with more shards"
            )


class RepeatedGradients:
    """Checks mappings of gradients, nearly all of which are like the one before.

    Threads: one at a time, as all of a trainer's calls.

    Parameters
    ----------
    layout : Layout
        The store's layout.
    optimizers : mapping of int to str
        The parameters that have an optimizer.
    finite : bool
        Whether NaN and Inf are refused.
    near : StoreMap, optional
        The store, where arrays of its device may stay there.
    """

    def __init__(
        self,
        layout: Layout,
        optimizers: Mapping[int, str],
        *,
        finite: bool,
        near: StoreMap | None = None,
    ) -> None:
        self._layout, self._optimizers, self._finite = layout, optimizers, finite
        self._near = near
        self._cache = str(config.load().cache)
        #: Of the gradients before, in their order: name, index, shape and dtype.
        self._wanted: tuple[tuple[str, int, tuple[int, ...], Any], ...] = ()

    def take(self, given: Any) -> dict[int, Array]:
        """Return gradients as :func:`gradients` does.

        Parameters
        ----------
        given : mapping
            Nested mapping of name to array of the parameter's shape.

        Returns
        -------
        dict of int to ndarray, shape (n,)
            By parameter index, C order, contiguous, in the parameter's compute dtype.

        Raises
        ------
        UnknownParameterError, NoOptimizerError, PushRejectedError
            For what its name says. Nothing has been changed anywhere.
        """
        wanted = self._wanted
        if type(given) is dict and len(given) == len(wanted):
            found = {}
            for (name, index, shape, dtype), (key, value) in zip(
                wanted, given.items(), strict=True
            ):
                if (
                    key != name
                    or type(value) is not np.ndarray
                    or value.shape != shape
                    or value.dtype != dtype
                    or not value.flags.c_contiguous
                ):
                    break
                flat = value.reshape(-1)
                # The general check, which sees all arrays, says what is wrong.
                if self._finite and not finite_of(flat, cache_dir=self._cache):
                    break
                found[index] = flat
            else:
                return found
        how: dict[str, Any] = {"finite": self._finite, "near": self._near}
        found = gradients(self._layout, self._optimizers, given, **how)
        self._learn(given)
        return found

    def _learn(self, given: Mapping[str, Any]) -> None:
        """Remember what was good, unless it is nested: then other names say it."""
        wanted: list[tuple[str, int, tuple[int, ...], Any]] = []
        for name in given:
            parameter = self._layout.by_name.get(name)
            if parameter is None:
                wanted.clear()
                break
            dtype = np.dtype(COMPUTED[parameter.dtype])
            wanted.append((name, parameter.index, parameter.shape, dtype))
        self._wanted = tuple(wanted)
