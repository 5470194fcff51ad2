"""Rows that a trainer hands over, looked at before anything leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
