"""A compiled check that every element of an array is a finite number."""

from __future__ import annotations

from typing import Any

import numpy as np

from daskps.kernels.compiled import module_of
from daskps.kernels.source import finite_source

#: Below this many elements NumPy's two passes cost less than they gain.
_SMALL = 16_384


def finite(a: np.ndarray[Any, np.dtype[Any]], *, cache_dir: str | None = None) -> bool:
    """Return whether an array holds no NaN and no infinity.

    Parameters
    ----------
    a : ndarray, float16, float32 or float64
        Any shape, layout and alignment. Integers and bools are always finite.
    cache_dir : str, optional
        Where the compiled loop for large contiguous arrays is kept, as in `build`.

    Returns
    -------
    bool
        True iff every element is finite; an empty array is.
    """
    if a.size < _SMALL:
        # Nothing is faster, and no function of Python is called.
        return 0 not in np.isfinite(a).tobytes()
    if a.dtype.kind in "iub":
        return True
    loop = a.dtype.kind == "f" and a.dtype.itemsize <= 8
    if not (loop and a.dtype.isnative and a.flags.forc):
        return 0 not in np.isfinite(a).tobytes()
    flat = a.ravel(order="K")
    bits = flat.view(f"u{a.dtype.itemsize}")
    module = module_of(finite_source(a.dtype), cache_dir)
    return bool(module.function("finite")(bits))
