"""Ids of rows, from whatever users hold them in.

pandas and pyarrow are recognised by what their objects have: nothing imports them here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from daskps.layout.trees import NO_RESULT, is_future

if TYPE_CHECKING:
    from daskps.typing import Array

_Error: TypeAlias = type[Exception]

_ID = np.dtype(np.int64)
_LARGEST = int(np.iinfo(np.int64).max)
#: Kinds of dtypes, as messages name them.
_KINDS = {"b": "bool", "f": "float", "c": "complex"}
#: Dimensions that an array of NumPy's may have.
_MOST_LEVELS = 64
_TEXT = "text is no id; daskps.hash_ids makes ids of it"


def as_ids(given: Any, what: str, error: _Error) -> tuple[Array, tuple[int, ...]]:
    """Return ids as one flat array of int64, and the shape they came in.

    Parameters
    ----------
    given : array_like of int
        An array of any integer dtype and shape, a list, a pandas Index or Series, a
        pyarrow array, an int. A contiguous array of int64 is not copied.
    what : str
        The owner of the ids, for the message: "table 'emb'".
    error : type of Exception
        The error to raise.

    Returns
    -------
    ids : ndarray, shape (n,), int64
        Contiguous; maybe the memory of the caller.
    shape : tuple of int
        That of what was given.

    Raises
    ------
    error
        For anything else: floats (also whole ones), bools, text, missing values, and
        numbers that no int64 holds.
    """
    if type(given) is np.ndarray and given.dtype == _ID and given.flags.c_contiguous:
        return given.reshape(-1), given.shape  # as nearly all are
    try:
        found = _array(given)
        a = _integers(found, given)
    except (ValueError, TypeError, OverflowError) as problem:
        raise error(
            f"{what} takes ids that are integers, found {_described(given)}: {problem}"
        ) from problem
    shape = a.shape
    return np.ascontiguousarray(a, _ID).reshape(-1), shape


def check_ids(ids: Array, rows: int, what: str, error: _Error) -> None:
    """Refuse ids that a table of so many rows does not have.

    Parameters
    ----------
    ids : ndarray, shape (n,), int64
        From :func:`as_ids`.
    rows : int
        How many rows there are.
    what : str
        The owner of the ids, for the message.
    error : type of Exception
        The error to raise.

    Raises
    ------
    error
        If one is below 0 or not below `rows`.
    """
    # Numbers below 0 are the largest ones without a sign: one pass finds both.
    if not len(ids) or np.maximum.reduce(ids.view(np.uint64)) < rows:
        return
    at = int(np.flatnonzero(ids.view(np.uint64) >= rows)[0])
    has = f"rows 0 to {rows - 1}" if rows else "no rows"
    raise error(f"{what} has {has}, found id {ids[at]} at position {at} of {len(ids)}")


def _array(given: Any) -> Array:
    """Return an array of whatever dtype, without what it says of missing values."""
    if isinstance(given, np.ma.MaskedArray) and np.ma.is_masked(given):
        raise ValueError("some are masked; use compressed()")
    if isinstance(given, np.ndarray):
        return np.asarray(given)
    if isinstance(given, list | tuple):
        return _of_sequence(given)
    if is_future(given):
        raise TypeError(f"it {NO_RESULT}")
    if getattr(given, "__dask_graph__", None) is not None:
        raise TypeError(
            "it is not computed yet; compute() it, or use map_partitions with a handle"
        )
    if hasattr(given, "null_count") and hasattr(given, "to_numpy"):
        if given.null_count:
            raise ValueError(f"{given.null_count} are null; drop_null() them")
        return np.asarray(given.to_numpy(zero_copy_only=False))
    kind = getattr(getattr(given, "dtype", None), "kind", None)
    if kind in ("i", "u") and hasattr(given, "to_numpy"):
        if given.isna().any():
            raise ValueError("some are missing; dropna() them")
        return np.asarray(given.to_numpy(str(given.dtype.kind) + "8"))
    return np.asarray(given)


def _of_sequence(given: list[Any] | tuple[Any, ...]) -> Array:
    if _has_bool(given):
        # NumPy makes 0 and 1 of them where others are ints.
        raise TypeError("a bool among them; a mask is turned into ids by flatnonzero")
    found = np.asarray(given)
    # NumPy has floats where nothing says what they are.
    return found if found.size else np.empty(found.shape, _ID)


def _has_bool(given: list[Any] | tuple[Any, ...], level: int = 1) -> bool:
    if level > _MOST_LEVELS:
        raise ValueError(f"lists in lists, more than {_MOST_LEVELS} levels of them")
    kinds = set(map(type, given))
    if bool in kinds or np.bool_ in kinds:
        return True
    for item in given if kinds - {int} else ():
        if isinstance(item, list | tuple) and _has_bool(item, level + 1):
            return True
        if getattr(getattr(item, "dtype", None), "kind", "") == "b":
            return True
    return False


def _integers(found: Array, given: Any) -> Array:
    """Return an array of integers that int64 holds."""
    kind = found.dtype.kind
    if kind == "f" and not isinstance(given, list | tuple):
        raise TypeError("floats, also whole ones, are no ids; use astype('int64')")
    if kind == "O":
        raise _of_objects(found)
    if kind in "US":
        raise TypeError(_TEXT)
    if kind not in "iu":
        raise TypeError(f"{_KINDS.get(kind, found.dtype.name)} is none; use int64")
    unsigned = kind == "u" and found.dtype.itemsize == _ID.itemsize
    if unsigned and found.size and int(found.max()) > _LARGEST:
        raise OverflowError(f"{found.max()} is beyond int64; hash such ids")
    return found


def _is_missing(item: Any) -> bool:
    if isinstance(item, float):
        return math.isnan(item)
    # By name: pandas is not imported for it.
    return item is None or type(item).__name__ in ("NAType", "NaTType")


def _of_objects(found: Array) -> Exception:
    """Return why objects are no ids."""
    items = found.reshape(-1)
    if any(map(_is_missing, items)):
        return ValueError("some are missing; leave these out")
    for item in items:
        if isinstance(item, int) and not -_LARGEST - 1 <= item <= _LARGEST:
            return OverflowError(f"{item!r:.60} is beyond int64; hash such ids")
        if isinstance(item, str | bytes):
            return TypeError(_TEXT)
    return TypeError("object is no integer dtype; use astype('int64')")


def _described(given: Any) -> str:
    """Return what was given, briefly; its own repr may be any length, or raise."""
    name = type(given).__name__
    kind = type(given).__module__.partition(".")[0]
    full = name if kind == "builtins" else f"{kind}.{name}"
    dtype = getattr(given, "dtype", getattr(given, "type", None))
    shape = getattr(given, "shape", None)
    if isinstance(shape, tuple) and all(isinstance(n, int) for n in shape):
        return f"{full} of {dtype} and shape {shape} ({math.prod(shape)} in all)"
    if isinstance(given, list | tuple):
        return f"a {name} of {len(given)}"
    return full if dtype is None else f"{full} of {dtype}"
