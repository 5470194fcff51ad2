"""Tables as training data: each becomes one array of one dtype, once, before the run.

A gradient gets rows of a NumPy array then, from whatever library the data are. The
libraries of tables are asked for nothing but their types, and only those that the user
has imported: data of one that nobody has imported cannot be here.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from daskps.typing import Array

#: Kinds of dtypes whose values are numbers.
_NUMBERS = "biufc"
#: An odd factor: each place in an order has its own power of it, modulo 2**64.
_FACTOR = 0x9E3779B97F4A7C15


class RowNames(NamedTuple):
    """Names of the rows of a table, or of a partition, by its index and in order."""

    n: int
    #: Where they are successive integers, the first of them; else -1. 0 without rows.
    first: int
    #: The same for the same names in the same order, and only there.
    digest: int


@dataclass(frozen=True, slots=True)
class LazyTable:
    """A dask DataFrame or Series, as training takes it: its rows are yet to be counted."""

    #: For Dask a table like the user's, and computed together with others; each partition
    #: comes as a pair: an array, and the names of its rows or else how many there are.
    partitions: Any
    #: An array of such rows, without any.
    meta: Array
    #: Names of the rows that it is paired with, where these are in memory.
    beside: RowNames | None


@dataclass(frozen=True, slots=True)
class _Column:
    #: As messages have it: "column 'age' of X".
    what: str
    #: As its library names it.
    kind: str
    #: The dtype that NumPy gives it; object where it is no number.
    dtype: np.dtype[Any]
    missing: int
    values: Callable[[], Array]


def is_table(data: Any) -> bool:
    """Whether an array is to be made of this in memory."""
    found: list[type] = []
    if (pandas := sys.modules.get("pandas")) is not None:
        found += [pandas.DataFrame, pandas.Series, pandas.Index]
    if (arrow := sys.modules.get("pyarrow")) is not None:
        found += [arrow.Table, arrow.RecordBatch, arrow.Array, arrow.ChunkedArray]
    return isinstance(data, tuple(found))


def row_names(data: Any) -> RowNames | None:
    """Return the names of a table's rows; None where they have none."""
    if (pandas := sys.modules.get("pandas")) is None:
        return None
    if not isinstance(data, (pandas.DataFrame, pandas.Series)):
        return None
    index, n = data.index, len(data)
    hashes = pandas.util.hash_pandas_object(index, index=False).to_numpy()
    powers = np.cumprod(np.full(n, _FACTOR, np.uint64))
    counts = index.dtype == np.int64 and bool((np.diff(index) == 1).all())
    first = (int(index[0]) if counts else -1) if n else 0
    return RowNames(n, first, int(hashes @ powers[::-1]))


def are_alike(*tables: Iterable[Any]) -> bool:
    """Whether rows of two tables have the same names, given those of their partitions.

    Also where both only number them, from 0 on or anew in each partition, as files are
    read. Of rows without names it is taken to be so.
    """
    found = []
    for partitions in tables:
        n, digest, is_numbered = 0, 0, True
        for names in partitions:
            if not isinstance(names, RowNames):
                return True
            is_numbered &= names.first in (0, n)
            digest = (digest * pow(_FACTOR, names.n, 2**64) + names.digest) % 2**64
            n += names.n
        found.append((is_numbered, n, digest))
    return found[0][1:] == found[1][1:] or all(is_numbered for is_numbered, *_ in found)


def array_of(data: Any, name: str, beside: Any = None) -> Any:
    """Return a table as an array, or anything else as it is.

    Parameters
    ----------
    data : object
        Rows. DataFrames, Series and Indexes of pandas, Tables, RecordBatches and
        Arrays of pyarrow, and dask DataFrames and Series are tables.
    name : str
        Its name in messages.
    beside : object
        The rows, as they were given, that these are paired with.

    Returns
    -------
    ndarray, LazyTable or object
        Of shape (n, columns), or (n,) where there is one without columns.

    Raises
    ------
    TypeError
        For a column that holds no numbers, naming it, and for a list of tables.
    ValueError
        For a column of integers or bools with missing values, one of integers that
        the floats beside it would round, and without columns.
    """
    if isinstance(data, np.ndarray):
        return data
    first = data[0] if isinstance(data, (list, tuple)) and data else None
    if is_table(first) or hasattr(type(first), "tocsr"):
        raise TypeError(
            f"{name} is a list of {type(first).__name__}; join them, for example with "
            f"pandas.concat, pyarrow.concat_tables or scipy.sparse.vstack, or give a list "
            f"of futures, one for each trainer, as client.scatter returns it"
        )
    if (lazy := _from_dask(data, name, beside)) is not None:
        return lazy
    found = _columns(data, name)
    if isinstance(found, _Column):
        return _checked(found).values()
    return data if found is None else _matrix(found, name)


def _columns(data: Any, name: str) -> list[_Column] | _Column | None:
    """Return the columns of a table in memory, or the one it is; None for all else."""
    if (pandas := sys.modules.get("pandas")) is not None:
        if isinstance(data, pandas.DataFrame):
            named = [(c, data.iloc[:, i]) for i, c in enumerate(data.columns)]
            return [_of_pandas(s, _named(c, name)) for c, s in named]
        if isinstance(data, (pandas.Series, pandas.Index)):
            return _of_pandas(data, name)
    if (arrow := sys.modules.get("pyarrow")) is not None:
        if isinstance(data, (arrow.Table, arrow.RecordBatch)):
            named = list(zip(data.schema.names, data.columns, strict=True))
            return [_of_arrow(s, _named(c, name)) for c, s in named]
        if isinstance(data, (arrow.Array, arrow.ChunkedArray)):
            return _of_arrow(data, name)
    return None


