"""Rows of tables that a batch or a trainer is about: ids, gradients and differences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from dask.utils import funcname

from daskps.combination import check_rows
from daskps.errors import PushRejectedError
from daskps.layout.arrays import FLOATS
from daskps.limits import MOST_PUSHED_ROWS
from daskps.store import intake
from daskps.store.specs import RowGrad
from daskps.store.targets import given_ids
from daskps.training.functions import cannot_take, signature_of
from daskps.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.cluster.caller.row_routes import RowBatch
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.combination import Combination
    from daskps.typing import Array


class IdFunction(NamedTuple):
    """A function that gives the ids of a batch."""

    function: Callable[..., Any]
    #: Whether it is called with a generator too.
    draws: bool


def checked_functions(rows: Any) -> Mapping[str, IdFunction]:
    """Return the functions of ``train(rows=)`` by the names of tables.

    Raises
    ------
    TypeError
        For what is no mapping of names to functions that can be called so.
    """
    if rows is None:
        return {}
    if not isinstance(rows, Mapping):
        raise TypeError(
            f"rows is a mapping of the names of tables to functions, found "
            f"{type(rows).__name__}; pass {{'emb': lambda X_batch: ids}}"
        )
    return {name: _checked(name, function) for name, function in rows.items()}


def _checked(name: Any, function: Any) -> IdFunction:
    if not isinstance(name, str):
        raise TypeError(f"rows names tables, found {name!r:.60}; name each by a string")
    if not callable(function):
        raise TypeError(
            f"rows[{name[:60]!r}] is a function of a batch, found {function!r:.60}; "
            f"pass one that returns its ids, as in lambda X_batch: X_batch[:, 0]"
        )
    if (signature := signature_of(function)) is None:
        return IdFunction(function, draws=False)
    if [*signature.parameters][1:2] != ["rng"] and not cannot_take(signature, 1):
        return IdFunction(function, draws=False)
    if not cannot_take(signature, 2):
        return IdFunction(function, draws=True)
    raise TypeError(
        f"rows[{name[:60]!r}] is called as f(X_batch) or f(X_batch, rng), but "
        f"{funcname(function)}{signature} takes neither"
    )


def check_tables(meta: StoreMap, rows: Mapping[str, IdFunction]) -> None:
    """Refuse names that are none of tables.

    Raises
    ------
    ValueError
        For the name of an array.
    UnknownParameterError
        For one that the store does not have.
    """
    for name in rows:
        if name not in meta.layout.table_by_name:
            shape = meta.layout[name].shape
            raise ValueError(
                f"rows= names {name[:60]!r}, which is an array of shape {shape} and no "
                f"table; leave it out: params has all of it"
            )


def ids_of_batch(
    meta: StoreMap,
    rows: Mapping[str, IdFunction],
    X: Any,
    key: tuple[int, int, int, int],
) -> dict[str, Array]:
    """Call the functions on a batch; return ids by the names of tables.

    Parameters
    ----------
    meta : StoreMap
        The store.
    rows : mapping of str to IdFunction
        The functions.
    X : array_like
        The features of the batch.
    key : tuple of int
        Seed, epoch, rank and clock of the store: draws depend on nothing else. Each
        function draws from its own generator, all the same: tables that one function
        is for get the same ids.

    Raises
    ------
    Exception
        The error of a function, or ValueError and TypeError for values that are no
        ids; with the table in a note.
    """
    found: dict[str, Array] = {}
    sequence = np.random.SeedSequence(key[0], spawn_key=key[1:])
    for name, (function, draws) in rows.items():
        said = f"rows[{name[:60]!r}]"
        drawn = (np.random.default_rng(sequence),) if draws else ()
        try:
            with user_code(said):
                ids = function(X, *drawn)
            found |= given_ids(meta, {name: ids})
        except Exception as error:
            error.add_note(
                f"{said} of train, which is {funcname(function)}, was called for the "
                f"batch at clock {key[-1]} of trainer {key[-2]}; it returns ids of "
                f"rows of that table, whole numbers in any shape"
            )
            raise
    return found


def as_rows(grads: Mapping[str, Any], ids: Mapping[str, Array]) -> Mapping[str, Any]:
    """Return gradients with those for a batch's rows as such, array or not."""
    if not ids:
        return grads
    return {
        name: RowGrad(ids[name], given)
        if name in ids and not isinstance(given, RowGrad)
        else given
        for name, given in intake.plain(grads).items()
    }


def row_batches(
    meta: StoreMap, named: Mapping[str, RowGrad], chosen: Combination, *, finite: bool
) -> list[RowBatch]:
    """Return gradients of rows as a trainer's step brings them.

    The weight is the step's: the owner that applies them multiplies by it, or it counts
    in the mean of a round.

    Parameters
    ----------
    meta : StoreMap
        The store.
    named : mapping of str to RowGrad
        The gradients by the names of tables.
    chosen : Combination
        The verb and what was chosen with it.
    finite : bool
        Whether NaN and Inf are refused.

    Raises
    ------
    NoOptimizerError, PushRejectedError
        For what its name says. Nothing has been changed anywhere.
    """
    if not chosen.takes_rows:  # here: a call more counts for each push
        check_rows(chosen, named)
    return intake.row_gradients(
        meta.layout, meta.optimizers, named, weight=1.0, finite=finite
    )


def deltas_of_rows(
    meta: StoreMap,
    named: Mapping[str, RowGrad],
    chosen: Combination,
    *,
    finite: bool,
) -> list[RowBatch]:
    """Return what is added to rows as a trainer's step brings it.

    Parameters
    ----------
    meta, named, chosen
        As in :func:`row_batches`.
    finite : bool
        Whether NaN and Inf are refused.

    Raises
    ------
    PushRejectedError
        For what does not fit. Nothing has been changed anywhere.
    """
    check_rows(chosen, named)
    for name in named if chosen.has_rounds else ():
        dtype = meta.layout.table_by_name[name].dtype
        if dtype not in FLOATS:
            raise PushRejectedError(
                f"table {name[:60]!r} is {dtype}, and a round sums rows of floats alone; "
                f"train with sync='asp' or 'ssp', or add by the store's handle outside"
            )
    first, *rest = intake.row_values(meta.layout, named, "delta", finite=finite)
    if rest:
        raise PushRejectedError(
            f"more than {MOST_PUSHED_ROWS:,} rows of a table in one add, which is one "
            f"step; send them in several"
        )
    return first
