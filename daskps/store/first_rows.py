"""What the rows of a table of any ids begin with, as the layout has it.

Whoever reads, owns, serves or adopts such rows draws them, so it has to be something that
all of them have: a number, or a distribution of a few.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.errors import LayoutError
from daskps.init import check, constant, normal, uniform
from daskps.kernels.row_values import quantile

if TYPE_CHECKING:
    from daskps.layout.tables import FirstRows

#: How far from the mean a drawn number may be, in standard deviations.
_FARTHEST = float(-quantile(2.0**-54))


def first_rows(init: Any, *, name: str, dtype: str) -> FirstRows:
    """Return what rows of any ids begin with, in plain numbers.

    Parameters
    ----------
    init : object
        What a specification holds.
    name : str
        Name of the table, for messages.
    dtype : str
        Its dtype.

    Returns
    -------
    constant, normal or uniform
        All that it may draw is finite in that dtype.

    Raises
    ------
    LayoutError, TypeError
        For anything else.
    """
    about = f"table {name[:60]!r}"
    chosen = check(init, name=name, dtype=dtype)
    if isinstance(chosen, constant):
        value = np.array(chosen.value).astype(dtype).item()
        return constant(int(value) if dtype == "bool" else value)
    if not isinstance(chosen, normal | uniform):
        raise LayoutError(
            f"{about} has rows of any ids, which cannot begin with {init!r:.60}: each "
            f"process that reads such a row works it out by itself, and there is no "
            f"number of rows; give a number, daskps.init.normal or daskps.init.uniform, "
            f"or assign rows"
        )
    numbers = [float(getattr(chosen, n)) for n in type(chosen).__dataclass_fields__]
    low, high = numbers
    with np.errstate(over="ignore"):
        ends = np.array([low, high, high - low])
        if isinstance(chosen, normal):
            ends = low + np.array([-_FARTHEST, _FARTHEST]) * high
        if not np.isfinite(ends[:2].astype(dtype)).all() or not np.isfinite(ends).all():
            raise LayoutError(
                f"the initializer of {about} gives NaN or Inf in {dtype}; return finite "
                f"values in its range"
            )
    return type(chosen)(*numbers)