def _from_dask(data: Any, name: str, beside: Any) -> LazyTable | None:
    """Return a dask table; its columns are known before anything is computed."""
    dask = sys.modules.get("dask.dataframe")
    if dask is None or not isinstance(data, (dask.DataFrame, dask.Series, dask.Index)):
        return None
    shape: tuple[int, ...] = (0,)
    pairs = [(name, getattr(data, "dtype", None))]
    if isinstance(data, dask.DataFrame):
        pairs = [(_named(c, name), t) for c, t in data.dtypes.items()]
        shape = (0, len(pairs))
    columns = [
        _Column(what, str(dtype), _numpy_dtype(dtype), 0, lambda: np.empty(0))
        for what, dtype in pairs
    ]
    dtype = _common([_checked(column).dtype for column in columns], name)
    meta = np.empty(shape, dtype)
    # Not as an array: Dask makes a graph of its own of each array of a table, and tables
    # that were cut from one would have its partitions computed once each, to rows that do
    # not belong together where these are drawn, sampled or read from what changes.
    how: dict[str, Any] = {"meta": data, "enforce_metadata": False}
    about = dtype.str, name
    rows = data.map_partitions(_partition, *about, token="daskps-rows", **how)
    return LazyTable(rows, meta, row_names(beside))


def _partition(table: Any, dtype: str, name: str) -> tuple[Array, RowNames | int]:
    """Return a partition of a dask table as an array, and its names, on its worker."""
    found: Array = array_of(table, name)
    if not np.can_cast(found.dtype, dtype, "same_kind"):
        raise TypeError(
            f"a partition of {name} holds {found.dtype}, but its dask DataFrame says "
            f"{np.dtype(dtype)}; convert it with .astype(...), or give the function that "
            f"made it the right meta="
        )
    return found.astype(dtype, copy=False), row_names(table) or len(table)


def _named(column: Any, name: str) -> str:
    return f"column {column!r:.60} of {name}"


def _of_pandas(series: Any, what: str) -> _Column:
    dtype = _numpy_dtype(series.dtype)
    # An extension's missing values are no NaN of themselves.
    missing = 0 if isinstance(series.dtype, np.dtype) else int(series.isna().sum())

    def values() -> Array:
        found: Array = (
            series.to_numpy(dtype=dtype, na_value=np.nan)
            if missing
            else series.to_numpy(dtype=dtype)
        )
        return found

    return _Column(what, str(series.dtype), dtype, missing, values)


def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """Return what NumPy has for a dtype of pandas; object where it has nothing."""
    if isinstance(dtype, np.dtype):
        return dtype
    # Nullable and Arrow's dtypes have the first, sparse ones the second.
    for name in ("numpy_dtype", "subtype"):
        if isinstance(found := getattr(dtype, name, None), np.dtype):
            return found
    return np.dtype(object)


def _of_arrow(array: Any, what: str) -> _Column:
    try:
        dtype = np.dtype(array.type.to_pandas_dtype())
    except (NotImplementedError, TypeError):  # of types that pandas does not know
        dtype = np.dtype(object)

    def values() -> Array:
        found: Array = array.to_numpy(zero_copy_only=False)
        return found

    return _Column(what, str(array.type), dtype, array.null_count, values)


def _checked(column: _Column) -> _Column:
    if column.dtype.kind not in _NUMBERS:
        raise TypeError(
            f"{column.what} is {column.kind}, and training takes numbers; encode it "
            f"before, for example with pandas.get_dummies, pandas.factorize or "
            f"daskps.hash_ids, or leave it out"
        )
    if column.missing and column.dtype.kind not in "fc":
        raise ValueError(
            f"{column.what} is {column.kind} and has {column.missing} missing values; "
            f"fill them, for example with .fillna(0), or convert it to a float dtype, "
            f"where they become NaN"
        )
    return column


def _common(dtypes: Sequence[np.dtype[Any]], name: str) -> np.dtype[Any]:
    """Return the dtype that holds the values of all columns."""
    if not dtypes:
        raise ValueError(f"{name} is a table without columns; give it some")
    return np.result_type(*dtypes)


def _matrix(columns: Sequence[_Column], name: str) -> Array:
    # Before the first is copied.
    dtype = _common([_checked(column).dtype for column in columns], name)
    first = _held(columns[0].values(), dtype, columns[0])
    # Rows together, as batches take them; frames keep columns together.
    found = np.empty((len(first), len(columns)), dtype)
    found[:, 0] = first
    for i, column in enumerate(columns[1:], 1):
        found[:, i] = _held(column.values(), dtype, column)
    return found


def _held(values: Array, dtype: np.dtype[Any], column: _Column) -> Array:
    """Return integers of a column as they are, or refuse those that floats would round.

    A rounded id is another one, and nothing would say so.
    """
    if dtype.kind in "fc" and values.dtype.kind in "iu" and values.size:
        most = 2 ** (np.finfo(dtype).nmant + 1)
        for found in (int(values.min()), int(values.max())):
            if abs(found) > most:
                raise ValueError(
                    f"{column.what} holds {found}, which {dtype}, the dtype of all "
                    f"columns together, would round; give ids apart from floats, for "
                    f"example as X, with the floats as columns of y, or convert the "
                    f"column with .astype('float64') where rounded numbers will do"
                )
    return values
