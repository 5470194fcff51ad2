"""What a table of a store is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from daskps.errors import LayoutError
from daskps.layout.arrays import DTYPES
from daskps.store.arguments import whole


@dataclass(frozen=True, eq=False)
class TableSpec:
    """A table of rows that are read and changed by their numbers.

    Each shard owns a range of the rows, and no row is ever cut. A pull or a push moves
    only the rows that it names, and a push changes only these, with their optimizer
    state.

    Parameters
    ----------
    rows : int
        Number of rows; their ids are 0 to ``rows - 1``.
    dim : int
        Length of a row.
    dtype : dtype, default "float32"
        A float, integer or bool dtype.
    init : number, callable or array of shape (rows, dim), default 0
        A number; an initializer of :mod:`daskps.init`, whose numbers depend on the seed,
        the table's name and the row's id alone; or an array or dask array with all rows.

    Raises
    ------
    LayoutError
        For lengths or a dtype that no table can have, and for an array that does not
        fit.
    TypeError
        For lengths that are no whole numbers.

    Examples
    --------
    >>> spec = daskps.TableSpec(1000, 8, init=daskps.init.normal(std=0.01))
    >>> store = daskps.create({"emb": spec}, optimizer=daskps.optim.SGD(0.1))
    >>> store["emb"].pull([3, 3, 999]).shape
    (3, 8)
    """

    rows: int
    dim: int
    dtype: Any = "float32"
    init: Any = 0

    def __post_init__(self) -> None:
        for name in ("rows", "dim"):
            length = whole(getattr(self, name), name, least=-(2**63))
            if length < 1:
                raise LayoutError(
                    f"a table of {name}={length}; it needs at least one row of at "
                    f"least one element"
                )
            object.__setattr__(self, name, length)
        dtype = np.dtype(self.dtype).name
        if dtype not in DTYPES:
            raise LayoutError(
                f"dtype {dtype} cannot be held by a store; use one of "
                f"{', '.join(DTYPES)}"
            )
        object.__setattr__(self, "dtype", dtype)
        shape = getattr(self.init, "shape", None)
        # Of a list it is looked at with its values.
        if self.has_values and shape not in (None, (self.rows, self.dim)):
            raise LayoutError(
                f"init has shape {shape}, the table ({self.rows}, {self.dim}); "
                f"give all rows, a number, or an initializer of daskps.init"
            )

    @property
    def has_values(self) -> bool:
        """Whether `init` has all rows, in an array."""
        return getattr(self.init, "ndim", 0) > 0 or isinstance(self.init, list | tuple)
