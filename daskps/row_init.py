"""Initial values of the rows of tables: of each row alone, whoever asks for it.

A number depends on the seed, the table's name, the row's id and the column, and on nothing
else: a table has the same rows on any number of shards. Numbers are drawn by a hash of
these (the finalizer of splitmix64, Steele, Lea and Flood 2014), for many rows at once.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.errors import LayoutError
from daskps.init import (
    BLOCK,
    Drawn,
    check,
    constant,
    fan_avg,
    fan_in,
    fans,
    fill,
    normal,
    uniform,
)
from daskps.usercode import user_code

if TYPE_CHECKING:
    from daskps.init import Custom, Initializer
    from daskps.typing import Array

#: What spreads counters over 64 bits, and the two rounds of the finalizer.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def fill_rows(
    rows: Array, initializer: Initializer, *, name: str, seed: int, first: int, n: int
) -> None:
    """Write new rows of a table.

    Parameters
    ----------
    rows : ndarray, shape (k, dim)
        Where they go; contiguous, of the table's dtype.
    initializer : float, initializer or callable
        A number, one of :mod:`daskps.init`, or ``(shape, dtype, rng) -> array``, called
        for each row with ``shape=(dim,)`` and a generator of its own.
    name : str
        Name of the table.
    seed : int
        Seed of the store, at least 0.
    first : int
        Id of the first of these rows.
    n : int
        Rows of the whole table.

    Raises
    ------
    LayoutError
        If the dtype cannot hold the values, or a callable returns another shape or
        NaN or Inf.

    Examples
    --------
    The same rows in one piece and in two:

    >>> whole, halves = np.empty((10, 2)), np.empty((10, 2))
    >>> fill_rows(whole, normal(), name="emb", seed=7, first=0, n=10)
    >>> fill_rows(halves[:4], normal(), name="emb", seed=7, first=0, n=10)
    >>> fill_rows(halves[4:], normal(), name="emb", seed=7, first=4, n=10)
    >>> bool((whole == halves).all())
    True
    """
    k, dim = rows.shape
    chosen = check(initializer, name=name, dtype=rows.dtype)
    if isinstance(chosen, constant):
        fill(rows.reshape(-1), chosen, name=name, shape=(k * dim,), seed=seed)
        return
    if not isinstance(chosen, Drawn):
        for i in range(k):
            rng = _generator(seed, name, first + i)
            rows[i] = _of_user(chosen, rows[i], name, rng)
        return
    at_once = max(1, BLOCK // dim)
    for i in range(0, k, at_once):
        part = rows[i : i + at_once]
        drawn = _drawn(chosen, _words(seed, name, first + i, part.shape), (n, dim))
        with np.errstate(over="ignore"):
            part[...] = drawn
        if not np.isfinite(part).all():
            raise _not_finite(name, rows.dtype)


def _words(seed: int, name: str, first: int, shape: tuple[int, ...]) -> Array:
    """Return 64 random bits for each element of some rows."""
    told = f"{seed}/{name}".encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(told, digest_size=16).digest()
    of_row, of_column = np.frombuffer(digest, "<u8").astype(np.uint64)
    ids = np.arange(first, first + shape[0]).astype(np.uint64)
    columns = np.arange(shape[1]).astype(np.uint64)
    keys = _mixed(of_row + ids * _STEP)
    return _mixed((keys[:, None] ^ of_column) + columns * _STEP)


def _mixed(x: Array) -> Array:
    """Return words of which each bit depends on all bits of those given."""
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    found: Array = x ^ (x >> np.uint64(31))
    return found


def _unit(words: Array) -> Array:
    """Return numbers in [0, 1) of words."""
    found: Array = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return found


def _drawn(initializer: Drawn, words: Array, shape: tuple[int, int]) -> Array:
    """Return numbers of a distribution, float64, for a table of that shape."""
    drawn: Array
    match initializer:
        case uniform(low, high):
            drawn = low + (high - low) * _unit(words)
        case normal(mean, std):
            drawn = mean + std * _normal(words)
        case fan_in(scale):
            drawn = math.sqrt(scale / fans(shape)[0]) * _normal(words)
        case fan_avg(scale):
            border = math.sqrt(6.0 * scale / sum(fans(shape)))
            drawn = border * (2.0 * _unit(words) - 1.0)
    return drawn


def _normal(words: Array) -> Array:
    """Return numbers of the standard normal distribution (Box and Muller 1958)."""
    angles = 2.0 * np.pi * _unit(_mixed(words + _STEP))
    # 1 - u is above 0.
    return np.sqrt(-2.0 * np.log1p(-_unit(words))) * np.cos(angles)


def _generator(seed: int, name: str, row: int) -> np.random.Generator:
    """Return the generator of one row."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
    key = (*np.frombuffer(digest, "<u4").tolist(), row)
    entropy = np.random.SeedSequence(seed, spawn_key=key)
    return np.random.Generator(np.random.Philox(entropy))


def _of_user(
    initializer: Custom, row: Array, name: str, rng: np.random.Generator
) -> Array:
    """Return one row of a user's function."""
    with user_code(f"the initializer of table {name!r:.60}"):
        drawn = np.asarray(initializer(row.shape, row.dtype, rng))
    if drawn.shape != row.shape or not np.can_cast(drawn.dtype, row.dtype, "same_kind"):
        raise LayoutError(
            f"the initializer of table {name!r} returned shape {drawn.shape} and dtype "
            f"{drawn.dtype} for one row; return shape {row.shape}, castable to "
            f"{row.dtype}"
        )
    with np.errstate(over="ignore"):
        values: Array = drawn.astype(row.dtype, copy=False)
    if row.dtype.kind == "f" and not np.isfinite(values).all():
        raise _not_finite(name, row.dtype)
    return values


def _not_finite(name: str, dtype: np.dtype[Any]) -> LayoutError:
    return LayoutError(
        f"the initializer of table {name!r} gives NaN or Inf in {dtype}; return finite "
        f"values in its range"
    )
