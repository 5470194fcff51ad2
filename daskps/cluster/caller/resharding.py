"""A store that gets other shards: a cut of it is installed in these, without files.

As a restore in the place of a lost store; :mod:`daskps.cluster.directory.resharding`
names the new layout, and has the old shards go on where anything fails before that.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from daskps.checkpoint.listing import SAVED_NBYTES_A_SECOND, FoundCheckpoint
from daskps.cluster.caller import creation, saving
from daskps.cluster.caller.recovery import replacing
from daskps.cluster.caller.snapshots import drop_cut
from daskps.errors import ConsistencyError, ShardLostError, StaleGenerationError

if TYPE_CHECKING:
    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.protocol.deadline import Deadline


async def reshard(
    shards: ShardClient,
    n_shards: int | None,
    servers: str | list[str] | None,
    deadline: Deadline,
    *,
    grows: bool,
) -> StoreMap:
    """Lay a store out anew; return its map.

    Parameters
    ----------
    shards : ShardClient
        The store.
    n_shards, servers : int, str or list of str, optional
        As they were asked for before, where that is None.
    deadline : Deadline
        When to give up; pushes wait as long at most.
    grows : bool
        Whether large stores may take longer.

    Raises
    ------
    ConsistencyError
        While it is in a run, saved or resharded, and where a worker fails meanwhile.
    LayoutError, NotEnoughWorkersError
        If there is no room, or no worker, for such a layout.
    ShardLostError, StoreClosedError, TimeoutError
        As their names say. The store goes on as it was.
    """
    link, meta, silent = shards.link, shards.meta, set[str]()
    how: dict[str, Any] = {"method": "reshard", "servers": servers}
    whole = await saving.take(shards, deadline, **how)
    turn = whole.told
    try:
        async with contextlib.AsyncExitStack() as watch:
            # Dask would try for long to reach one that has died, and pushes wait.
            for worker, of in meta.hosts.items():
                over = shards.remote.liveness.over(worker, of)
                await watch.enter_async_context(over)
            describe = partial(saving.describe, shards, whole, silent)
            left = deadline.remaining()
            manifest, applied = await link.within(describe, left, deadline.what, silent)
            frozen = whole.name, whole.copies, meta.layout.to_wire(), applied
            of_turn = meta.uid, turn["token"], None, frozen, watch.aclose
            plan = replacing(
                meta,
                FoundCheckpoint("", {}, "", manifest),
                shards=turn["shards"] if n_shards is None else n_shards,
                servers=turn["servers"],
                replaces=creation.Replaced(*of_turn),
            )
            if (left := deadline.remaining()) is not None and grows:
                left += whole.nbytes(meta.layout) / SAVED_NBYTES_A_SECOND
            return await creation.create(link, plan, left)
    except (OSError, ShardLostError, StaleGenerationError) as error:
        if isinstance(error, TimeoutError):
            raise
        # Lost is a new shard, of a layout that nobody has seen.
        why = str(error)
        if isinstance(error, ShardLostError):
            why = f"worker {error.worker} {error.reason}"
        raise ConsistencyError(
            f"store {meta.name!r} goes on as it was, for a worker failed while it was "
            f"resharded ({why}); try again"
        ) from error
    finally:
        # Where it has other shards now this is over.
        await drop_cut(shards, whole.name)
