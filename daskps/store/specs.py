"""Arrays, tables and rows as a user asks for them, or hands them over."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.errors import LayoutError
from daskps.init import check, constant, normal, uniform
from daskps.kernels.row_values import quantile
from daskps.layout.arrays import DTYPES
from daskps.layout.slots import MASTERS
from daskps.layout.trees import Leaf
from daskps.store.arguments import whole

if TYPE_CHECKING:
    from daskps.layout.tables import FirstRows

#: Of rows at most, of pushes that a row outlives, and before one: words hold them.
_MOST = 2**47
#: How far from the mean a drawn number may be, in standard deviations.
_FARTHEST = float(-quantile(2.0**-54))


@dataclass(frozen=True)
class ArraySpec(Leaf):
    """A parameter that its owners make themselves; nothing travels.

    Parameters
    ----------
    shape : tuple of int
        Shape of the parameter.
    dtype : dtype, default "float32"
        A float, integer or bool dtype.
    init : number or callable, default 0
        A number, an initializer of :mod:`daskps.init`, or a function
        ``(shape, dtype, rng) -> ndarray`` that is called with ``shape=(n,)``,
        n ≤ 65,536, for one block of the parameter's elements after the other.
    master : {"float32", "float64"}, optional
        Keep the weights once more, in this dtype, beside the optimizer state: float32
        for float16, float64 for float32. Updates are computed in it, and applied to it;
        the weights are what it is rounded to, so that steps which are smaller than
        their spacing are not lost.

    Raises
    ------
    LayoutError
        For a dtype that no store holds, and a master that is not the next wider one.
    TypeError
        For a shape of anything but whole numbers.

    Examples
    --------
    >>> import daskps
    >>> ArraySpec((1000, 10), "float32", daskps.init.normal(std=0.01)).shape
    (1000, 10)

    Steps of 0.0001 from 1.0, where float16 has no number between 1 and 0.9995:

    >>> params = {"w": ArraySpec(1, "float16", 1.0, master="float32")}
    >>> store = daskps.create(params, optimizer=daskps.optim.SGD(1e-4))
    >>> for _ in range(20):
    ...     _ = store.push({"w": np.ones(1)})
    >>> store["w"].pull()
    array([0.998], dtype=float16)
    """

    shape: Any
    dtype: Any = "float32"
    init: Any = 0
    master: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        given: Any = self.shape
        shape = (given,) if isinstance(given, int) else tuple(given)
        if any(
            isinstance(n, bool) or not isinstance(n, (int, np.integer)) for n in shape
        ):
            raise TypeError(f"shape is a tuple of int, found {self.shape!r}")
        if any(n < 0 for n in shape):
            raise LayoutError(f"shape {shape} has a negative length")
        name = _held(self.dtype)
        object.__setattr__(self, "shape", tuple(int(n) for n in shape))
        object.__setattr__(self, "dtype", name)
        if self.master is not None:
            object.__setattr__(self, "master", _checked_master(name, self.master))


def _checked_master(dtype: str, master: Any) -> str:
    """Return the dtype of a master, or refuse what is none of weights of a dtype."""
    try:
        name = str(np.dtype(master).name)
    except TypeError:
        name = repr(master)[:60]
    if MASTERS.get(dtype) != name:
        known = " or ".join(f"{wide} for {of}" for of, wide in MASTERS.items())
        raise LayoutError(
            f"master={name} is no master of {dtype} weights; it is {known}, or None"
        )
    return name


@dataclass(frozen=True, eq=False)
class TableSpec(Leaf):
    """A table of rows that are read and changed by their numbers.

    Each shard owns a range of the rows, or some of all ids by a hash, and no row is
    ever cut. A pull or a push moves only the rows that it names, and a push changes
    only these, with their optimizer state.

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
        A number; an initializer of :mod:`daskps.init`, whose numbers depend on the
        seed, the table's name and the row's id alone; or an array or dask array with
        all rows. With ``rows=None`` a number, :class:`daskps.init.normal` or
        :class:`daskps.init.uniform`.
    max_rows : int, optional
        With ``rows=None``, how many rows the table holds at most; memory for them is
        taken with the store. Rows lie in buckets of up to 128 by a hash of their ids;
        of a full one that row goes which was pushed least recently, the one with the
        smallest id of several.
    ttl : int, optional
        With ``rows=None``, a row that so many pushes of the table in a row have not
        named is absent.
    admit_after : int, default 1
        With ``rows=None``, with which of the pushes that name it an id gets its row.
        Values of earlier ones for it are dropped, the pushes only counted; `assign`
        gives a row at once.

    Raises
    ------
    LayoutError
        For lengths or a dtype that no table can have, for an array that does not fit,
        and for what only unbounded tables have.
    TypeError
        For numbers that are no whole ones.

    Examples
    --------
    >>> spec = daskps.TableSpec(1000, 8, init=daskps.init.normal(std=0.01))
    >>> store = daskps.create({"emb": spec}, optimizer=daskps.optim.SGD(0.1))
    >>> store["emb"].pull([3, 3, 999]).shape
    (3, 8)

    Unbounded rows:

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
        object.__setattr__(self, "dtype", _held(self.dtype))
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


def _held(dtype: Any) -> str:
    """Return the name of a dtype that a store holds, or refuse another one."""
    name = str(np.dtype(dtype).name)
    if name not in DTYPES:
        raise LayoutError(
            f"dtype {name} cannot be held by a store; use one of {', '.join(DTYPES)}"
        )
    return name


def first_rows(init: Any, *, name: str, dtype: str) -> FirstRows:
    """Return what unbounded rows begin with, in plain numbers.

    Every process that reads, owns, serves or adopts such rows draws them, so it has to
    be something that all of them have: a number, or a distribution of a few.

    Parameters
    ----------
    init : object
        The initial values of a specification.
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
            f"{about} has unbounded rows, which cannot begin with {init!r:.60}: each "
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


@dataclass(frozen=True, eq=False, slots=True)
class RowGrad(Leaf):
    """Gradients, deltas or values for some rows of a table.

    Parameters
    ----------
    ids : array_like of int
        Ids of rows, in any order and shape; a row may be named more than once.
    values : array_like, shape ids.shape + (dim,)
        One row for each id. Those of the same id are summed before the one update of
        that row; in an `assign` the last one holds.

    Examples
    --------
    >>> params = {"w": np.zeros(2), "emb": daskps.TableSpec(10, 2, "float64")}
    >>> store = daskps.create(params, optimizer=daskps.optim.SGD(1.0))
    >>> rows = daskps.RowGrad([7, 3], np.ones((2, 2)))
    >>> _ = store.push({"w": np.ones(2), "emb": rows})
    >>> store["emb"].pull([3, 4])
    array([[-1., -1.],
           [ 0.,  0.]])
    """

    ids: Any
    values: Any
