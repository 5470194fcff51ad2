"""Tables: a vector, rows of a matrix, and numbers by key."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import daskps
from daskps.compat.multiverso.services import this_worker
from daskps.store.arguments import flag, whole

if TYPE_CHECKING:
    from daskps.store.store import ParameterStore
    from daskps.typing import Array

_DTYPES = ("float32", "float64", "int32", "int64")


class TableHandler:
    """The base of all tables: workers `add` to it, and `get` the sum of all adds.

    A subclass makes one; all workers make their tables in the same order. A table is
    freed when the launch ends.

    Parameters
    ----------
    store : ParameterStore
        Where it lives.
    rule : Rule or None
        The rule for differences; None for plus.
    what : str
        The kind of table, for messages.

    Examples
    --------
    >>> from daskps.compat import multiverso
    >>> issubclass(multiverso.ArrayTableHandler, multiverso.TableHandler)
    True
    """

    def __init__(self, store: ParameterStore, rule: Any, what: str) -> None:
        self._store, self._by_rule, self._what = store, rule is not None, what

    def __repr__(self) -> str:
        return f"<daskps.compat.multiverso.{type(self).__name__}: {self._what}>"

    def _added(self, to: Any, given: tuple[Any, ...], sync: Any) -> None:
        """Have a view's verb called, at once or a little later."""
        act = to.push if self._by_rule else to.add
        this_worker().adds.do(
            partial(act, *given, timeout=None), wait=flag(sync, "sync")
        )


class ArrayTableHandler(TableHandler):
    """A table of one dimension.

    Parameters
    ----------
    size : int
        How many numbers.
    init_value : array_like, optional
        The first values: those of the master count. Zeros by default.
    dtype : {"float32", "float64", "int32", "int64"}
        Of the numbers. Integers take the default updater only.

    Raises
    ------
    ValueError, TypeError
        For arguments that cannot be, and where workers do not make the same table.
    RuntimeError
        Before :func:`init` and after :func:`shutdown`.

    Examples
    --------
    >>> from daskps.compat import multiverso
    >>> def main():
    ...     multiverso.init()
    ...     mine = [multiverso.worker_id() + 5.0] * 2
    ...     table = multiverso.ArrayTableHandler(2, init_value=mine)
    ...     table.add([1.0, 2.0], sync=True)
    ...     multiverso.barrier()
    ...     return table.get().tolist()
    >>> multiverso.launch(main, 2)
    [[7.0, 9.0], [7.0, 9.0]]
    """

    def __init__(
        self, size: int, init_value: Any = None, dtype: Any = "float32"
    ) -> None:
        self._size, self._dtype = whole(size, "size", 1), _dtype(dtype)
        mine, shape = this_worker(), (self._size,)
        first: Any = daskps.ArraySpec(shape, self._dtype.name, 0)
        if init_value is not None:
            first = _numbers(init_value, "init_value", shape, self._dtype)
        _check_integers(self._dtype, mine.rule)
        what = f"an array of {self._size}, {self._dtype}"
        super().__init__(_made({"array": first}, what), mine.rule, what)

    def add(self, data: Any, sync: bool = False) -> None:
        """Add to all of it.

        Parameters
        ----------
        data : array_like
            As many numbers as the table has; copied.
        sync : bool
            Whether to wait until it is added. This worker's next call that waits raises
            errors that come later.

        Raises
        ------
        ValueError, TypeError
            For another size, and what are no such numbers.
        PushRejectedError
            For what is not finite.
        """
        given = _numbers(data, "data", (self._size,), self._dtype)
        self._added(self._store["array"], (given,), sync)

    def get(self) -> Array:
        """Return all of it.

        Returns
        -------
        ndarray, shape (size,)
            With all that this worker has added.
        """
        found: Array = this_worker().get(
            partial(self._store["array"].pull, timeout=None)
        )
        return found


class MatrixTableHandler(TableHandler):
    """A table of rows.

    Parameters
    ----------
    num_row, num_col : int
        How many.
    init_value : array_like, optional
        The first values: those of the master count. Zeros by default.

    Raises
    ------
    ValueError, TypeError
        For arguments that cannot be, and where workers do not make the same table.
    RuntimeError
        Before :func:`init` and after :func:`shutdown`.

    Examples
    --------
    >>> from daskps.compat import multiverso
    >>> def main():
    ...     multiverso.init()
    ...     table = multiverso.MatrixTableHandler(4, 2)
    ...     table.add([[1, 2], [3, 4]], row_ids=[3, 0])
    ...     multiverso.barrier()
    ...     return table.get([0, 1, 3]).tolist()
    >>> multiverso.launch(main, 2)[0]
    [[6.0, 8.0], [0.0, 0.0], [2.0, 4.0]]
    """

    def __init__(self, num_row: int, num_col: int, init_value: Any = None) -> None:
        self._rows, self._cols = (
            whole(num_row, "num_row", 1),
            whole(num_col, "num_col", 1),
        )
        mine = this_worker()
        first: Any = 0.0
        if init_value is not None:
            shape = (self._rows, self._cols)
            first = _numbers(init_value, "init_value", shape, np.dtype("f4"))
        params = {"matrix": daskps.TableSpec(self._rows, self._cols, init=first)}
        what = f"a matrix of {self._rows} x {self._cols}"
        super().__init__(_made(params, what), mine.rule, what)

    def add(self, data: Any, row_ids: Any = None, sync: bool = False) -> None:
        """Add to all rows, or to some.

        Parameters
        ----------
        data : array_like
            A row for each id; copied.
        row_ids : sequence of int, optional
            The rows; an id that is named twice gets the sum of both. All by default.
        sync : bool
            Whether to wait until it is added. This worker's next call that waits raises
            errors that come later.

        Raises
        ------
        ValueError, TypeError
            For another size, and ids that there are not.
        PushRejectedError
            For what is not finite.
        """
        ids = self._ids(row_ids)
        given = _numbers(data, "data", (len(ids), self._cols), np.dtype("f4"))
        self._added(self._store["matrix"], (ids, given), sync)

    def get(self, row_ids: Any = None) -> Array:
        """Return all rows, or some.

        Parameters
        ----------
        row_ids : sequence of int, optional
            The rows, in any order; all by default.

        Returns
        -------
        ndarray, shape (number of ids, num_col)
            In the order of the ids.

        Raises
        ------
        ValueError, TypeError
            For ids that there are not.
        """
        read = partial(self._store["matrix"].pull, self._ids(row_ids), timeout=None)
        found: Array = this_worker().get(read)
        return found

    def _ids(self, given: Any) -> Array:
        """Return numbers of rows, or refuse what are none before anything is sent."""
        if given is None:
            return np.arange(self._rows)
        ids = _keys(given, "row_ids")
        if ids.size and not 0 <= ids.min() <= ids.max() < self._rows:
            raise ValueError(
                f"row_ids are from 0 to {self._rows - 1}, found {ids.min()} to {ids.max()}"
            )
        return ids


