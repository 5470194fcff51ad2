"""Whether every element is a number."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from daskps.kernels import threads
from daskps.kernels.compiled import Module
from daskps.kernels.source import finite_source

__all__ = ["finite"]

#: Below this many elements NumPy's two passes cost less than they gain.
_SMALL = 16_384

_modules: dict[tuple[np.dtype[Any], str | None], Module] = {}
_lock = threading.Lock()


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
    if a.dtype.kind in "iub":
        return True
    loop = a.size >= _SMALL and a.dtype.kind == "f" and a.dtype.itemsize <= 8
    if not (loop and a.dtype.isnative and a.flags.forc):
        # Half the time of a reduction, for small arrays.
        return bool(np.count_nonzero(np.isfinite(a)) == a.size)
    flat = a.ravel(order="K")
    bits = flat.view(f"u{a.dtype.itemsize}")
    return threads.in_ranges(_module(a.dtype, cache_dir).function("finite"), (bits,))


def _module(dtype: np.dtype[Any], cache_dir: str | None) -> Module:
    key = dtype, cache_dir
    module = _modules.get(key)
    if module is None:
        with _lock:
            module = _modules.setdefault(key, Module(finite_source(dtype), cache_dir))
    return module
