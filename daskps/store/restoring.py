"""Making a store of a checkpoint."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from daskps import config
from daskps.checkpoint import listing
from daskps.checkpoint.storage import full_url, options_of
from daskps.cluster.caller import creation
from daskps.cluster.caller.link import current_link
from daskps.cluster.caller.saving import SAVED_NBYTES_A_SECOND
from daskps.store.awaiting import opening
from daskps.store.checkpoints import recovery_target
from daskps.store.restored import restored
from daskps.store.servers import Wanted
from daskps.store.store import ParameterStore
from daskps.tracebacks import entrance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DEFAULT = config.DEFAULT


@entrance
def restore(  # noqa: PLR0913 - the public contract
    url: Any,
    *,
    name: str | None = None,
    client: Any = None,
    shards: int | None = None,
    servers: str | Sequence[str] = "auto",
    placement: Mapping[str, str | Sequence[str]] | None = None,
    optimizer: Any = None,
    init: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    recover_from: Any = None,
    overwrite: bool = False,
    timeout: Any = DEFAULT,
) -> Any:
    """Create a store that holds what a checkpoint holds, to the last bit.

    Weights, the state of optimizers with their step counts, rows of tables and all that
    is known of their ids. The number of shards may be another, and the cluster too. Every
    file is compared with its digest first; nothing is pickled, and nothing imported that
    a file names.

    Parameters
    ----------
    url : str or path-like
        Of one checkpoint, or of a folder of them: then the newest there. All workers
        must reach it.
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
    optimizer : daskps.optim.Rule or mapping of str to Rule, optional
        In place of the rules that were saved; their slots must be the same. Rules and
        schedules of your own have to be passed.
    init : mapping of str to number or initializer, optional
        By the name of a table of any ids, what absent rows of it begin with from now on.
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
        producers: what was pushed before the save and is pushed again counts again.

    Raises
    ------
    CheckpointError
        If there is none, if it is torn, damaged or of a newer format, or needs a rule
        that was not passed; it names the file. Nothing of the store stays then.
    StoreExistsError, LayoutError, NotEnoughWorkersError, ShardLostError
        As in :func:`create`.
    ValueError, TypeError
        For arguments that cannot be, and without a client.

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
    """
    at, seconds = full_url(url), config.deadline(timeout)
    options = options_of(storage_options)
    target = recovery_target(recover_from, storage_options)
    link = current_link(client)

    async def make() -> ParameterStore:
        found = await asyncio.to_thread(listing.find, at, options)
        source = creation.CheckpointSource(
            found.url, options, found.digest, found.manifest
        )
        plan = restored(
            source,
            name=name,
            where=Wanted(shards, servers, placement),
            optimizer=optimizer,
            init=init,
            overwrite=overwrite,
        )
        limit = seconds
        if timeout is DEFAULT and limit is not None:
            limit += found.manifest.nbytes / SAVED_NBYTES_A_SECOND
        plan = replace(plan, recover_from=target)
        meta = await creation.create(link, plan, limit)
        return ParameterStore._of(meta, link, hold=link.holds.pop(meta.uid, None))

    return opening(link.run_beside(make))
