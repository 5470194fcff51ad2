"""Values that trainers leave in the store as their run ends, such as statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import config
from daskps.store.intake import plain, values

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from daskps.layout.arrays import Layout
    from daskps.typing import Array


@dataclass(frozen=True)
class LeftValues:
    """The values that one trainer leaves.

    Parameters
    ----------
    values : mapping of str to ndarray
        By the names of parameters.
    weight : float
        Its weight in the mean.
    result : object
        What its loop has returned.
    """

    values: Mapping[str, Array]
    weight: float = 1.0
    result: Any = None

    def ended(self, result: Any, layout: Layout) -> LeftValues:
        """Return the same of a loop that has returned, with the values as they are now.

        Raises
        ------
        PushRejectedError, UnknownParameterError, TypeError
            For values that no store of that layout takes.
        """
        named = {name: np.array(value) for name, value in plain(self.values).items()}
        values(layout, named, "value", finite=config.check_finite())
        return LeftValues(named, self.weight, result)


def combined(every: Iterable[LeftValues]) -> dict[str, Array]:
    """Return what a store is given: of floats the weighted mean, else the first.

    Parameters
    ----------
    every : iterable of LeftValues
        Of all trainers, in rank order.

    Returns
    -------
    dict of str to ndarray
        Means in float64; values on which all agree come out as they are.
    """
    found: dict[str, Array] = {}
    total: dict[str, float] = {}
    for left in every:
        for name, value in left.values.items() if left.weight else ():
            total[name] = total.get(name, 0.0) + left.weight
            if name not in found:
                is_float = value.dtype.kind == "f"
                found[name] = value.astype(np.float64) if is_float else value
            elif value.dtype.kind == "f" and value.shape == found[name].shape:
                found[name] += (value - found[name]) * (left.weight / total[name])
    return found
