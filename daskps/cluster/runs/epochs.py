"""Finds where the epochs of a run begin, and says why it cannot begin yet."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from daskps.epochs import Epochs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from daskps.cluster.caller.link import Link

logger = logging.getLogger(__name__)
#: When it is said that a run cannot begin yet, as a shard is away.
SAY_SECONDS = 5.0


async def epochs_of(link: Link, uid: str, name: str) -> tuple[Epochs, str]:
    """Return where a store is in its epochs, and what was said of its last run.

    Parameters
    ----------
    link : Link
        The client's way to the cluster.
    uid, name : str
        The store.

    Returns
    -------
    Epochs
        Where the run that ended last has left it.
    str
        The text of its `Launch.described`, "" where there was none.

    Raises
    ------
    ConsistencyError
        While a run goes on.
    """
    async with saying_away(link, uid, name):
        epochs, described = await link.directory("epochs", uid=uid)
        return Epochs(*epochs), described


@asynccontextmanager
async def saying_away(link: Link, uid: str, name: str) -> AsyncIterator[None]:
    """Say why a run cannot begin, once that takes long."""
    saying = asyncio.ensure_future(_say_away(link, uid, name))
    try:
        yield
    finally:
        saying.cancel()


async def _say_away(link: Link, uid: str, name: str) -> None:
    await asyncio.sleep(SAY_SECONDS)
    located = await link.directory("locate", uid=uid)
    for shard, why in sorted(located["away"])[:1]:
        worker = located["owners"][shard]
        logger.warning(
            "daskps: a run on store %r waits to begin: shard %d is away, for worker "
            "%s %s",
            *(name, shard, worker, why),
        )
