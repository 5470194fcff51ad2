"""Finding stores: the directory, a named store, also one that is still to be created.

Views of the stores of a cluster from outside change nothing there: they make no client
and so register nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from daskps.cluster import upstream
from daskps.cluster.caller.remote import WAIT_SECONDS
from daskps.cluster.caller.shard_map import StoreMap
from daskps.cluster.plugins import DirectoryPlugin
from daskps.cluster.protocol.messages import identity
from daskps.cluster.protocol.packing import unpack_reply
from daskps.cluster.upstream import connection
from daskps.errors import DaskPSError, ProtocolError, StoreNotFoundError

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


#: How long one host may take to answer before its shards are shown without counters.
_HOST_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class StoreView:
    """One store as seen from outside."""

    meta: StoreMap
    #: A row per shard: its counters, or "error" where they could not be had.
    shards: list[dict[str, Any]]


async def find_stores(address: str, seconds: float) -> list[dict[str, Any]] | None:
    """Return a row per store of a cluster, None where it has no daskps.

    Parameters
    ----------
    address : str
        The scheduler's.
    seconds : float
        How long to try.

    Returns
    -------
    list of dict or None
        As the directory lists them.

    Raises
    ------
    OSError
        If nobody answers in time; TimeoutError is one.
    ValueError
        For a text that is no address.
    ProtocolError
        If the scheduler has another protocol of daskps.
    """
    async with asyncio.timeout(seconds), connection(address, seconds) as scheduler:
        return await _list(scheduler)


async def find_store(address: str, name: str, seconds: float) -> StoreView | None:
    """Return a store by its name or uid, None where the cluster has no daskps.

    Parameters
    ----------
    address : str
        The scheduler's.
    name : str
        Name or uid of the store; session stores have names too.
    seconds : float
        How long to try.

    Returns
    -------
    StoreView or None
        The store; shards of hosts that do not answer say so.

    Raises
    ------
    StoreNotFoundError
        If there is no such store.
    OSError, ValueError, ProtocolError
        As for :func:`find_stores`.
    """
    async with asyncio.timeout(seconds), connection(address, seconds) as scheduler:
        if (row := await _row(scheduler, address, name)) is None:
            return None
        meta = StoreMap(await _ask(scheduler, "find", uid=row["uid"]))
        located = await _ask(scheduler, "locate", uid=meta.uid)
    lost = {shard: f"lost: {reason}" for shard, _, reason in located["lost"]}
    lost |= {shard: f"away: its worker {why}" for shard, why in located["away"]}
    rows = await asyncio.gather(
        *(
            _counters(worker, meta, shards, lost)
            for worker, shards in meta.hosts.items()
        )
    )
    return StoreView(
        meta, sorted((r for of in rows for r in of), key=lambda r: r["shard"])
    )


async def delete_store(address: str, name: str, seconds: float) -> str | None:
    """Free a store by its name or uid; return its name, None without daskps.

    Raises
    ------
    StoreNotFoundError, OSError, ValueError, ProtocolError
        As for :func:`find_store`.
    """
    async with asyncio.timeout(seconds), connection(address, seconds) as scheduler:
        if (row := await _row(scheduler, address, name)) is None:
            return None
        await _ask(scheduler, "delete", uid=row["uid"], wait_seconds=seconds / 2)
        return str(row["name"])


async def _row(scheduler: Any, address: str, name: str) -> dict[str, Any] | None:
    """Return the row of a store by its name or uid, None without daskps."""
    stores = await _list(scheduler)
    if stores is None:
        return None
    found = [s for s in stores if name in (s["name"], s["uid"])]
    if not found:
        names = sorted(s["name"] for s in stores)
        raise StoreNotFoundError(
            f"no store named {name!r} at {address}; there are {names[:8]}"
        )
    # A session store may bear the name of a named one.
    return min(found, key=lambda s: bool(s["session"]))


async def _list(scheduler: Any) -> list[dict[str, Any]] | None:
    reply = await scheduler.daskps_directory(method="hello", **identity())
    if reply is None:  # Dask's answer to a message nobody handles
        return None
    unpack_reply(reply, "the scheduler")
    found: list[dict[str, Any]] = await _ask(scheduler, "list")
    return found


async def _ask(scheduler: Any, method: str, **kwargs: Any) -> Any:
    reply = await scheduler.daskps_directory(method=method, **kwargs)
    return unpack_reply(reply, "the scheduler")


async def _counters(
    worker: str, meta: StoreMap, shards: list[int], lost: dict[int, str]
) -> list[dict[str, Any]]:
    """Ask one host for its shards; where it does not answer, each shard says why."""
    gone = [shard for shard in shards if shard in lost]
    if gone:
        return [{"shard": s, "worker": worker, "error": lost.get(s)} for s in shards]
    try:
        async with (
            asyncio.timeout(_HOST_SECONDS),
            connection(worker, _HOST_SECONDS) as host,
        ):
            reply = await host.daskps_control(method="stats", store=meta.uid)
        rows: list[dict[str, Any]] = unpack_reply(reply, f"worker {worker}")
    except (OSError, DaskPSError) as error:
        text = str(error) or f"no answer within {_HOST_SECONDS:g} s"
        return [{"shard": s, "worker": worker, "error": text} for s in shards]
    return rows
