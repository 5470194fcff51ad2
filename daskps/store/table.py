"""One table of a store, whose rows are read and changed by their ids."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.caller.questions import find_ids
from daskps.layout.ids import as_ids
from daskps.store import changes
from daskps.store.handle import DEFAULT, ELSEWHERE, at_once
from daskps.store.repr import counted_tables, table_html
from daskps.store.snapshot import dask_table
from daskps.store.specs import RowGrad
from daskps.store.targets import device_for, pulled, reading, sought
from daskps.store.usage_errors import not_a_row, refuses_arithmetic
from daskps.tracebacks import entrances, hide

if TYPE_CHECKING:
    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.routes import Request
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.protocol.deadline import Deadline
    from daskps.layout.tables import Table
    from daskps.store.pushes import Writable
    from daskps.typing import Array
    from daskps.version import Version


@refuses_arithmetic
@entrances
class ParameterTable:
    """A table of rows: verbs that move only the rows that they name.

    Got from a store by name, ``store["emb"]``. Ids are integers, in an array, a list, a
    pandas Index or Series or a pyarrow array of any shape; they may repeat and come in
    any order. With an asynchronous client methods return awaitables.

    Parameters
    ----------
    store : ParameterStore
        The store it belongs to.
    table : Table
        Its row in the store's layout.

    Examples
    --------
    >>> params = {"emb": daskps.TableSpec(1000, 2, "float64")}
    >>> store = daskps.create(params, optimizer=daskps.optim.SGD(0.5))
    >>> emb = store["emb"]
    >>> emb.rows, emb.dim, emb.dtype, len(emb)
    (1000, 2, dtype('float64'), 1000)
    >>> _ = emb.push([3, 7, 3], np.ones((3, 2)))
    >>> emb.pull([[3], [7]])
    array([[[-1. , -1. ]],
    <BLANKLINE>
           [[-0.5, -0.5]]])
    """

    def __init__(self, store: Writable, table: Table) -> None:
        self._store = store
        self._table = table

    @property
    def name(self) -> str:
        """Name of the table."""
        return self._table.name

    @property
    def rows(self) -> int | None:
        """Number of rows it was made with; their ids are 0 to ``rows - 1``.

        None where any int64 is an id.
        """
        return self._table.rows if self._table.is_bounded else None

    @property
    def dim(self) -> int:
        """Length of a row."""
        return self._table.dim

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the elements."""
        return np.dtype(self._table.dtype)

    @property
    def n_rows(self) -> int:
        """Number of rows that it has now.

        With unbounded rows the shards are asked, and with an asynchronous client it is
        an awaitable.
        """
        return self._counted("rows", self._table.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows that it has now, as for :attr:`n_rows`."""
        return self._counted("nbytes", self._table.nbytes)

    def _counted(self, what: str, known: int) -> int:
        """Return what a table with a number of rows knows, and of others all shards."""
        if self._table.is_bounded:
            return known

        def finish(answers: Any) -> int:
            shards = [row for rows in answers for row in rows]
            return int(counted_tables(self._store.layout, shards)[self.name][what])

        return self._store._ask("stats", finish)

    def __len__(self) -> int:
        if not self._table.is_bounded and self._store._bind().asynchronous:
            raise TypeError(
                f"table {self.name[:60]!r} has unbounded rows and its shards must be "
                f"asked how many; await store[{self.name[:60]!r}].n_rows"
            )
        return self.n_rows

    def __repr__(self) -> str:
        return (
            f"<daskps.ParameterTable {self.name!r}: {self._table.told}, of store "
            f"{self._store.name!r}>"
        )

    def _repr_html_(self) -> str:
        return table_html(self._table, self._store.name, self._store._meta_if_known())

    if not TYPE_CHECKING:

        def __getitem__(self, index: Any) -> Any:
            raise not_a_row(self.name, read=True)

        def __setitem__(self, index: Any, value: Any) -> None:
            raise not_a_row(self.name, read=False)

        # Else NumPy would make an array of a thing that has a length.
        def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
            raise not_a_row(self.name, read=True)

    def pull(
        self,
        ids: Any,
        *,
        out: Array | None = None,
        device: str | None = None,
        timeout: Any = DEFAULT,
    ) -> Array:
        """Read rows.

        Parameters
        ----------
        ids : array_like of int
            Ids of rows, in any order; the same may be asked for more than once.
        out : ndarray, shape ids.shape + (dim,), optional
            Array of the table's dtype to fill.
        device : str, optional
            Where new ones go, as in :meth:`daskps.ParameterStore.pull`.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        ndarray, shape ids.shape + (dim,)
            The rows, in the order of the ids; `out` itself, if given. More than 65,536
            are read part by part, each of one version of a shard.

        Raises
        ------
        ValueError, TypeError
            For what are no ids of this table, and an `out` that does not fit.
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says.

        Examples
        --------
        >>> store = daskps.create({"emb": daskps.TableSpec(4, 2, init=1.0)})
        >>> store["emb"].pull([2, 2]).tolist()
        [[1.0, 1.0], [1.0, 1.0]]
        """
        try:
            is_plain = timeout is DEFAULT and device is None
            known = self._store._at_hand() if is_plain else None
            if known is not None:
                of = self._table
                found = known.rows.pull_table(of, ids, out, until=self._end_of_pull)
                if found is not None:
                    return found
            name, where = self.name, device_for(device, out)
            given = {} if out is None else {name: out}

            def make(meta: StoreMap) -> Request:
                first, *rest = pulled(meta, (), {name: ids}, given, device=where)
                one = first._replace(finish=lambda: first.finish()[name])
                return reading(meta, [one, *rest])

            rows: Array = self._store._do(make, timeout, f"a pull of {name!r}")
            return rows
        except BaseException as error:
            hide(error)
            raise

    def _end_of_pull(self) -> Deadline:
        return self._store._deadline(DEFAULT, f"a pull of {self._table.name!r}")

    def push(
        self,
        ids: Any,
        grads: Any,
        *,
        weight: float = 1.0,
        lr: float | None = None,
        timeout: Any = DEFAULT,
    ) -> Version:
        """Apply gradients of rows: one optimizer step of the table, on arrival.

        Parameters
        ----------
        ids : array_like of int
            Ids of rows. Gradients of the same id are summed before its one update.
        grads : ndarray, shape ids.shape + (dim,)
            A gradient for each.
        weight, lr, timeout
            As in :meth:`ParameterStore.push`.

        Returns
        -------
        Version
            The version that each shard reached.

        Raises
        ------
        PushRejectedError, NoOptimizerError, ConsistencyError
            As for :meth:`ParameterStore.push`; nothing was changed.
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says; each shard applied it once or not at all.

        Notes
        -----
        Only these rows and their optimizer state change, also by weight decay. The step
        count of a rule is the table's, as in ``torch.optim.SparseAdam``.

        Examples
        --------
        >>> params = {"emb": daskps.TableSpec(4, 2)}
        >>> store = daskps.create(params, optimizer=daskps.optim.SGD(0.5))
        >>> store["emb"].push([1], np.ones((1, 2)))
        1
        >>> store["emb"].pull([0, 1]).tolist()
        [[0.0, 0.0], [-0.5, -0.5]]
        """
        try:
            given = {self._table.name: RowGrad(ids, grads)}
            return self._store.push(given, weight=weight, lr=lr, timeout=timeout)
        except BaseException as error:
            hide(error)
            raise

    def add(self, ids: Any, deltas: Any, *, timeout: Any = DEFAULT) -> Version:
        """Add to rows: a plain ``+=`` that no optimizer sees.

        Parameters
        ----------
        ids : array_like of int
            Ids of rows. Deltas of the same id are summed.
        deltas : ndarray, shape ids.shape + (dim,)
            A delta for each.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        Version
            The version that each shard reached. More than 131,072 rows are added part
            by part.

        Raises
        ------
        PushRejectedError, ConsistencyError
            As for :meth:`ParameterStore.push`; nothing was changed.
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says; each shard applied each part once or not at all.

        Examples
        --------
        >>> store = daskps.create({"seen": daskps.TableSpec(100, 1, "int64")})
        >>> _ = store["seen"].add([5, 5, 9], np.ones((3, 1), "int64"))
        >>> store["seen"].pull([5, 9]).ravel()
        array([2, 1])
        """
        return self._store.add({self.name: RowGrad(ids, deltas)}, timeout=timeout)

    def assign(self, ids: Any, values: Any, *, timeout: Any = DEFAULT) -> Version:
        """Replace rows; optimizer state stays.

        Parameters
        ----------
        ids : array_like of int
            Ids of rows. Of those that repeat the last one holds.
        values : ndarray, shape ids.shape + (dim,)
            A row for each.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        Version
            The version that each shard reached. More than 131,072 rows are assigned
            part by part.

        Raises
        ------
        PushRejectedError, ConsistencyError
            As for :meth:`ParameterStore.push`; nothing was changed.
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says; each shard applied each part once or not at all.

        Examples
        --------
        >>> store = daskps.create({"emb": daskps.TableSpec(4, 2)})
        >>> _ = store["emb"].assign([3], np.full((1, 2), 7.0))
        >>> store["emb"].pull(3).tolist()
        [7.0, 7.0]
        """
        return self._store.assign({self.name: RowGrad(ids, values)}, timeout=timeout)

    def remove(self, ids: Any, *, timeout: Any = DEFAULT) -> Version:
        """Forget rows, with their optimizer state.

        Parameters
        ----------
        ids : array_like of int
            Ids of the rows. Those that are not there are left out.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        Version
            The version that each shard reached. More than 1,024 rows are removed part
            by part.

        Raises
        ------
        PushRejectedError, ConsistencyError
            As for :meth:`ParameterStore.push`, and for a table made with a number of
            rows, which has all of them at any time; nothing was changed.
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says; each shard removed each part once or not at all.

        Notes
        -----
        A row that was removed reads as one that nobody has pushed yet, and a later push
        begins with that.

        Examples
        --------
        >>> store = daskps.create({"seen": daskps.TableSpec(None, 1, "int64")})
        >>> seen = store["seen"]
        >>> _ = seen.add([-4, 9], [[1], [1]])
        >>> _ = seen.remove([-4, 5])
        >>> seen.pull([-4, 9]).ravel(), seen.ids()
        (array([0, 1]), array([9]))
        """
        return self._store._remove(self.name, ids, timeout)

    def contains(self, ids: Any, *, timeout: Any = DEFAULT) -> Array:
        """Return which ids the table has.

        Parameters
        ----------
        ids : array_like of int
            The ids.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        ndarray of bool, shape ids.shape
            Whether there is a row of each.

        Raises
        ------
        ValueError, TypeError
            For what are no ids at all.
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says.

        Examples
        --------
        >>> store = daskps.create({"emb": daskps.TableSpec(4, 2)})
        >>> store["emb"].contains([0, 3, 4, -1])
        array([ True,  True, False, False])
        """
        table, what = self._table, f"a look for rows of {self.name!r}"
        flat, shape = as_ids(ids, f"table {self.name[:60]!r}", ValueError)
        if table.is_bounded:
            found = ((flat >= 0) & (flat < table.rows)).reshape(shape)
            return self._at_once(found, timeout, what)
        if (known := self._store._at_hand()) is not None:
            there = known.rows.contains(table, flat)
            if there is not None:
                return there.reshape(shape)

        def make(meta: StoreMap) -> Request:
            return reading(meta, sought(meta, table, flat, shape))

        looked: Array = self._store._do(make, timeout, what)
        return looked

    def ids(self, *, timeout: Any = DEFAULT) -> Array:
        """Return the ids of all rows.

        Parameters
        ----------
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        ndarray, shape (n_rows,), int64
            In ascending order. With unbounded rows those of each shard are of one
            version of it.

        Raises
        ------
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says.

        Examples
        --------
        >>> store = daskps.create({"emb": daskps.TableSpec(4, 2)})
        >>> store["emb"].ids()
        array([0, 1, 2, 3])
        """
        table, what = self._table, f"the ids of {self.name!r}"
        if table.is_bounded:
            return self._at_once(np.arange(table.rows), timeout, what)

        return self._store._with_shards(
            lambda shards, deadline: find_ids(shards, table, deadline), timeout, what
        )

    def pull_changed(
        self, since: Any = None, *, timeout: Any = DEFAULT
    ) -> changes.Changes:
        """Read the rows that others have changed, with what has become of them.

        Parameters
        ----------
        since : object, optional
            The `since` of what the call before returned, be it in another process.
            Without it all rows are read.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        Changes
            Ids, their rows, what to ask with the next time, and whether these are the
            changes alone: ``complete=False`` has all rows, where `since` is None or so
            long ago that the shards do not know any more what has changed since.

        Raises
        ------
        TypeError, ValueError
            For a `since` that is none, or that of another table or store.
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says.

        Notes
        -----
        Left out is what this process has pushed itself outside of runs, or in a task of
        Dask this task; of a row that others have changed as well all is told. Removed
        rows are told too: they read their initial values.

        Each shard says what it held at one version, the one that `since` stands for,
        where up to 65,536 rows have changed. More are read part by part and may be
        newer; rows that changed meanwhile are told again.

        Examples
        --------
        >>> store = daskps.create({"emb": daskps.TableSpec(1000, 1, "int64")})
        >>> emb = store["emb"]
        >>> copy = emb.pull_changed()
        >>> len(copy.ids), copy.complete
        (1000, False)
        >>> def add(store):
        ...     return store["emb"].add([7, 3], np.ones((2, 1), "int64"))
        >>> _ = client.submit(add, store).result()
        >>> changes = emb.pull_changed(copy.since)
        >>> changes.ids, changes.rows.ravel(), changes.complete
        (array([3, 7]), array([1, 1]), True)
        """
        store, table = self._store, self._table
        link, what = store._bind(), f"the changes of {self.name!r}"
        known = changes.checked_since(store.uid, table, since, link.latest)
        by = store._producer_here(link).id
        work = partial(changes.find_changes, table=table, since=known, by=by)
        deadline = store._deadline(timeout, what)
        if not link.asynchronous:
            # Where shards are elsewhere, or lost, the event loop sees to that.
            with suppress(*ELSEWHERE):
                return at_once(work(store._attached(deadline), deadline, on_loop=False))
        return store._with_shards(work, deadline, what, beside=True)

    def _at_once(self, found: Array, timeout: Any, what: str) -> Array:
        """Return what is known here; with an asynchronous client an awaitable of it."""

        async def work(shards: ShardClient, deadline: Deadline) -> Array:
            return found

        return self._store._with_shards(work, timeout, what)

    def to_dask_array(self, *, timeout: Any = DEFAULT) -> Any:
        """Copy the table at one moment into a dask array on the owners.

        Parameters
        ----------
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        dask.array.Array, shape (rows, dim)
            Of one version, a chunk for the rows of each shard; work on its chunks is
            done where they are. Of a table with unbounded rows a pair: the ids, by
            shard and ascending in each, and their rows.

        Raises
        ------
        LayoutError
            Where a worker has no room for a copy of what it owns; nothing was copied.
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says.

        Examples
        --------
        >>> store = daskps.create({"emb": daskps.TableSpec(6, 2, init=1.0)}, shards=2)
        >>> store["emb"].to_dask_array().sum().compute()
        np.float32(12.0)
        """
        table, what = self._table, f"a copy of {self.name!r}"
        make = partial(dask_table, table=table, alone=True)
        return self._store._taken(table.index, make, timeout, what)