class KVTableHandler(TableHandler):
    """A table of numbers by key.

    Parameters
    ----------
    dtype : {"float32", "float64", "int32", "int64"}
        Of the numbers. Integers take the default updater only.

    Raises
    ------
    ValueError, TypeError
        For arguments that cannot be, and where workers do not make the same table.
    RuntimeError
        Before :func:`init` and after :func:`shutdown`.

    Examples
    --------
    >>> from daskps.compat import multiverso
    >>> def main():
    ...     multiverso.init()
    ...     table = multiverso.KVTableHandler()
    ...     table.add([7, -1], [3.0, 4.0])
    ...     multiverso.barrier()
    ...     return table.get([-1, 0, 7]).tolist()
    >>> multiverso.launch(main, 2)[0]
    [8.0, 0.0, 6.0]
    """

    def __init__(self, dtype: Any = "float32") -> None:
        self._dtype, mine = _dtype(dtype), this_worker()
        _check_integers(self._dtype, mine.rule)
        params = {"kv": daskps.TableSpec(None, 1, self._dtype.name)}
        what = f"keys of {self._dtype}"
        super().__init__(_made(params, what), mine.rule, what)

    def add(self, keys: Any, values: Any, sync: bool = False) -> None:
        """Add to the numbers of some keys.

        Parameters
        ----------
        keys : int or sequence of int
            Any of 64 bits.
        values : array_like
            One for each key; copied.
        sync : bool
            Whether to wait until it is added. This worker's next call that waits raises
            errors that come later.

        Raises
        ------
        ValueError, TypeError
            For another size, and what are no keys.
        PushRejectedError
            For what is not finite.
        """
        ids = _keys(keys, "keys")
        given = _numbers(values, "values", (ids.size, 1), self._dtype)
        self._added(self._store["kv"], (ids.reshape(-1), given), sync)

    def get(self, keys: Any) -> Array:
        """Return the numbers of some keys.

        Parameters
        ----------
        keys : int or sequence of int
            The keys.

        Returns
        -------
        ndarray
            One for each, 0 where nobody has added.

        Raises
        ------
        ValueError, TypeError
            For what are no keys.
        """
        read = partial(self._store["kv"].pull, _keys(keys, "keys"), timeout=None)
        found: Array = this_worker().get(read)
        return found[..., 0]


def _made(params: dict[str, Any], what: str) -> ParameterStore:
    """Return a table's store, which the master has made."""
    mine = this_worker()
    mine.adds.settle()

    def make(name: str) -> ParameterStore:
        store: ParameterStore = daskps.create(
            params, name=name, optimizer=mine.rule, servers=mine.servers
        )
        return store

    return mine.here.make_store(make, what)


def _dtype(given: Any) -> np.dtype[Any]:
    try:
        found: np.dtype[Any] = np.dtype(given)
    except TypeError:
        found = np.dtype("O")
    if found.name not in _DTYPES:
        raise ValueError(f"dtype is one of {', '.join(_DTYPES)}, found {given!r:.60}")
    return found


def _numbers(
    given: Any, what: str, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Array:
    """Return a copy of as many numbers as fit, as their bindings take them."""
    found = np.asarray(given)
    if not found.size:
        found = found.astype(dtype)
    if found.dtype.kind not in "iuf" or (dtype.kind == "i" and found.dtype.kind == "f"):
        raise TypeError(
            f"{what} is an array of numbers for {dtype}, found {found.dtype}"
        )
    if found.size != math.prod(shape):
        raise ValueError(
            f"{what} has {found.size} numbers, not {' x '.join(map(str, shape))}"
        )
    with np.errstate(over="ignore"):  # the push refuses what has become infinite
        numbers = np.array(found, dtype, order="C").reshape(shape)
    if dtype.kind == "i" and (numbers.ravel() != found.ravel()).any():
        raise ValueError(f"{what} has numbers that are too large for {dtype}")
    return numbers


def _keys(given: Any, what: str) -> Array:
    ids = np.asarray(given)
    if not ids.size:
        ids = ids.astype("i8")
    if ids.dtype.kind not in "iu":
        raise TypeError(f"{what} are ints, found {ids.dtype}")
    return ids


def _check_integers(dtype: np.dtype[Any], rule: Any) -> None:
    """Refuse what no rule computes."""
    if rule is not None and dtype.kind == "i":
        raise ValueError(
            f'a table of {dtype} takes updater="default" only, and this launch has another'
        )
