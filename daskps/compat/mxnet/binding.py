"""Inputs that a group is bound to, their shapes, and the rows of each executor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.store.arguments import whole
from daskps.training.data.rows import split_batch

if TYPE_CHECKING:
    from daskps.typing import Array

#: Uses of gradients: replace those before, add to them, or compute none.
REQUESTS = ("write", "add", "null")


@dataclass(frozen=True)
class DataBatch:
    """One batch.

    Parameters
    ----------
    data : list of array_like
        One for each of the group's `data_shapes`.
    label : list of array_like, optional
        One for each of its `label_shapes`.

    Examples
    --------
    >>> from daskps.compat import mxnet
    >>> len(mxnet.DataBatch([np.zeros((4, 2))], [np.zeros(4)]).data)
    1
    """

    data: Sequence[Any]
    label: Sequence[Any] | None = None


@dataclass(frozen=True)
class BoundInput:
    """An input by name.

    Parameters
    ----------
    name : str
        Its name.
    shape : tuple of int
        Of the whole batch.
    axis : int
        That of the rows; -1 where every executor gets all of it.
    dtype : numpy.dtype, optional
        The dtype that arrays of a batch are cast to.
    """

    name: str
    shape: tuple[int, ...]
    axis: int
    dtype: Any


def bound_inputs(shapes: Any, what: str) -> list[BoundInput]:
    """Return inputs of (name, shape), (name, shape, layout), or a DataDesc.

    MXNet's own DataDesc is a pair with attributes dtype and layout.

    Raises
    ------
    ValueError, TypeError
        For what are none.
    """
    found = []
    for given in shapes or ():
        if not isinstance(given, Sequence) or len(given) not in (2, 3, 4):
            raise TypeError(
                f"{what} are (name, shape), (name, shape, layout) or (name, shape, dtype, "
                f"layout), found {given!r:.60}"
            )
        name, shape, *rest = given
        layout = rest[-1] if rest else getattr(given, "layout", None)
        dtype = rest[0] if len(rest) > 1 else getattr(given, "dtype", None)
        if layout is not None and not (isinstance(layout, str) and layout.isupper()):
            raise TypeError(
                f"the layout in {what} of {name!r} is capitals such as 'NC', found "
                f"{layout!r:.60}"
            )
        sizes = tuple(whole(n, f"{what} of {name!r}", 1) for n in shape)
        axis = layout.find("N") if layout else 0
        if axis >= len(sizes):
            raise ValueError(f"{what} of {name!r}: {shape} has no axis {axis}")
        dtype = dtype if dtype is None else np.dtype(dtype)
        found.append(BoundInput(str(name), sizes, axis, dtype))
    return found


def batch_size_of(inputs: Iterable[BoundInput]) -> int:
    """Return the one batch size of all inputs.

    Raises
    ------
    ValueError
        Where there is none, or more than one.
    """
    sizes = {i.name: i.shape[i.axis] for i in inputs if i.axis >= 0}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"inputs have one batch size, found {sizes or 'none'}")
    return next(iter(sizes.values()))


def cut_rows(n: int, workload: Sequence[float]) -> list[slice]:
    """Return the rows of each executor.

    Raises
    ------
    ValueError
        Where one would get none.
    """
    rows = split_batch(n, workload)
    if any(part.start == part.stop for part in rows):
        raise ValueError(
            f"a batch of {n} over workload {list(workload)} leaves an executor without a "
            f"row; give fewer contexts or a larger batch"
        )
    return rows


def part_of(array: Array, axis: int, rows: slice) -> Array:
    """Return what one executor gets of an array."""
    if axis < 0:
        return array
    return array[(slice(None),) * axis + (rows,)]


def arrays_of_batch(
    inputs: Sequence[BoundInput], given: Any, what: str
) -> dict[str, Array]:
    """Return the arrays of a batch by name, of the shapes that are bound.

    Raises
    ------
    ValueError
        For others.
    """
    arrays = given if isinstance(given, (list, tuple)) else [given]
    if len(arrays) != len(inputs):
        raise ValueError(
            f"the batch has {len(arrays)} {what}, and {len(inputs)} are bound"
        )
    arrays = [np.asarray(a, one.dtype) for a, one in zip(arrays, inputs, strict=True)]
    for array, one in zip(arrays, inputs, strict=True):
        if array.shape != one.shape:
            raise ValueError(
                f"{what} {one.name!r} has shape {array.shape}, and {one.shape} is bound; "
                f"reshape binds to another"
            )
    return {one.name: array for one, array in zip(inputs, arrays, strict=True)}


def requests_of(
    given: Any, names: Sequence[str], fixed: Iterable[str], *, for_training: bool
) -> dict[str, str]:
    """Return what is done with the gradient of each parameter.

    Raises
    ------
    ValueError, TypeError
        For other words, and names that there are not.
    """
    if isinstance(given, str):
        requests = dict.fromkeys(names, given)
    elif isinstance(given, Mapping):
        requests = dict.fromkeys(names, "null") | dict(given)
    elif isinstance(given, (list, tuple)) and len(given) == len(names):
        requests = dict(zip(names, given, strict=True))
    else:
        raise TypeError(
            f"grad_req is one word, one for each of {len(names)} parameters, or a mapping, "
            f"found {given!r:.60}"
        )
    unknown = sorted(set(requests).union(fixed) - set(names))
    if unknown:
        raise ValueError(
            f"there is no parameter {unknown[0]!r}; there are {list(names)}"
        )
    for name, request in requests.items():
        if request not in REQUESTS:
            raise ValueError(
                f"grad_req of {name!r} is one of {', '.join(REQUESTS)}, found {request!r:.60}"
            )
    quiet = names if not for_training else list(fixed)
    return requests | dict.fromkeys(quiet, "null")
