"""Initial values of the rows of tables: of each row alone, whoever asks for it.

A number depends on the seed, the table's name, the row's id and the column, and on
nothing else: a table has the same rows on any number of shards, on whatever processors.
:mod:`daskps.kernels.row_values` draws them.
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
from daskps.kernels.row_values import normals, uniforms
from daskps.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.init import Custom, Initializer
    from daskps.typing import Array


def fill_rows(
    rows: Array,
    initializer: Initializer,
    *,
    name: str,
    seed: int,
    first: int,
    n: int,
    cache_dir: str | None = None,
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
    cache_dir : str, optional
        Where the compiled loop is kept, as in `kernels.build`.

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
    draw, scale, start = _moved(chosen, (n, dim))
    at_once, key = max(1, BLOCK // dim), _key(seed, name)
    for i in range(0, k, at_once):
        part = rows[i : i + at_once]
        ids = np.arange(first + i, first + i + len(part))
        drawn = draw(key, ids, dim, cache_dir=cache_dir)
        with np.errstate(over="ignore"):
            part[...] = start + scale * drawn
        if not np.isfinite(part).all():
            raise _not_finite(name, rows.dtype)


def _key(seed: int, name: str) -> tuple[int, int]:
    """Return two words that tell a table from others."""
    told = f"{seed}/{name}".encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(told, digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def _moved(
    initializer: Drawn, shape: tuple[int, int]
) -> tuple[Callable[..., Array], float, float]:
    """Return what draws for a table of that shape, times which factor, plus what."""
    match initializer:
        case uniform(low, high):
            return uniforms, high - low, low
        case normal(mean, std):
            return normals, std, mean
        case fan_in(scale):
            return normals, math.sqrt(scale / fans(shape)[0]), 0.0
        case fan_avg(scale):
            border = math.sqrt(6.0 * scale / sum(fans(shape)))
            return uniforms, 2.0 * border, -border


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


def initial_rows(
    ids: Array,
    shape: tuple[int, Any],
    initializer: constant | normal | uniform,
    *,
    name: str,
    seed: int,
    cache_dir: str | None = None,
) -> Array:
    """Return the first values of unbounded rows.

    Parameters
    ----------
    ids : ndarray, shape (k,), int64
        The ids; contiguous.
    shape : (int, dtype)
        Length of a row, and the table's dtype.
    initializer : constant, normal or uniform
        An initializer that a table without a number of rows may have.
    name : str
        Name of the table.
    seed : int
        Seed of the store, at least 0.
    cache_dir : str, optional
        Where the compiled loop is kept, as in `kernels.build`.

    Returns
    -------
    ndarray, shape (k, dim)
        Finite as far as the dtype can hold the values; the same that `fill_rows` gives.
    """
    dim, dtype = shape
    rows = np.empty((len(ids), dim), dtype)
    if isinstance(initializer, constant):
        rows[...] = initializer.value
        return rows
    draw, scale, start = _moved(initializer, (1, dim))
    at_once, key = max(1, BLOCK // dim), _key(seed, name)
    for i in range(0, len(ids), at_once):
        drawn = draw(key, ids[i : i + at_once], dim, cache_dir=cache_dir)
        with np.errstate(over="ignore"):
            rows[i : i + at_once] = start + scale * drawn
    return rows
