"""Rows that a trainer hands over, looked at before anything leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.errors import PushRejectedError
from daskps.layout.arrays import FLOATS
from daskps.limits import MOST_PUSHED_ROWS
from daskps.store import row_intake
from daskps.store.with_rows import refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskps.cluster.caller.row_routes import RowsGiven
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.store.row_grad import RowGrad


def rows_given(
    meta: StoreMap, named: Mapping[str, RowGrad], clash: str, *, finite: bool
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
    clash : str
        What of the run takes arrays alone, see :mod:`daskps.store.with_rows`.
    finite : bool
        Whether NaN and Inf are refused.

    Raises
    ------
    NoOptimizerError, PushRejectedError
        For what its name says. Nothing has been changed anywhere.
    """
    for name in named if clash else ():
        raise refusal(name, clash)
    return row_intake.gradients(
        meta.layout, meta.optimizers, named, weight=1.0, finite=finite
    )


def deltas_of_rows(
    meta: StoreMap,
    named: Mapping[str, RowGrad],
    clash: str,
    *,
    in_round: bool,
    finite: bool,
) -> list[RowsGiven]:
    """Return what is added to rows as a trainer's step brings it.

    Parameters
    ----------
    meta, named, clash
        As in :func:`rows_given`.
    in_round : bool
        Whether they are summed over the trainers of a round.
    finite : bool
        Whether NaN and Inf are refused.

    Raises
    ------
    PushRejectedError
        For what does not fit. Nothing has been changed anywhere.
    """
    for name in named if clash else ():
        raise refusal(name, clash)
    for name in named if in_round else ():
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
