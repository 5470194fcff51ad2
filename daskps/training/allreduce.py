"""The arrays that a trainer brings to an all-reduce, looked at before they are sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.host.collectives import Offered
from daskps.layout.arrays import FLOATS
from daskps.limits import MOST_PARAMETERS
from daskps.reduction import OPERATIONS
from daskps.store import intake
from daskps.store.values import as_array

if TYPE_CHECKING:
    from daskps.typing import Array


def brought_by(given: Any, op: Any) -> tuple[Offered, list[Array]]:
    """Return what arrays are, and each of them flat.

    One array alone has the name "".

    Raises
    ------
    ValueError
        For an operation that no all-reduce has, and for what has no numbers that can be
        combined.
    """
    if not isinstance(op, str) or op not in OPERATIONS:
        raise ValueError(
            f"op={op!r:.60} is not known; choose one of {tuple(OPERATIONS)}"
        )
    named = intake.plain(given) if isinstance(given, Mapping) else {"": given}
    if not 1 <= len(named) <= MOST_PARAMETERS:
        raise ValueError(
            f"an allreduce of {len(named):,} arrays; it takes 1 to {MOST_PARAMETERS:,}"
        )
    about, flats = [], []
    for name, value in named.items():
        array = _numbers(value, op, f"array {name[:60]!r}" if name else "the array")
        flats.append(np.ascontiguousarray(array).reshape(-1))
        about.append((name, array.shape, array.dtype.name))
    return Offered(op, tuple(about)), flats


def _numbers(value: Any, op: str, what: str) -> Array:
    array = as_array(value, what, ValueError)
    if op == "mean" and array.dtype.name not in FLOATS:
        return array.astype(np.float64)
    if op == "sum" and array.dtype == bool:
        raise ValueError(
            f"{what} is bool, of which there is no sum; pass .astype(int) to count"
        )
    return array
