"""Rows of a table as a set: ask for ids, remove rows, read changes of others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.caller.table_ids import find_ids
from daskps.layout.ids import as_ids
from daskps.store import changes
from daskps.store.handle import DEFAULT, LOST
from daskps.store.repr import counted_tables
from daskps.store.targets import reading, sought

if TYPE_CHECKING:
    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.routes import Request
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.wire.deadline import Deadline
    from daskps.layout.tables import Table
    from daskps.store.pushes import Writable
    from daskps.typing import Array


class RowSet:
    """The part of a table's handle that asks for its rows as a set.

    Parameters
    ----------
    store : ParameterStore
        The store it belongs to.
    table : Table
        Its row in the store's layout.
    """

    def __init__(self, store: Writable, table: Table) -> None:
        self._store = store
        self._table = table

    @property
    def name(self) -> str:
        """Name of the table."""
        return self._table.name

    @property
    def n_rows(self) -> Any:
        """Number of rows that it has now.

        With rows of any ids the shards are asked, and with an asynchronous client it is
        an awaitable.
        """
        return self._counted("rows", self._table.rows)

    @property
    def nbytes(self) -> Any:
        """Bytes of all rows that it has now, as for :attr:`n_rows`."""
        return self._counted("nbytes", self._table.nbytes)

    def _counted(self, what: str, known: int) -> Any:
        """Return what a table with a number of rows knows, and of others all shards."""
        if self._table.is_bounded:
            return known
        name = self.name

        def finish(counted: Any) -> int:
            found: int = counted_tables(self._store.layout, counted)[name][what]
            return found

        return self._store._ask(
            "stats", lambda each: finish(row for of in each for row in of)
        )

    def __len__(self) -> int:
        if not self._table.is_bounded and self._store._bind().asynchronous:
            raise TypeError(
                f"table {self.name[:60]!r} has rows of any ids and its shards must be "
                f"asked how many; await store[{self.name[:60]!r}].n_rows"
            )
        found: int = self.n_rows
        return found

    def remove(self, ids: Any, *, timeout: Any = DEFAULT) -> Any:
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

    def contains(self, ids: Any, *, timeout: Any = DEFAULT) -> Any:
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

        return self._store._do(make, timeout, what)

    def ids(self, *, timeout: Any = DEFAULT) -> Any:
        """Return the ids of all rows.

        Parameters
        ----------
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        ndarray, shape (n_rows,), int64
            In ascending order. With rows of any ids those of each shard are of one
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

        async def work(shards: ShardClient, deadline: Deadline) -> Array:
            return await find_ids(shards, table, deadline)

        return self._store._with_shards(work, timeout, what)

    def pull_changed(self, since: Any = None, *, timeout: Any = DEFAULT) -> Any:
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
        where up to 65,536 rows have changed. More are read part by part and may be newer;
        rows that changed meanwhile are told again.

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
        if link.asynchronous:

            async def work(shards: ShardClient, deadline: Deadline) -> changes.Changes:
                steps = changes.steps(shards.meta, table, known, by)
                return await changes.awaited(steps, shards, deadline)

            return store._with_shards(work, timeout, what)
        deadline, uid = store._deadline(timeout, what), store.uid
        try:
            shards = store._attached(deadline)
            steps = changes.steps(shards.meta, table, known, by)
            return changes.here(steps, shards, deadline)
        except LOST as error:
            store._hear_loss(link, uid, error, deadline)
            raise

    def _at_once(self, found: Array, timeout: Any, what: str) -> Any:
        """Return what is known here; with an asynchronous client an awaitable of it."""

        async def work(shards: ShardClient, deadline: Deadline) -> Array:
            return found

        return self._store._with_shards(work, timeout, what)
