"""Finding the directory, and a named store, also one that is still to be created."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from daskps.cluster import upstream
from daskps.cluster.caller.far import WAIT_SECONDS
from daskps.cluster.caller.shard_map import StoreMap
from daskps.cluster.plugins import DirectoryPlugin
from daskps.cluster.wire.messages import identity
from daskps.errors import ProtocolError, StoreNotFoundError

if TYPE_CHECKING:
    from daskps.cluster.caller.link import Link

logger = logging.getLogger(__name__)


async def ensure_directory(link: Link) -> None:
    """Give the scheduler its directory and the workers their hosts, once."""
    if link.has_directory:
        return
    try:
        await upstream.register(link.client, DirectoryPlugin())
    except ValueError:
        # The scheduler takes no pickles (distributed.scheduler.pickle: false);
        # it was started with --preload daskps.preload, or `hello` says so.
        logger.info("the scheduler refuses plugins", exc_info=True)
    except ImportError as error:
        raise ProtocolError(
            f"the scheduler at {link.node.scheduler.addr} cannot import daskps "
            f"({error}); install the same daskps on scheduler, workers and client"
        ) from error
    await link.directory("hello", **identity())
    link.has_directory = True


async def find_named(
    link: Link, name: str, wait_seconds: float | None = 0.0
) -> StoreMap:
    """Return the map of a named store, which a handle needs.

    Parameters
    ----------
    link : Link
        The way to the cluster.
    name : str
        Its name.
    wait_seconds : float or None
        How long to wait for it to be created; None for ever. The directory answers
        when it is.

    Returns
    -------
    StoreMap
        The store.

    Raises
    ------
    StoreNotFoundError
        If there is none of that name when the wait is over.
    """
    await ensure_directory(link)
    wait = float("inf") if wait_seconds is None else wait_seconds
    end = time.monotonic() + wait
    while True:
        try:
            return StoreMap(await link.directory("find", name=name))
        except StoreNotFoundError as error:
            left = end - time.monotonic()
            if left <= 0:
                if not wait:
                    raise
                raise StoreNotFoundError(f"waited {wait:g} s: {error}") from None
        # In parts: this bounds how long the directory keeps the question of a dead
        # caller.
        part = min(left, WAIT_SECONDS)
        await link.directory("await_store", name=name, wait_seconds=part)
