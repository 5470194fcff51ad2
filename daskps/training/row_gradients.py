"""Rows that a trainer hands over, looked at before anything leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.combination import check_rows
from daskps.errors import PushRejectedError
from daskps.layout.arrays import FLOATS
from daskps.limits import MOST_PUSHED_ROWS
from daskps.store import row_intake

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskps.cluster.caller.row_routes import RowsGiven
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.combination import Combination
    from daskps.store.row_grad import RowGrad


def rows_given(
    meta: StoreMap, named: Mapping[str, RowGrad], chosen: Combination, *, finite: bool
) -> list[RowsGiven]:
    """Return gradients of rows as a trainer's step brings them.

    The weight is the step's: whoever applies them multiplies by it, or it counts in
    the mean of a round.

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
    return row_intake.gradients(
        meta.layout, meta.optimizers, named, weight=1.0, finite=finite
    )


def deltas_of_rows(
    meta: StoreMap,
    named: Mapping[str, RowGrad],
    chosen: Combination,
    *,
    finite: bool,
) -> list[RowsGiven]:
    """Return what is added to rows as a trainer's step brings it.

    Parameters
    ----------
    meta, named, chosen
        As in :func:`rows_given`.
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
    first, *rest = row_intake.values(meta.layout, named, "delta", finite=finite)
    if rest:
        raise PushRejectedError(
            f"more than {MOST_PUSHED_ROWS:,} rows of a table in one add, which is one "
            f"step; send them in several"
        )
    return first
