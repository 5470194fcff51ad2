"""A compiled check that every element of an array is a finite number."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.kernels.compiled import module_of, module_source

if TYPE_CHECKING:
    from daskps.kernels.compiled import Module

#: Below this many elements NumPy's two passes cost less than they gain.
_SMALL = 16_384

_FINITE = """\
# The exponent bits alone: an integer OR vectorises, a floating-point sum does not.
EXPONENT = np.{unsigned}({exponent})


@loop
def finite(a: read(types.{unsigned})):
    for start in range(0, a.size, {block}):
        block = a[start : start + {block}]
        bad = np.{unsigned}(0)
        for i in range(block.size):
            bad |= np.{unsigned}((block[i] & EXPONENT) == EXPONENT)
        if bad:
            return False
    return True
"""


@functools.cache
def _module(dtype: np.dtype[Any], cache_dir: str | None) -> Module:
    info = np.finfo(dtype)
    exponent = hex(((1 << info.iexp) - 1) << info.nmant)
    text = _FINITE.format(unsigned=f"uint{info.bits}", exponent=exponent, block=_SMALL)
    return module_of(module_source(text), cache_dir)


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
    return bool(_module(a.dtype, cache_dir).function("finite")(bits))
