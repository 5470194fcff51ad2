"""Checks of the arrays that a compiled loop reads and writes; the loop makes none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from daskps.typing import Array

#: The dtype of ids, positions and words.
ID: Final = np.dtype(np.int64)


def check_input(a: Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Refuse what a loop cannot read.

    Parameters
    ----------
    a : ndarray
        The caller's array.
    dtype : dtype
        The dtype it must have.
    shape : tuple of int
        The shape it must have.

    Raises
    ------
    ValueError
        If it is no contiguous array of that dtype and shape.
    """
    if a.dtype != dtype or a.shape != shape or not a.flags.c_contiguous:
        raise ValueError(
            f"expected a contiguous {dtype} array of shape {shape}, got {a.dtype} "
            f"of shape {a.shape} with strides {a.strides}"
        )


def check_output(
    a: Array, dtype: np.dtype[Any], shape: tuple[int, ...], what: str
) -> None:
    """Refuse what a loop cannot write.

    Parameters
    ----------
    a : ndarray
        The caller's array.
    dtype : dtype
        The dtype it must have.
    shape : tuple of int
        The shape it must have.
    what : str
        The caller's name for it, for messages.

    Raises
    ------
    ValueError
        If it is no contiguous, aligned and writable array of that dtype and shape.
    """
    flags = a.flags
    # Arrays of devices say less, and are always aligned and writable.
    fit = getattr(flags, "carray", flags.c_contiguous)
    if a.dtype != dtype or a.shape != shape or not fit:
        raise ValueError(
            f"{what} must be a contiguous, aligned and writable {dtype} array of shape "
            f"{shape}, got {a.dtype} of shape {a.shape} with strides {a.strides}, "
            f"aligned {getattr(flags, 'aligned', True)}, "
            f"writable {getattr(flags, 'writeable', True)}"
        )
