"""Random numbers of rows: of each row and column alone, with the same bits everywhere.

Only what IEEE 754 rounds in one way is used: the logarithms of C libraries and of NumPy
differ from processor to processor, and each process that reads a row without a push
computes it.
"""
# ruff: noqa: PLR0917  (compiled functions take arguments by position)

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.kernels.words import plain

if TYPE_CHECKING:
    from daskps.kernels.words import Floats, Hash, Ids
    from daskps.typing import Array

#: The step that spreads counters over 64 bits, and the two factors of the finalizer of
#: splitmix64 (Steele, Lea and Flood 2014).
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mixed(x: Hash) -> Any:
    """Return a word of which each bit depends on all bits of the one given."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    return x ^ (x >> np.uint64(31))


def logarithm(x: float) -> Any:
    """Return the natural logarithm of a positive number, by a series."""
    part, exponent = math.frexp(x)
    if part < 0.7071067811865476:
        part *= 2.0
        exponent -= 1
    s = (part - 1.0) / (part + 1.0)
    z, total = s * s, 0.0
    for n in range(23, 0, -2):
        total = total * z + 1.0 / n
    return exponent * 0.6931471805599453 + 2.0 * s * total


def quantile(p: float) -> Any:
    """Return where the standard normal distribution reaches p (Wichura 1988, AS241)."""
    q = p - 0.5
    if abs(q) <= 0.425:
        r = 0.180625 - q * q
        a = 2509.0809287301226727 * r + 33430.575583588128105
        a = (a * r + 67265.770927008700853) * r + 45921.953931549871457
        a = (a * r + 13731.693765509461125) * r + 1971.5909503065514427
        a = (a * r + 133.14166789178437745) * r + 3.387132872796366608
        b = 5226.495278852854561 * r + 28729.085735721942674
        b = (b * r + 39307.89580009271061) * r + 21213.794301586595867
        b = (b * r + 5394.1960214247511077) * r + 687.1870074920579083
        b = (b * r + 42.313330701600911252) * r + 1.0
        return q * a / b
    r = math.sqrt(-logarithm(min(p, 1.0 - p)))
    if r <= 5.0:
        r -= 1.6
        a = 7.7454501427834140764e-4 * r + 0.0227238449892691845833
        a = (a * r + 0.24178072517745061177) * r + 1.27045825245236838258
        a = (a * r + 3.64784832476320460504) * r + 5.7694972214606914055
        a = (a * r + 4.6303378461565452959) * r + 1.42343711074968357734
        b = 1.05075007164441684324e-9 * r + 5.475938084995344946e-4
        b = (b * r + 0.0151986665636164571966) * r + 0.14810397642748007459
        b = (b * r + 0.68976733498510000455) * r + 1.6763848301838038494
        b = (b * r + 2.05319162663775882187) * r + 1.0
    else:
        r -= 5.0
        a = 2.01033439929228813265e-7 * r + 2.71155556874348757815e-5
        a = (a * r + 0.0012426609473880784386) * r + 0.026532189526576123093
        a = (a * r + 0.29656057182850489123) * r + 1.7848265399172913358
        a = (a * r + 5.4637849111641143699) * r + 6.6579046435011037772
        b = 2.04426310338993978564e-15 * r + 1.4215117583164458887e-7
        b = (b * r + 1.8463183175100546818e-5) * r + 7.868691311456132591e-4
        b = (b * r + 0.0148753612908506148525) * r + 0.13692988092273580531
        b = (b * r + 0.59983220655588793769) * r + 1.0
    return a / b if q > 0 else -a / b


def fill(
    of_row: Hash, of_column: Hash, ids: Ids, dim: int, is_normal: bool, out: Floats
) -> None:
    """Write the numbers of some rows, one row after the other."""
    for k in range(ids.size):
        key = mixed(of_row + np.uint64(ids[k]) * np.uint64(_STEP)) ^ of_column
        for i in range(dim):
            word = mixed(key + np.uint64(i) * np.uint64(_STEP)) >> np.uint64(11)
            if is_normal:
                # Half a step from either border.
                out[k * dim + i] = quantile((np.float64(word) + 0.5) * 2.0**-53)
            else:
                out[k * dim + i] = np.float64(word) * 2.0**-53


_module = functools.cache(functools.partial(plain, (fill,)))


def _drawn(
    key: tuple[int, int],
    ids: Array,
    dim: int,
    *,
    is_normal: bool,
    cache_dir: str | None = None,
) -> Array:
    """Return numbers of rows.

    Parameters
    ----------
    key : tuple of two int
        Of 64 bits each. Tables with other ones have other numbers.
    ids : ndarray, shape (k,), int64
        Of rows; contiguous.
    dim : int
        How many numbers a row has.
    is_normal : bool
        Whether they are of the standard normal distribution, else of the uniform one on
        [0, 1).
    cache_dir : str, optional
        Where the compiled loop is kept, as in `build`.

    Returns
    -------
    ndarray, shape (k, dim), float64
        Each a function of key, id and column.
    """
    ids = np.ascontiguousarray(ids, np.int64)
    out = np.empty((len(ids), dim))
    loop = _module(cache_dir).function("fill")
    loop(*map(np.uint64, key), ids, dim, is_normal, out.reshape(-1))
    return out


uniforms = functools.partial(_drawn, is_normal=False)
normals = functools.partial(_drawn, is_normal=True)
