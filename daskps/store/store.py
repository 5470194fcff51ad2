"""What a user holds: a store with all its verbs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import config
from daskps.checkpoint.listing import sweep
from daskps.checkpoint.storage import Storage, full_url, options_of
from daskps.cluster.caller import owner_steps, saving
from daskps.cluster.caller.aggregate import aggregate, aggregate_into, check_same_layout
from daskps.cluster.caller.scheduler_lost import scheduler_named
from daskps.cluster.upstream import dumps
from daskps.cluster.wire.deadline import Deadline
from daskps.errors import CheckpointError
from daskps.layout.chunks import any_tables
from daskps.reduction import check_reduce
from daskps.store import intake
from daskps.store.array import ParameterArray
from daskps.store.checkpoints import CheckpointInfo, info_of
from daskps.store.mistaken import (
    no_store_attribute,
    not_deleted,
    not_set,
    not_written,
)
from daskps.store.rates import Rated
from daskps.store.snapshot import Snapshot, taken_by
from daskps.store.table import ParameterTable
from daskps.store.targets import chosen_names
from daskps.tracebacks import entrances, hide

if TYPE_CHECKING:
    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.link import Link
    from daskps.cluster.caller.producer import Producer
    from daskps.layout.arrays import Layout
    from daskps.typing import Array

DEFAULT = config.DEFAULT
#: What a handle has itself.
_ATTRIBUTES = {"uid", "name"}


@entrances
class ParameterStore(Rated):
    """A store of named arrays, sharded over the workers of a Dask cluster.

    Made by :func:`create` and :func:`open`. The handle is light: it can be an
    argument of tasks or be captured in their closures, and binds to the worker it
    finds itself on. With an asynchronous client methods return awaitables.

    Parameters
    ----------
    uid, name : str
        Which store.

    Notes
    -----
    Threads: a handle may be used from several threads at once. Memory: a push keeps
    no reference to the arrays after it returns; what a pull returns is the caller's.
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

    def aggregate(
        self,
        contributions: Iterable[Mapping[str, Any]],
        *,
        reduce: Any = "mean",
        into: ParameterStore | None = None,
        timeout: Any = DEFAULT,
    ) -> Any:
        """Reduce contributions on the owners of the shards.

        This store is untouched, unless it is `into`. That store gets what the
        contributions come to, where it was reduced: it does not travel back.

        Parameters
        ----------
        contributions : iterable of mapping
            One mapping of name to array per contributor, in rank order.
        reduce : {"mean", "sum"} or callable
            A callable is ``f(stacked, weights) -> (n,)`` with stacked (P, n) and
            weights (P,), all 1.
        into : ParameterStore, optional
            A store of the same layout, maybe this one, whose parameters are replaced
            by the result; those that nobody has contributed to, and optimizer state,
            stay. What fails on any of its owners changes nothing on all.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        dict of str to ndarray, or Version
            The reduced arrays, in the compute dtype of their parameters; with `into`
            what its shards have reached.

        Raises
        ------
        PushRejectedError, UnknownParameterError, ValueError, TypeError
            For arrays that do not fit, an unknown `reduce`, and sums that are not
            finite in `into`.
        LayoutError
            If `into` has other parameters, or other shards.
        ConsistencyError
            During a BSP run on `into`, which has that store to itself.

        Examples
        --------
        >>> store = daskps.create({"w": np.zeros(2)})
        >>> given = [{"w": np.array([1.0, 2.0])}, {"w": np.array([3.0, 6.0])}]
        >>> store.aggregate(given)
        {'w': array([2., 4.])}
        >>> store.pull()["w"]
        array([0., 0.])
        >>> store.aggregate(given, reduce="sum", into=store)
        1
        >>> store.pull()["w"]
        array([4., 8.])
        """
        check_reduce(reduce)
        if into is not None and not isinstance(into, ParameterStore):
            raise TypeError(f"into is a ParameterStore, found {type(into).__name__}")
        given = _listed(contributions)
        if not given:
            raise ValueError("aggregate needs at least one contribution")

        def checked(layout: Layout) -> list[dict[int, Array]]:
            how: Any = {"finite": config.check_finite(), "model": True}
            return [intake.gradients(layout, {}, g, **how) for g in given]

        async def work(shards: ShardClient, deadline: Deadline) -> Any:
            arrays = checked(shards.meta.layout)
            if into is None:
                made = await aggregate(shards, arrays, reduce, deadline)
                if config.check_finite() and isinstance(reduce, str):
                    intake.check_sums(made)
                return made
            if not any(arrays):
                raise ValueError("the contributions name no parameter to leave")
            taker, source = await into._taker(shards.link, deadline)  # noqa: SLF001 (ours)
            check_same_layout(shards.meta, taker.meta)
            reply = await aggregate_into(
                taker, arrays, reduce, source=source, deadline=deadline
            )
            return reply.version

        return self._with_shards(work, timeout, "an aggregate")

    def apply(
        self,
        f: Callable[[Array, str], Any],
        names: str | Iterable[str] | None = None,
        *,
        timeout: Any = DEFAULT,
    ) -> Any:
        """Put parameters through a function, on the owners: pruning, projection, clipping.

        Parameters
        ----------
        f : callable
            ``f(block, name) -> block``. It gets what one shard has of one parameter, in C
            order, shape (n,), as a copy of its own, and returns an array of the same
            shape and of a dtype that can be cast to the parameter's. How a parameter is
            cut depends on the number of shards: let it treat each element by itself, or
            keep the parameter whole by `placement`. It may be called again where pushes
            come in between, and after a few times keeps them waiting until it returns.
        names : str or iterable of str, optional
            Which parameters; all by default. Tables are left out.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        Version
            What the shards reached: one update of each, however many parameters.

        Raises
        ------
        PushRejectedError
            For what `f` raises (also `SystemExit`) or returns that is none; nothing was
            changed on that shard, and the error names those that have applied it.
        ConsistencyError
            During a BSP run, which has the store to itself.
        UnknownParameterError, TypeError
            For names that are none, and an `f` that cannot be called or pickled.
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says; each shard applied it once or not at all.

        Examples
        --------
        >>> store = daskps.create({"w": np.array([0.01, -2.0, 0.5, 3.0])})
        >>> _ = store.apply(lambda block, name: np.where(abs(block) < 0.1, 0, block))
        >>> _ = store.apply(lambda block, name: block.clip(-1, 1), "w")
        >>> store["w"].pull()
        array([ 0. , -1. ,  0.5,  1. ])
        """
        if not callable(f):
            raise TypeError(f"f is a function f(block, name) -> block, found {f!r:.60}")
        pickled, finite = _dumped(f), config.check_finite()
        source = self._producer_here(self._bind())

        async def work(shards: ShardClient, deadline: Deadline) -> Any:
            meta = shards.meta
            chosen = [meta.layout[name].index for name in chosen_names(meta, names)]
            applied = owner_steps.Applied(pickled, chosen, finite)
            return await owner_steps.apply(shards, source, applied, deadline)

        return self._with_shards(work, timeout, "an apply")

    async def _taker(
        self, link: Link, deadline: Deadline
    ) -> tuple[ShardClient, Producer]:
        """Return the shards that are to take something, and who sends it."""
        return await self._attach_within(link, deadline), self._producer_here(link)

    def snapshot(self, *, timeout: Any = DEFAULT) -> Any:
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
        return taken_by(self, None, Snapshot, what="a snapshot", timeout=timeout)

    def save(
        self,
        url: Any,
        *,
        wait: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        timeout: Any = DEFAULT,
    ) -> Any:
        """Write all that the store holds to files, for :func:`restore`.

        It is copied at one moment, as of a snapshot; the owners of the shards then write
        their parts, while others go on pushing. What is written is in order only once
        its last file is, the manifest: until then there is no checkpoint.

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
            What was written, or a `concurrent.futures.Future` of that.

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
        target = saving.CheckpointTarget(full_url(url), options_of(storage_options))
        by_default = timeout is DEFAULT

        async def work(shards: ShardClient, deadline: Deadline) -> Any:
            named = partial(scheduler_named, shards.link, "a save")
            async with named(ends=True):
                cut = await saving.take(shards, deadline)
            left = deadline.remaining()
            if by_default and left is not None:
                left += _nbytes(shards.meta.layout, cut) / saving.SAVED_NBYTES_A_SECOND
            write = partial(
                saving.write,
                shards,
                cut,
                target,
                deadline=Deadline(left, deadline.what),
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

    def __getitem__(self, name: str) -> Any:
        try:
            layout, found = self.layout, None
            with contextlib.suppress(TypeError):  # of what is no name, as below
                found = layout.table_by_name.get(name)
            if found is not None:
                return ParameterTable(self, found)
            return ParameterArray(self, layout[name])
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
                raise not_set(name)
            super().__setattr__(name, value)

        def __setitem__(self, name: Any, value: Any) -> None:
            raise not_written(name)

        def __delitem__(self, name: Any) -> None:
            raise not_deleted(name)


def _sweep(target: saving.CheckpointTarget) -> None:
    """Remove what others have begun to save and not finished for a day."""
    # What was saved is saved, whatever comes of this.
    with contextlib.suppress(CheckpointError):
        sweep(Storage(target.url, target.options), time.time())


def _nbytes(layout: Layout, cut: saving.WholeCut) -> int:
    """Return about how many bytes a checkpoint has: values, and up to three slots."""
    tables = any_tables(layout, None)
    counts = cut.counts(tables)
    rows = sum(sum(counts.rows[t.index]) * t.row_nbytes for t in tables)
    return 4 * (layout.nbytes + rows)


def _listed(contributions: Any) -> list[Any]:
    """Return contributions as a list, or refuse what is none of several."""
    one = isinstance(contributions, (str, bytes, np.ndarray, Mapping))
    if one or not isinstance(contributions, Iterable):
        raise TypeError(
            f"contributions is a list with one mapping of names to arrays for each "
            f"contributor, found {type(contributions).__name__}; pass [{{'w': array}}]"
        )
    return list(contributions)


def _dumped(f: Any) -> bytes:
    try:
        return dumps(f)
    except Exception as error:
        raise TypeError(
            f"f cannot be pickled ({error}); define it without open files and locks"
        ) from error
