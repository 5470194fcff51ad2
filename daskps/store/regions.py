"""Parts of a parameter: regions, and the rows that an index needs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps import config
from daskps.cluster.caller.region_routes import push_region
from daskps.cluster.caller.routes import GRADIENT, Request, Step
from daskps.store.arguments import number, whole
from daskps.store.values import COMPUTED, ready, takes_none, times

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.layout.parameters import Parameter
    from daskps.typing import Array


class Region(NamedTuple):
    """Elements [start, stop) of a parameter, in C order, as an array of one axis."""

    parameter: Parameter
    start: int
    stop: int

    @classmethod
    def of(cls, parameter: Parameter, start: Any, stop: Any) -> Region:
        """Return a region, or refuse what is none.

        Raises
        ------
        TypeError
            For what is no int.
        IndexError
            For elements that the parameter does not have.
        """
        first, end = whole(start, "start"), whole(stop, "stop")
        if not 0 <= first <= end <= parameter.size:
            raise IndexError(
                f"region({first}, {end}) of {parameter.name[:60]!r}, which has elements "
                f"0 to {parameter.size}; give 0 <= start <= stop <= {parameter.size}"
            )
        return cls(parameter, first, end)

    @property
    def shaped(self) -> Parameter:
        """The array that checks take it for, named after its elements."""
        name = f"{self.parameter.name}: elements {self.start} to {self.stop}"
        return replace(self.parameter, name=name, shape=(self.stop - self.start,))

    def planning(
        self,
        kind: str,
        given: Any,
        what: str,
        *,
        weight: float = 1.0,
        lr: float | None = None,
    ) -> Callable[[StoreMap], Request]:
        """Return what plans a push, an add or an assign."""
        rate = None if lr is None else number(lr, "lr", least=0.0)
        factor = number(weight, "weight", least=0.0)
        step = Step(kind=kind, lr=rate)

        def make(meta: StoreMap) -> Request:
            finite, p = config.check_finite(), self.shaped
            is_gradient = kind == GRADIENT
            dtype = COMPUTED.get(p.dtype) if is_gradient else p.dtype
            if dtype is None or (is_gradient and p.index not in meta.optimizers):
                raise takes_none(self.parameter)
            flat = ready(given, p, dtype, what, shape=p.shape, finite=finite)
            if factor != 1.0:
                flat = times(p, flat, factor, finite=finite)
            return push_region(meta, (p.index, self.start), flat, step)

        return make


def split_index(index: Any, shape: tuple[int, ...]) -> tuple[int, int, Any]:
    """Split an index into the rows to read and what to take of those.

    Parameters
    ----------
    index : int, slice, Ellipsis or tuple
        Basic index; anything else raises.
    shape : tuple of int
        Shape it applies to; without axes it has one row.

    Returns
    -------
    low, high, inner
        The smallest run of rows in which all are, and the index to apply to it.

    Raises
    ------
    IndexError
        As NumPy does, for indices out of range or too many.
    TypeError
        For an index that is not basic.
    """
    parts = index if isinstance(index, tuple) else (index,)
    _check_basic(parts)
    # NumPy's own errors, without the values; a broadcast view takes no memory.
    np.broadcast_to(np.empty(()), shape)[index]
    if not shape:
        return 0, 1, (0, *parts)
    if not parts or parts[0] is Ellipsis or parts[0] is None:
        return 0, shape[0], parts
    first, rest = parts[0], parts[1:]
    if not isinstance(first, slice):
        row = int(first) % shape[0]
        return row, row + 1, (0, *rest)
    rows = range(shape[0])[first]
    if not rows:
        return 0, 0, (first, *rest)
    low, high = min(rows[0], rows[-1]), max(rows[0], rows[-1]) + 1
    return low, high, (slice(rows[0] - low, None, rows.step), *rest)


def named_rows(index: Any, shape: tuple[int, ...]) -> tuple[Array, Any] | None:
    """Return the rows that an array of ints or a mask names.

    Parameters
    ----------
    index : array_like of int or bool, or tuple that begins with one
        Further entries of a tuple are basic.
    shape : tuple of int
        Shape it applies to.

    Returns
    -------
    (ndarray of int64, index) or None
        Each row once, ascending, and the index to apply to these; None for an index
        without an array.

    Raises
    ------
    IndexError
        As NumPy does, for rows out of range, masks of another shape, and arrays of other
        dtypes.
    TypeError
        For arrays behind the first axis.

    Examples
    --------
    >>> named_rows([3, 1, 1], (4, 2))
    (array([1, 3]), (array([1, 0, 0]),))
    """
    parts = index if isinstance(index, tuple) else (index,)
    if not parts or not isinstance(parts[0], list | np.ndarray):
        return None
    first, rest = np.asarray(parts[0]), parts[1:]
    if first.dtype == bool and not first.ndim:  # as True is, no mask of rows
        _check_basic(parts)
    if not first.size and isinstance(parts[0], list):
        first = first.astype(np.intp)
    _check_basic(rest)
    # NumPy's own errors, of a byte for each element of the result.
    np.broadcast_to(np.empty((), bool), shape)[(first, *rest)]
    arrays = first.nonzero() if first.dtype == bool else (first,)
    rows = np.where(arrays[0] < 0, arrays[0] + shape[0], arrays[0]).astype(np.int64)
    distinct, inverse = np.unique(rows, return_inverse=True)
    return distinct, (inverse.reshape(rows.shape), *arrays[1:], *rest)


def _check_basic(parts: tuple[Any, ...]) -> None:
    for part in parts:
        # NumPy takes a bool for a mask, Python for an int.
        basic = (int, np.integer, slice, type(Ellipsis), type(None))
        if isinstance(part, bool) or not isinstance(part, basic):
            raise TypeError(
                f"a parameter is indexed by int and slice, and on its first axis by an "
                f"array of ints or a mask, found {part!r:.60}; pull() it and index the "
                f"result for anything else"
            )


def runs_of_rows(rows: Array) -> list[tuple[int, int]]:
    """Return ascending numbers as runs [start, stop).

    Examples
    --------
    >>> runs_of_rows(np.array([1, 2, 5]))
    [(1, 3), (5, 6)]
    """
    if not len(rows):
        return []
    ends = np.flatnonzero(np.diff(rows) > 1)
    starts = rows[[0, *(ends + 1)]].tolist()
    stops = (rows[[*ends, len(rows) - 1]] + 1).tolist()
    return [*zip(starts, stops, strict=True)]
