"""Tables as training data: each becomes one array of one dtype, once, before the run.

What a gradient gets is then the same whoever made the data: rows of a NumPy array. The
libraries of tables are asked for nothing but their types, and only those that the user
has imported: data of one that nobody has imported cannot be here.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.typing import Array

#: Kinds of dtypes whose values are numbers.
_NUMBERS = "biufc"


@dataclass(frozen=True, slots=True)
class LazyTable:
    """A dask DataFrame or Series, as training takes it: its rows are yet to be counted."""

    #: For Dask a table like the user's, and computed together with others; each partition
    #: comes as an array.
    partitions: Any
    #: An array of such rows, without any.
    meta: Array


@dataclass(frozen=True, slots=True)
class _Column:
    #: As messages have it: "column 'age' of X".
    what: str
    #: As its library names it.
    kind: str
    #: What NumPy makes of it; object where it is no number.
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


def index_digest(data: Any) -> bytes | None:
    """Return a digest of the names of a table's rows; None where they have none."""
    if (pandas := sys.modules.get("pandas")) is None:
        return None
    if not isinstance(data, (pandas.DataFrame, pandas.Series)):
        return None
    hashes = pandas.util.hash_pandas_object(data.index, index=False).to_numpy()
    return hashlib.blake2b(hashes.tobytes(), digest_size=16).digest()


def array_of(data: Any, name: str) -> Any:
    """Return a table as an array, or anything else as it is.

    Parameters
    ----------
    data : object
        Rows. DataFrames, Series and Indexes of pandas, Tables, RecordBatches and
        Arrays of pyarrow, and dask DataFrames and Series are tables.
    name : str
        What messages call it.

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
    if isinstance(data, (list, tuple)) and any(map(is_table, data[:1])):
        raise TypeError(
            f"{name} is a list of {type(data[0]).__name__}; join them, for example with "
            f"pandas.concat or pyarrow.concat_tables, or give a list of futures, one for "
            f"each trainer, as client.scatter returns it"
        )
    if (lazy := _from_dask(data, name)) is not None:
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


def _from_dask(data: Any, name: str) -> LazyTable | None:
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
    return LazyTable(rows, meta)


def _partition(table: Any, dtype: str, name: str) -> Array:
    """Return a partition of a dask table as an array, on its worker."""
    found: Array = array_of(table, name)
    if not np.can_cast(found.dtype, dtype, "same_kind"):
        raise TypeError(
            f"a partition of {name} holds {found.dtype}, but its dask DataFrame says "
            f"{np.dtype(dtype)}; convert it with .astype(...), or give the function that "
            f"made it the right meta="
        )
    return found.astype(dtype, copy=False)


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
