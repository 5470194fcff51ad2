"""Making, restoring and finding stores."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from daskps import config
from daskps.checkpoint import listing
from daskps.checkpoint.listing import SAVED_NBYTES_A_SECOND
from daskps.checkpoint.storage import full_url, options_of
from daskps.cluster.caller import creation
from daskps.cluster.caller.finding import ensure_directory, find_named
from daskps.cluster.caller.link import current_link
from daskps.cluster.caller.scheduler_lost import scheduler_named
from daskps.store.arguments import checked_name
from daskps.store.blueprints import Wanted, blueprint
from daskps.store.checkpoints import recovery_target
from daskps.store.restoring import WantedPart, restored
from daskps.store.store import ParameterStore
from daskps.store.usage_errors import lacks
from daskps.tracebacks import entrance

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence

    from daskps.cluster.caller.creation import Blueprint
    from daskps.cluster.caller.link import Link

DEFAULT = config.DEFAULT
_AWAIT = (
    "this store is still being made by an asynchronous client; write "
    "store = await daskps.create(...), or async with daskps.create(...) as store"
)


@entrance
def create(  # noqa: PLR0913 - the public contract
    params: Mapping[str, Any] | list[Any] | tuple[Any, ...],
    *,
    name: str | None = None,
    client: Any = None,
    optimizer: Any = None,
    shards: int | None = None,
    servers: str | Sequence[str] = "auto",
    placement: Mapping[str, str | Sequence[str]] | None = None,
    device: str | None = None,
    copies: int = 1,
    recover_from: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    seed: int = 0,
    overwrite: bool = False,
    timeout: Any = DEFAULT,
) -> ParameterStore:
    """Create a store on the workers of a Dask cluster.

    Parameters
    ----------
    params : mapping, list or tuple
        Name to ndarray, scalar, dask array, :class:`ArraySpec` or :class:`TableSpec`.
        Nested mappings, and lists and tuples with an array in them, are flattened:
        names and places, from 0, are joined with "/", and :func:`unflatten` is the way
        back. A list of numbers is an array.
    name : str, optional
        Up to 200 bytes. A named store stays until :meth:`ParameterStore.delete` and
        any client can :func:`open` it. Without a name it is a session store, which is
        freed when no handle of it is left: no store, array, table or replica. Once a
        handle was pickled, but by a run, the store goes with the client.
    client : distributed.Client, optional
        The client; the current one by default.
    optimizer : daskps.optim.Rule or mapping of str to Rule or None, optional
        The update rule of pushes, or one per pattern of parameter names; None is for
        parameters that only `add` and `assign` change.
    shards : int, optional
        Number of shards, at most 16,384; one per server by default.
    servers : {"auto", "all"}, "resource:NAME" or list of str
        Workers that own shards: all of them, or those with the resource ``PS`` when
        any has it ("auto"); or worker addresses.
    placement : mapping of str to str or list of str, optional
        Shell patterns of names of parameters and tables, as those of `optimizer`, to
        workers that own shards: what matches is cut over the shards of these only, and
        one address keeps it whole. All others are cut over all shards.
    device : {"cuda", "cuda:1", "fake"}, optional
        The device of each owner's process that weights and optimizer state are on, see
        the page on devices; host memory by default. Only workers that have it own
        shards then, and what is there is lost with its process.
    copies : {1, 2}
        With 2 each shard has a second copy on another worker, of another machine where
        there is one. All that was answered is on both then: where a machine is lost, the
        copies become the owners, with every push that had returned. Calls go to the
        owners by socket or message, and wait for the copies.
    recover_from : str or path-like, optional
        The URL that the store is saved to, see :meth:`ParameterStore.save`. Where a
        shard is lost the store is restored from its last checkpoint there: each caller
        gets a :class:`StoreRestoredError` once, and goes on.
    storage_options : mapping, optional
        For the filesystem of `recover_from`, such as keys; they are sent to the
        scheduler and to the process that restores the store.
    seed : int
        Seed of initializers.
    overwrite : bool
        Replace a store of that name.
    timeout : float, str or None
        Seconds or a duration such as "30s"; None waits for ever.

    Returns
    -------
    ParameterStore
        A handle; with an asynchronous client an awaitable of one, which ``async with``
        takes too.

    Raises
    ------
    StoreExistsError
        If the name is taken.
    LayoutError
        For values no store can hold, patterns that do not fit, a placement on a worker
        that owns no shard, too little memory.
    NotEnoughWorkersError
        If no worker, or not all that were named, can be found; with two copies, if only
        one runs.
    ShardLostError
        If a worker dies that was to hold a shard; nothing of the store stays.
    CheckpointError
        If nothing can be written at `recover_from`, or it is in the memory of a process
        that is not that of the workers.
    ValueError, TypeError
        For arguments that cannot be, and without a client.

    Examples
    --------
    >>> import numpy as np
    >>> from distributed import Client
    >>> with Client(processes=False, dashboard_address="127.0.0.1:0") as client:
    ...     with create({"w": np.zeros(3)}) as store:
    ...         _ = store.add({"w": np.arange(3.0)})
    ...         store["w"].pull()
    array([0., 1., 2.])
    """
    seconds = config.deadline(timeout)
    target = recovery_target(recover_from, storage_options)
    if storage_options is not None and target is None:
        raise ValueError(
            "storage_options are for the filesystem of recover_from; pass that too"
        )
    where = Wanted(shards, servers, placement, name, overwrite, target, device, copies)
    plan = blueprint(params, optimizer=optimizer, where=where, seed=seed)
    link = current_link(client)

    async def make() -> ParameterStore:
        return await _made(link, plan, seconds)

    return _opening(link.run_beside(make))


@entrance
def restore(  # noqa: PLR0913 - the public contract
    url: Any,
    *,
    names: str | Iterable[str] | None = None,
    rename: Mapping[str, str] | None = None,
    dtype: Any = None,
    name: str | None = None,
    client: Any = None,
    shards: int | None = None,
    servers: str | Sequence[str] = "auto",
    placement: Mapping[str, str | Sequence[str]] | None = None,
    device: str | None = None,
    copies: int = 1,
    optimizer: Any = None,
    init: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    recover_from: Any = None,
    overwrite: bool = False,
    timeout: Any = DEFAULT,
) -> ParameterStore:
    """Create a store that holds what a checkpoint holds, to the last bit.

    Weights, the state of optimizers with their step counts, rows of tables and all that
    is known of their ids. The number of shards may be another, and the cluster too.
    Every file is compared with its digest first; nothing is pickled, and nothing
    imported that a file names.

    Parameters
    ----------
    url : str or path-like
        Of one checkpoint, or of a folder of them: then the newest there. All workers
        must reach it.
    names : str or iterable of str, optional
        Patterns of the parameters and tables that are read; all by default.
    rename : mapping of str to str, optional
        Patterns, and the names in their place, such as ``{"encoder/*": "body/*"}``: each
        star there stands for what that of the pattern has matched. The first pattern
        that matches holds.
    dtype : dtype or mapping of str to dtype, optional
        Of all arrays and bounded tables of floats, or by patterns of their new names.
    name : str, optional
        Of the new store, as in :func:`create`; that of the saved one plays no part.
    client : distributed.Client, optional
        The client; the current one by default.
    shards : int, optional
        Number of shards, at most 16,384; one per server by default.
    servers : {"auto", "all"}, "resource:NAME" or list of str
        As in :func:`create`.
    placement : mapping of str to str or list of str, optional
        As in :func:`create`; it may be another one than that of the saved store.
    device : {"cuda", "cuda:1", "fake"}, optional
        As in :func:`create`, wherever the saved store was.
    copies : {1, 2}
        As in :func:`create`.
    optimizer : daskps.optim.Rule or mapping of str to Rule, optional
        In place of the rules that were saved; their slots must be the same. Rules and
        schedules of your own have to be passed. With `names`, `rename`, `dtype` or new
        parameters state whose slots are others is left behind.
    init : mapping of str to number, initializer, array or specification, optional
        By the name of an unbounded table, initial values of absent rows from now on. By
        any other name a parameter that the checkpoint does not have, as in
        :func:`create`.
    storage_options : mapping, optional
        For the filesystem of the URL, such as keys; they are sent to the workers.
    recover_from : str or path-like, optional
        As in :func:`create`, with the same `storage_options`.
    overwrite : bool
        Replace a store of that name.
    timeout : float, str or None
        Seconds or a duration such as "30s"; None waits for ever. The configured
        default grows by a second for each 10 MB.

    Returns
    -------
    ParameterStore
        A handle; with an asynchronous client an awaitable of one. The store has no
        producers: a push from before the save that is sent again counts again.

    Raises
    ------
    CheckpointError
        If there is none, if it is torn, damaged or of a newer format, or needs a rule
        that was not passed; it names the file. Nothing of the store stays then.
    StoreExistsError, LayoutError, NotEnoughWorkersError, ShardLostError
        As in :func:`create`; a LayoutError also for two parameters of one name.
    UnknownParameterError
        For a pattern that matches nothing, with the names that there are.
    ValueError, TypeError
        For arguments that cannot be, and without a client.

    Notes
    -----
    A store of a part, or under other names, is another model: it has a lineage of its
    own and begins with epoch 0. Counts of optimizer steps come along with the state.

    Examples
    --------
    >>> import tempfile
    >>> store = daskps.create({"w": np.arange(3.0)}, optimizer=daskps.optim.Adam(0.1))
    >>> _ = store.push({"w": np.ones(3)})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = store.save(folder)
    ...     again = daskps.restore(folder, shards=1)
    >>> again.optimizer, again.version, (again["w"].pull() == store["w"].pull()).all()
    ({'w': 'Adam(lr=0.1)'}, 1, np.True_)

    A part of it, and a head that it does not have:

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = store.save(folder)
    ...     init = {"head": np.zeros(2)}
    ...     tuned = daskps.restore(folder, rename={"*": "body/*"}, init=init)
    >>> sorted(tuned.pull())
    ['body/w', 'head']
    """
    at, seconds = full_url(url), config.deadline(timeout)
    options = options_of(storage_options)
    target = recovery_target(recover_from, storage_options)
    link = current_link(client)

    async def make() -> ParameterStore:
        source = await asyncio.to_thread(listing.find, at, options)
        where = Wanted(
            shards, servers, placement, name, overwrite, target, device, copies
        )
        part = WantedPart(names, rename, dtype)
        rules: dict[str, Any] = {"optimizer": optimizer, "init": init}
        plan = restored(source, where=where, part=part, **rules)
        limit = seconds
        if timeout is DEFAULT and limit is not None:
            limit += source.manifest.nbytes / SAVED_NBYTES_A_SECOND
        return await _made(link, plan, limit)

    return _opening(link.run_beside(make))


async def _made(link: Link, plan: Blueprint, seconds: float | None) -> ParameterStore:
    """Make a store; return its first handle, which has the hold of a session store."""
    ready = partial(ensure_directory, link)
    await link.within(ready, seconds, creation.CREATION)
    meta = await creation.create(link, plan, seconds)
    return ParameterStore._of(meta, link, hold=link.holds.pop(meta.uid, None))


@entrance
def open(  # noqa: A001 - as in zarr.open
    name: str, *, client: Any = None, wait: Any = None, timeout: Any = DEFAULT
) -> ParameterStore:
    """Attach to a named store.

    Parameters
    ----------
    name : str
        Its name.
    client : distributed.Client, optional
        The client; the current one by default.
    wait : float or str, optional
        Seconds, or a duration such as "30s", to wait for somebody to create the store;
        ``math.inf`` waits for ever. By default it must be there. In a task the wait
        keeps the task's thread.
    timeout : float, str or None
        Seconds or a duration such as "30s" for all of it, the wait included; None waits
        for ever. The configured default does not cut a wait short: it counts from the
        end of `wait`.

    Returns
    -------
    ParameterStore
        A handle; with an asynchronous client an awaitable of one, which ``async with``
        takes too. The store holds its initial values.

    Raises
    ------
    StoreNotFoundError
        If there is none of that name, or none when the wait is over.
    ValueError, TypeError
        For what can be no name, and without a client.
    TimeoutError
        If `timeout` ends first.
    SchedulerLostError
        If the scheduler is gone, within five seconds.

    Examples
    --------
    >>> daskps.create({"w": np.arange(3.0)}, name="kept")
    <daskps.ParameterStore 'kept': 1 parameter, 24 B, 2 shards on 2 workers>
    >>> store = daskps.open("kept", wait="30s")
    >>> store["w"].pull()
    array([0., 1., 2.])
    >>> store.delete()
    """
    name = checked_name(name)
    waiting = 0.0 if wait is None else config.deadline(wait, "wait")
    seconds = config.deadline(timeout)
    if timeout is DEFAULT and seconds is not None:
        seconds = None if waiting is None else waiting + seconds
    link = current_link(client)

    what = f"store {name!r}"

    async def attach() -> ParameterStore:
        async with scheduler_named(link, f"the search for {what}"):
            return ParameterStore._of(await find_named(link, name, waiting), link)

    return _opening(link.run(lambda: link.within(attach, seconds, what)))


class Opening(Coroutine[Any, Any, ParameterStore]):
    """A store under way: awaited it is the store, in ``async with`` it is closed too.

    Parameters
    ----------
    work : coroutine
        Returns the store.
    """

    def __init__(self, work: Coroutine[Any, Any, ParameterStore]) -> None:
        self._work = work
        self._store: ParameterStore | None = None

    def __await__(self) -> Generator[Any, None, ParameterStore]:
        return self._work.__await__()

    def send(self, value: Any) -> Any:
        """Go on, as a coroutine does."""
        return self._work.send(value)

    def throw(self, *error: Any) -> Any:
        """Go on with an error, as a coroutine does."""
        return self._work.throw(*error)

    def close(self) -> None:
        """Give up, as a coroutine does."""
        self._work.close()

    async def __aenter__(self) -> ParameterStore:
        self._store = await self._work
        return self._store

    if not TYPE_CHECKING:

        async def __aexit__(self, *exc: object) -> None:
            if self._store is not None:
                await self._store.__aexit__(*exc)

        def __enter__(self) -> Any:
            raise TypeError(_AWAIT)

        def __exit__(self, *exc: object) -> None: ...

        def __getitem__(self, name: str) -> Any:
            raise TypeError(_AWAIT)

        def __getattr__(self, name: str) -> Any:
            raise lacks(self, name, "" if name.startswith("_") else f": {_AWAIT}")


def _opening(found: Any) -> ParameterStore:
    """Return a store as it is, and the awaitable of one as an `Opening`."""
    # That is what `daskps.aio` says.
    return Opening(found) if inspect.iscoroutine(found) else found  # type: ignore[return-value]
