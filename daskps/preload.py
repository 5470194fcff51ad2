"""Gives servers their part of daskps as they start.

::

    dask scheduler --preload daskps.preload
    dask worker tcp://scheduler:8786 --preload daskps.preload

Neither is needed: the first store that a client makes or opens brings both. With it a
server that lacks daskps stops as it starts, and not when a store first needs it.
"""

from __future__ import annotations

from typing import Any

from daskps.cluster.plugins import DirectoryPlugin, HostPlugin


async def dask_setup(server: Any) -> None:
    """Give a worker its host, a scheduler its directory; Dask calls it.

    Parameters
    ----------
    server : distributed.Worker or distributed.Scheduler
        The server that starts; it listens already, so it knows its address.

    Raises
    ------
    TypeError
        For any other server, such as a nanny.
    """
    kinds = {kind.__name__ for kind in type(server).__mro__}
    if "Worker" in kinds:
        # The scheduler adds the plugin again when this worker registers.
        await server.plugin_add(HostPlugin(), name=HostPlugin.name, catch_errors=False)
    elif "Scheduler" in kinds:
        await server.register_scheduler_plugin(
            DirectoryPlugin(), name=DirectoryPlugin.name, idempotent=True
        )
    else:
        raise TypeError(
            f"daskps.preload is for workers and schedulers, not for "
            f"{type(server).__name__}; give it with --preload"
        )
