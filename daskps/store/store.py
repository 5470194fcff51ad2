"""The handle of a store that a user holds, with all its verbs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from daskps.checkpoint.listing import SAVED_NBYTES_A_SECOND, CheckpointTarget, sweep
from daskps.checkpoint.storage import Storage, full_url, options_of
from daskps.cluster.caller import resharding, saving
from daskps.cluster.caller.routes import load_rules
from daskps.cluster.caller.scheduler_lost import scheduler_named
from daskps.errors import CheckpointError, IllegalStateError, LayoutError
from daskps.optim.master import WithMaster
from daskps.store.arguments import number, whole
from daskps.store.array import ParameterArray
from daskps.store.blueprints import layout_wanted
from daskps.store.checkpoints import CheckpointInfo, info_of
from daskps.store.closing import Closable
from daskps.store.handle import DEFAULT
from daskps.store.owner_verbs import Owned
from daskps.store.pulls import Readable
from daskps.store.pushes import Writable
from daskps.store.replica import Replica
from daskps.store.snapshot import Snapshot
from daskps.store.table import ParameterTable
from daskps.store.usage_errors import no_store_attribute
from daskps.store.view import Viewable
from daskps.tracebacks import entrances, hide

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.link import CallFuture
    from daskps.cluster.protocol.deadline import Deadline
    from daskps.store.typed import Parameter
    from daskps.typing import Array

#: Names of the attributes that a handle sets on itself.
_ATTRIBUTES = {"uid", "name"}


@entrances
class ParameterStore(Owned, Writable, Readable, Viewable, Closable):
    """A store of named arrays, sharded over the workers of a Dask cluster.

    Made by :func:`create` and :func:`open`. The handle is light: it can be an
    argument of tasks or be captured in their closures, and binds to the worker it
    finds itself on. With an asynchronous client methods return awaitables.

    Parameters
    ----------
    uid, name : str
        Id and name of the store.

    Notes
    -----
    Threads: a handle may be used from several threads at once. Memory: a push keeps
    no reference to the arrays after it returns; arrays of a pull are the caller's.
    A store without a name is freed with its last handle, see :func:`create`.

    Examples
    --------
    >>> store = daskps.create(
    ...     {"w": np.zeros(3), "b": 0.0}, name="shop", optimizer=daskps.optim.SGD(0.1)
    ... )
    >>> store.names, store.nbytes, len(store.placement)
    (['w', 'b'], 32, 2)
    >>> store.optimizer
    {'w': 'SGD(lr=0.1)', 'b': 'SGD(lr=0.1)'}
    >>> _ = store.push({"w": np.ones(3)})
    >>> store["w"].pull(), store.version, store.versions
    (array([-0.1, -0.1, -0.1]), 1, (1, 1))
    >>> store.delete()
    """

    def drain(self, worker: str, *, timeout: Any = DEFAULT) -> list[int]:
        """Move all shards of this store off a worker, while everything goes on.

        Calls that meet a shard on its way wait for it, and each push counts once. A
        shard that is sent has no second copy meanwhile; it gets one after that, and so do
        shards whose second copy was on that worker. A store that is made, restored or
        resharded later may have shards there again.

        Parameters
        ----------
        worker : str
            The worker's address, as in :attr:`placement`.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever. After it the drain
            goes on without this call.

        Returns
        -------
        list of int
            The shards that have moved, none where the worker had none.

        Raises
        ------
        ValueError, TypeError
            For what is no worker of the cluster.
        NotEnoughWorkersError
            For the only worker.
        LayoutError
            If no other worker has room for a shard, or the shards are on a device.
        ConsistencyError
            If a shard stays where it is, after three tries to move it.
        ProtocolError
            Where the worker that is to have a shard has another daskps.
        ShardBusyError
            While another call drains the same worker.
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says.

        Examples
        --------
        >>> store = daskps.create({"w": np.zeros(4)}, shards=2)
        >>> worker = store.placement[0]
        >>> store.drain(worker)
        [0]
        >>> worker in store.placement
        False
        """
        if not isinstance(worker, str):
            raise TypeError(f"worker is an address, found {type(worker).__name__}")

        async def work(shards: ShardClient, deadline: Deadline) -> list[int]:
            meta = shards.meta
            ask = partial(shards.link.directory, "drain", uid=meta.uid, worker=worker)
            found = await shards.link.within(ask, deadline.remaining(), deadline.what)
            meta.update(found["where"])
            return list(found["shards"])

        return self._with_shards(work, timeout, f"the drain of worker {worker}")

    def reshard(
        self, shards: Any = None, servers: Any = None, *, timeout: Any = DEFAULT
    ) -> None:
        """Cut this store into another number of shards, or lay it out on other workers.

        All of its state comes along, to the last bit: optimizer state, rows and counts
        of tables, and which pushes were applied. Handles go on with the new shards by
        themselves. Pushes wait meanwhile, reads do not; each push counts once.

        Parameters
        ----------
        shards : int, optional
            From 1 to 16,384; by default as many as the store was asked to have, or one
            for each server there is now.
        servers : str or list of str, optional
            As of :func:`create`; by default those that the store was asked to have.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever. The configured
            default grows by a second for each 10 MB.

        Returns
        -------
        None
            With an asynchronous client an awaitable.

        Raises
        ------
        ConsistencyError
            While a run trains the store, or it is being saved or resharded, and where a
            worker fails meanwhile.
        LayoutError
            For a number of shards that cannot be, where workers have no room for the
            new shards beside the old ones, and for a store on a device.
        NotEnoughWorkersError
            For servers that are not there.
        ValueError, TypeError
            For arguments that cannot be.
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says. After an error the store has the shards that it had,
            or all of the new ones where the answer came too late.

        Notes
        -----
        A push that was given up before (by a timeout or a cancel) and is in some shards
        only stays so; sent again, it counts as applied.

        Examples
        --------
        >>> store = daskps.create({"w": np.arange(4.0)}, shards=2)
        >>> store.reshard(4)
        >>> len(store.placement), store["w"].pull()
        (4, array([0., 1., 2., 3.]))
        """
        number, wanted = layout_wanted(shards, servers)

        async def work(known: ShardClient, deadline: Deadline) -> None:
            grows = timeout is DEFAULT
            await resharding.reshard(known, number, wanted, deadline, grows=grows)
            await self._renewed(IllegalStateError(), known, deadline)

        return self._with_shards(work, timeout, "a reshard", beside=True)

    def replica(
        self,
        *,
        every: int = 1,
        elastic: float | None = None,
        timeout: Any = DEFAULT,
    ) -> Replica:
        """Return a copy of the arrays that is trained by itself, and synced at times.

        Parameters
        ----------
        every : int
            Steps between two syncs.
        elastic : float, optional
            Have a sync move replica and store towards each other, by this share of
            their difference, from 0 to 1 (elastic averaging), instead of adding to the
            store what was done here.
        timeout : float, str or None
            Of the pull: seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        Replica
            With an asynchronous client an awaitable of it. It has no tables.

        Raises
        ------
        LayoutError
            If the store has tables alone, or a parameter with a master: a replica
            would have its rounded weights alone.
        ValueError, TypeError
            For an `every` or `elastic` that cannot be.
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says.

        Examples
        --------
        >>> store = daskps.create({"w": np.full(2, 1.0)})
        >>> replica = store.replica(elastic=0.5)
        >>> _ = store.assign({"w": np.zeros(2)})
        >>> replica.sync()
        >>> replica.params["w"], store.pull()["w"]
        (array([0.5, 0.5]), array([0.5, 0.5]))
        """
        steps = whole(every, "every", least=1)
        share = None if elastic is None else number(elastic, "elastic")
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"elastic is above 0 and at most 1, found {elastic!r}")

        def made(params: dict[str, Array]) -> Replica:
            if not params:
                raise LayoutError(
                    f"store {self.name!r} has no arrays, and a replica has no tables; "
                    f"pull and add rows by the store's handle"
                )
            meta = self._attached().meta
            for index, rule in load_rules(meta).items():
                if isinstance(rule, WithMaster):
                    raise LayoutError(
                        f"parameter {meta.layout.names[index]!r} has a master, and a "
                        f"replica would have its rounded weights alone; push gradients, "
                        f"or make the store of the master's dtype"
                    )
            return Replica(self, params, steps, share)

        async def made_of(pulled: Awaitable[dict[str, Array]]) -> Replica:
            return made(await pulled)

        found: Any = self.pull(timeout=timeout)
        return made(found) if isinstance(found, dict) else made_of(found)  # type: ignore[return-value]

    def snapshot(self, *, timeout: Any = DEFAULT) -> Snapshot:
        """Copy all parameters at one moment, while others go on pushing.

        For every producer all shards contain the same of its steps; in a BSP run it
        is the last round that all shards have completed. The copies are made by the
        owners and stay there, in Dask's memory; pushes wait while that is done.

        Parameters
        ----------
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        Snapshot
            Mapping of name to dask array.

        Raises
        ------
        LayoutError
            Where a worker has no room for a copy of what it owns; nothing was copied.
            :meth:`save` needs none.
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says.

        Notes
        -----
        A push that was given up (by a timeout or a cancel) may be contained in part,
        as it may in the store. A task that takes a snapshot leaves its worker's
        thread to other tasks meanwhile.

        Examples
        --------
        >>> store = daskps.create({"w": np.arange(4.0)})
        >>> snap = store.snapshot()
        >>> snap["w"].chunks
        ((2, 2),)
        >>> (snap["w"] * 2).compute()
        array([0., 2., 4., 6.])
        """
        return self._taken(None, Snapshot, timeout, "a snapshot")

    @overload
    def save(
        self,
        url: Any,
        *,
        wait: Literal[True] = ...,
        storage_options: Mapping[str, Any] | None = ...,
        timeout: Any = ...,
    ) -> CheckpointInfo: ...

    @overload
    def save(
        self,
        url: Any,
        *,
        wait: Literal[False],
        storage_options: Mapping[str, Any] | None = ...,
        timeout: Any = ...,
    ) -> CallFuture[CheckpointInfo]: ...

    def save(
        self,
        url: Any,
        *,
        wait: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        timeout: Any = DEFAULT,
    ) -> Any:
        """Write all that the store holds to files, for :func:`restore`.

        It is copied at one moment, as of a snapshot; the owners of the shards then
        write their parts, while others go on pushing. The manifest is the last file:
        until it is written in order there is no checkpoint.

        Parameters
        ----------
        url : str or path-like
            A folder that all workers and this process reach, of anything fsspec writes;
            the checkpoint is a new folder below it. Its arrays can be read by Zarr.
        wait : bool, default True
            With False return once the copy is made, with a future of the rest.
        storage_options : mapping, optional
            For the filesystem of the URL, such as keys; they are sent to the workers.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever. The configured
            default grows by a second for each 10 MB.

        Returns
        -------
        CheckpointInfo or Future
            Facts about the checkpoint, or a `concurrent.futures.Future` of them.

        Raises
        ------
        CheckpointError
            If the URL cannot be written, or is another place on other machines.
        ConsistencyError
            While another save of this store is being written.
        ShardLostError, StoreClosedError, TimeoutError
            If the store is gone, or held for too long. There is no checkpoint then.
        SchedulerLostError
            If the scheduler is gone, within five seconds; of the future too.
        TypeError, ValueError
            For what is no URL, and options that cannot be sent.

        Examples
        --------
        >>> import tempfile
        >>> store = daskps.create({"w": np.zeros(2)})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     info = store.save(folder)
        ...     daskps.restore(folder)["w"].pull()
        array([0., 0.])
        """
        target = CheckpointTarget(full_url(url), options_of(storage_options))
        by_default = timeout is DEFAULT

        async def work(shards: ShardClient, deadline: Deadline) -> Any:
            named = partial(scheduler_named, shards.link, "a save")
            async with named(ends=True):
                cut = await saving.take(shards, deadline)
            more = cut.nbytes(shards.meta.layout) / SAVED_NBYTES_A_SECOND
            write = partial(
                saving.write,
                shards,
                cut,
                target,
                # Also one that is over: the cut ends in there.
                deadline=deadline.later(more if by_default else 0.0),
                training=saving.TrainingState(),
            )

            # This handle too: with its last one a session store is freed.
            async def rest(_: ParameterStore = self) -> CheckpointInfo:
                # Files are written without a scheduler too, once all are copied.
                async with named(ends=False):
                    folder, manifest = await write()
                await asyncio.to_thread(_sweep, target)
                return info_of(target.folder(folder), manifest)

            return await rest() if wait else shards.link.start(rest)

        return self._with_shards(work, timeout, "a save", beside=wait)

    def __getitem__(self, name: str) -> Parameter:
        try:
            layout, found = self.layout, None
            with contextlib.suppress(TypeError):  # of what is no name, as below
                found = layout.table_by_name.get(name)
            if found is not None:
                return ParameterTable(self, found)  # type: ignore[return-value]
            return ParameterArray(self, layout[name])  # type: ignore[return-value]
        except BaseException as error:
            hide(error)
            raise

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            meta = None if name.startswith("_") else self._meta_if_known()
            names = None if meta is None else meta.layout.names
            raise no_store_attribute(self, name, names)

        def __setattr__(self, name: str, value: Any) -> None:
            # Or `store.w = values` would look as if it had done something.
            if (
                name[0] != "_"
                and name not in _ATTRIBUTES
                and not hasattr(type(self), name)
            ):
                raise AttributeError(
                    f"a store has no attributes to set; to replace parameter {name!r} "
                    f"use store.assign({{{name!r}: value}})"
                )
            super().__setattr__(name, value)

        def __setitem__(self, name: Any, value: Any) -> None:
            raise TypeError(
                f"store[{name!r:.60}] = value writes nothing to the workers; use "
                f"store.assign({{{name!r:.60}: value}}), or store.add(...) for a plain +="
            )

        def __delitem__(self, name: Any) -> None:
            raise TypeError(
                f"parameter {name!r:.60} cannot be taken out of its store; create "
                f"another store without it, or free all of this one with store.delete()"
            )


def _sweep(target: CheckpointTarget) -> None:
    """Remove what others have begun to save and not finished for a day."""
    # The new checkpoint is written already: an error here does not undo it.
    with contextlib.suppress(CheckpointError):
        sweep(Storage(target.url, target.options), time.time())
