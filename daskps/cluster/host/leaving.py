"""The orderly end of a host: other hosts of its machine get its shards, or none does.

However a worker closes (SIGTERM, Ctrl-C, `cluster.scale`, retirement, a heartbeat that
the scheduler does not know), Dask ends its plugins before its connections. The host
tells the directory, which begins to look for new owners, then lets go of each shard
under its lock, and then leaves the machine's members. Members take shards over; a host
that leaves does not. The last host of a machine frees all blocks there, unless the
directory still looks for shards of workers that have died.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from daskps.errors import DaskPSError, StaleGenerationError
from daskps.layout.arrays import counted

if TYPE_CHECKING:
    from daskps.cluster.host.host import ShardHost

logger = logging.getLogger(__name__)
#: How long the directory may take to say of which stores others may have the shards. A
#: nanny gives its worker 4 s in all.
TELL_SECONDS = 1.0
#: How long it may take to hear that no other host can have them; Dask would try for
#: longer to reach a scheduler that has ended.
_LATE_SECONDS = 0.3
#: How long other processes may keep a shard locked; a worker that adopts waits longer.
LOCK_SECONDS = 1.0
#: Seconds between two tries to get at a shard.
_PAUSE_SECONDS = 0.0005


async def leave(host: ShardHost, reason: str) -> None:
    """Let go of all shards, or free them, and end what the host does.

    Parameters
    ----------
    host : ShardHost
        The host, on its worker's event loop.
    reason : str
        The reason, for callers of a shard that is lost with the host.
    """
    host.is_leaving, keeps = True, False
    try:
        if host.shards:
            where, n = host.worker.address, counted(len(host.shards), "shard")
            logger.info("%s %s, with %s", where, reason, n)
            await _let_go(host, await _ask(host))
        # Also if the stream to the scheduler has ended: at SIGTERM Dask ends it first.
        keeps = bool(await _tell(host, "awaits", _LATE_SECONDS))
    finally:
        removed = host.close(reason, keeps=keeps)
    if removed:
        await _tell(host, "removed", _LATE_SECONDS, names=removed)


async def _let_go(host: ShardHost, wanted: list[str] | None) -> None:
    """Release the shards of the wanted stores, or of all if nobody named any."""
    error = StaleGenerationError(
        f"worker {host.worker.address} closes and has let go of its shards; ask the "
        f"directory where they live"
    )
    released = []
    for (store, index), hosted in list(host.shards.items()):
        if hosted.is_shared and (wanted is None or store in wanted):
            hosted.release(error)
            del host.shards[store, index]
            released.append(hosted)
    end = asyncio.get_running_loop().time() + LOCK_SECONDS
    while waiting := [hosted for hosted in released if not hosted.is_released]:
        for hosted in waiting:
            # If no other thread has the mutex.
            await host.run_for(hosted, hosted.serve)
        if asyncio.get_running_loop().time() > end:
            # The worker that adopts these shards takes this one for dead.
            logger.info("%d shards stayed locked by other processes", len(waiting))
            return
        await asyncio.sleep(_PAUSE_SECONDS)


async def _ask(host: ShardHost) -> list[str] | None:
    """Return the stores whose shards others may have; None if there is no answer."""
    if not host.worker.is_connected():
        # The directory itself sees that the connection ends.
        return None
    found: list[str] | None = await _tell(host, "leaving", TELL_SECONDS)
    return found


async def _tell(host: ShardHost, method: str, seconds: float, **kwargs: Any) -> Any:
    """Tell the directory; None if it cannot be reached, as without a scheduler."""
    work = host.worker.directory(method, worker=host.worker.address, **kwargs)
    try:
        return await asyncio.wait_for(work, seconds)
    except (OSError, DaskPSError) as error:
        logger.info("could not tell the scheduler: %s: %r", method, error)
        return None
