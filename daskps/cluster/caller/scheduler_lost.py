"""Calls that end with the scheduler, and hear first of something else.

They hear of a closed connection, a worker that closes because its scheduler is gone, or
a cut that nobody waits for any more, whichever comes first. So a call that got an error
looks once whether there is a scheduler still.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from daskps.cluster.caller.link import OVER_SECONDS
from daskps.cluster.protocol.messages import identity
from daskps.errors import SchedulerLostError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from daskps.cluster.caller.link import Link

#: How often to look at the client, which hears of its connection's end by itself.
_LOOK_SECONDS = 0.1
WATCH_SECONDS = 0.5
#: How long there may be no connection. The call then winds up its work for
#: `link.GRACE_SECONDS`, so its caller hears of it within five seconds.
LOST_SECONDS = 3.0


@asynccontextmanager
async def scheduler_named(
    link: Link, what: str, *, ends: bool = True
) -> AsyncIterator[None]:
    """Have an error of some work say that the scheduler is gone, where it is.

    Or end the work where the scheduler is gone for a while: Dask tries for half a
    minute to reach it.

    Parameters
    ----------
    link : Link
        The way to it.
    what : str
        The name of the work, for the error.
    ends : bool, default True
        Whether to end it.

    Raises
    ------
    SchedulerLostError
        Its cause is the error that was raised first.
    """
    scope = asyncio.timeout(None)
    watch = asyncio.ensure_future(_watch(link, scope)) if ends else None
    try:
        async with scope:
            yield
    except SchedulerLostError:
        raise
    except Exception as error:
        if not scope.expired() and await _has_scheduler(link):
            raise
        raise SchedulerLostError(
            f"{what} ended, as {_whom(link)} is gone or out of reach; its stores end with "
            f"a scheduler. Make a store again from its last checkpoint, in this cluster or "
            f"another: daskps.restore(url); train(..., checkpoint=..., resume=True) goes on "
            f"with the run that was saved there"
        ) from error
    finally:
        if watch is not None:
            watch.cancel()


async def _watch(link: Link, scope: asyncio.Timeout) -> None:
    """End a scope once there was no connection for `LOST_SECONDS`."""
    loop = asyncio.get_running_loop()
    last = loop.time()
    while loop.time() < last + LOST_SECONDS:
        await asyncio.sleep(WATCH_SECONDS)
        if link.has_scheduler:
            last = loop.time()
    scope.reschedule(last)


async def _has_scheduler(link: Link) -> bool:
    """Return whether the scheduler answers; one that is only busy counts as there."""
    asked = asyncio.ensure_future(link.directory("hello", **identity()))
    loop = asyncio.get_running_loop()
    end = loop.time() + OVER_SECONDS
    try:
        while link.has_scheduler and loop.time() < end:
            if (await asyncio.wait({asked}, timeout=_LOOK_SECONDS))[0]:
                return not isinstance(asked.exception(), OSError)
        return link.has_scheduler
    finally:
        asked.cancel()
        # Else asyncio would log its error as one that nobody has retrieved.
        await asyncio.wait({asked}, timeout=0)
        if asked.done() and not asked.cancelled():
            asked.exception()


def _whom(link: Link) -> str:
    scheduler = link.node.scheduler
    return (
        "its scheduler" if scheduler is None else f"the scheduler at {scheduler.addr}"
    )
