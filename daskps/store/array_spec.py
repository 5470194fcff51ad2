"""What an array of a store is made of that its owners make themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from daskps.errors import LayoutError
from daskps.layout.arrays import DTYPES
from daskps.layout.slots import MASTERS
from daskps.layout.trees import Leaf


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
        Keep the weights once more, in this dtype, beside the optimizer state: float32 for
        float16, float64 for float32. Updates are computed in it, and applied to it;
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
        name = np.dtype(self.dtype).name
        if name not in DTYPES:
            raise LayoutError(
                f"dtype {name} cannot be held by a store; use one of {', '.join(DTYPES)}"
            )
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
