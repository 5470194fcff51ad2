"""Functions that generated kernels call; no other module imports it: it needs Numba."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core.errors import TypingError
from numba.extending import overload


def weight(result: Any) -> Any:
    """Return the weight from what an update without slots gave.

    Parameters
    ----------
    result : float or tuple of one float
        `w` or `(w,)`.

    Returns
    -------
    float
        The weight.
    """
    return result[0] if isinstance(result, tuple) else result


@overload(weight)
def _weight(result: Any) -> Any:
    """Choose at compile time; Numba wants signatures equal to the letter."""

    def bare(result: Any) -> Any:
        return result

    def single(result: Any) -> Any:
        return result[0]

    if not isinstance(result, types.BaseTuple):
        return bare
    if len(result) != 1:
        raise TypingError(f"an update without slots returned {len(result)} values")
    return single
