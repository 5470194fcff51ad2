"""One table of a store, whose rows are read and changed by their ids."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.store.handle import DEFAULT
from daskps.store.mistaken import not_a_row, refuses_arithmetic
from daskps.store.repr import table_html
from daskps.store.row_set import RowSet
from daskps.store.snapshot import dask_table, taken_by
from daskps.store.specs import RowGrad
from daskps.store.targets import pulled, reading
from daskps.tracebacks import entrances, hide

if TYPE_CHECKING:
    from daskps.cluster.caller.routes import Request
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.caller.targets import Target
    from daskps.cluster.wire.deadline import Deadline
    from daskps.typing import Array


@refuses_arithmetic
@entrances
class ParameterTable(RowSet):
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
        self, ids: Any, *, out: Array | None = None, timeout: Any = DEFAULT
    ) -> Any:
        """Read rows.

        Parameters
        ----------
        ids : array_like of int
            Ids of rows, in any order; the same may be asked for more than once.
        out : ndarray, shape ids.shape + (dim,), optional
            Array of the table's dtype to fill.
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
            known = self._store._at_hand() if timeout is DEFAULT else None
            if known is not None:
                of = self._table
                found = known.rows.pull_table(of, ids, out, until=self._end_of_pull)
                if found is not None:
                    return found
            name = self.name
            given = {} if out is None else {name: out}

            def make(meta: StoreMap) -> Request:
                first, *rest = pulled(meta, (), {name: ids}, given)
                first = first._replace(finish=partial(_of, first, name))
                return reading(meta, [first, *rest])

            return self._store._do(make, timeout, f"a pull of {name!r}")
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
    ) -> Any:
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

    def add(self, ids: Any, deltas: Any, *, timeout: Any = DEFAULT) -> Any:
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

    def assign(self, ids: Any, values: Any, *, timeout: Any = DEFAULT) -> Any:
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
            done where they are. Of a table with rows of any ids a pair: the ids, by
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
        table = self._table
        return taken_by(
            self._store,
            table.index,
            lambda taken: dask_table(taken, table, alone=True),
            what=f"a copy of {self.name!r}",
            timeout=timeout,
        )


def _of(target: Target, name: str) -> Array:
    found: Array = target.finish()[name]
    return found
