"""What a table of a store is made of."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from daskps.errors import LayoutError
from daskps.layout.arrays import DTYPES
from daskps.layout.trees import Leaf
from daskps.store.arguments import whole

#: Of rows at most, of pushes that a row outlives, and before one: words hold them.
_MOST = 2**47


@dataclass(frozen=True, eq=False)
class TableSpec(Leaf):
    """A table of rows that are read and changed by their numbers.

    Each shard owns a range of the rows, or some of all ids by a hash, and no row is ever
    cut. A pull or a push moves only the rows that it names, and a push changes only
    these, with their optimizer state.

    Parameters
    ----------
    rows : int or None
        Number of rows; their ids are 0 to ``rows - 1``. With None any int64 is an id,
        and the table begins without rows: a push, an add or an assign makes those that
        it names, a pull makes none and returns what an absent row would begin with.
    dim : int
        Length of a row.
    dtype : dtype, default "float32"
        A float, integer or bool dtype.
    init : number, callable or array of shape (rows, dim), default 0
        A number; an initializer of :mod:`daskps.init`, whose numbers depend on the seed,
        the table's name and the row's id alone; or an array or dask array with all rows.
        With ``rows=None`` a number, :class:`daskps.init.normal` or
        :class:`daskps.init.uniform`.
    max_rows : int, optional
        With ``rows=None``, how many rows the table holds at most; memory for them is
        taken with the store. Rows lie in buckets of up to 128 by a hash of their ids; of
        a full one that row goes which was pushed least recently, the one with the
        smallest id of several.
    ttl : int, optional
        With ``rows=None``, a row that so many pushes of the table in a row have not
        named is absent.
    admit_after : int, default 1
        With ``rows=None``, with which of the pushes that name it an id gets its row.
        What earlier ones bring for it is dropped, they are only counted; `assign` gives
        a row at once.

    Raises
    ------
    LayoutError
        For lengths or a dtype that no table can have, for an array that does not fit,
        and for what only tables of any ids have.
    TypeError
        For numbers that are no whole ones.

    Examples
    --------
    >>> spec = daskps.TableSpec(1000, 8, init=daskps.init.normal(std=0.01))
    >>> store = daskps.create({"emb": spec}, optimizer=daskps.optim.SGD(0.1))
    >>> store["emb"].pull([3, 3, 999]).shape
    (3, 8)

    Rows of any ids:

    >>> words = daskps.TableSpec(None, 8, init=daskps.init.normal(std=0.01))
    >>> store = daskps.create({"words": words}, optimizer=daskps.optim.SGD(0.1))
    >>> _ = store["words"].push([-3, 2**40], np.ones((2, 8)))
    >>> store["words"].ids()
    array([           -3, 1099511627776])
    """

    rows: int | None
    dim: int
    dtype: Any = "float32"
    init: Any = 0
    _: KW_ONLY
    max_rows: int | None = None
    ttl: int | None = None
    admit_after: int = 1

    def __post_init__(self) -> None:
        self._check_policy()
        for name in ("dim",) if self.rows is None else ("rows", "dim"):
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
        if self.rows is None:
            if self.has_values:
                raise LayoutError(
                    "init has all rows, and with rows=None a table begins without any; "
                    "give a number, daskps.init.normal or daskps.init.uniform, and "
                    "assign rows once the store is there"
                )
            return
        shape = getattr(self.init, "shape", None)
        # Of a list it is looked at with its values.
        if self.has_values and shape not in (None, (self.rows, self.dim)):
            raise LayoutError(
                f"init has shape {shape}, the table ({self.rows}, {self.dim}); "
                f"give all rows, a number, or an initializer of daskps.init"
            )

    def _check_policy(self) -> None:
        """Refuse numbers for rows that come and go which mean nothing."""
        for name, none in (("max_rows", None), ("ttl", None), ("admit_after", 1)):
            given = getattr(self, name)
            if given is None and none is None:
                continue
            number = whole(given, name)
            if not 1 <= number <= _MOST:
                raise LayoutError(
                    f"a table with {name}={number}; it is a number from 1 to {_MOST:,}"
                )
            if number != none and self.rows is not None:
                raise LayoutError(
                    f"{name}={number} for a table of {self.rows} rows, which has all of "
                    f"them at any time; leave it out, or give rows=None"
                )
            object.__setattr__(self, name, number)

    @property
    def has_values(self) -> bool:
        """Whether `init` has all rows, in an array."""
        return getattr(self.init, "ndim", 0) > 0 or isinstance(self.init, list | tuple)
