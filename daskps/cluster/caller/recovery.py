"""Checkpoints into stores: after the loss of a shard, and before the first push.

A restore, no roll back: that of one update is :mod:`daskps.shards.memory.undo`.

Stores that were made with a place to restore from are restored when they have lost a
shard. Each process that hears of the loss asks the directory, which gives one of them
the turn. That process makes the restored store, beside its other work; all of them wait
until the new store has the place of the lost one, and hear of the work lost with that.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from daskps import config
from daskps.checkpoint import listing
from daskps.checkpoint.reading import faults
from daskps.checkpoint.storage import Storage, shown
from daskps.cluster.caller import creation
from daskps.cluster.caller.creation import check_parameters, install, made_otherwise
from daskps.cluster.caller.shard_map import StoreMap
from daskps.cluster.host.rules import Rules
from daskps.cluster.protocol.packing import unpack_options
from daskps.errors import (
    DaskPSError,
    ShardLostError,
    StoreClosedError,
    StoreNotFoundError,
    StoreRestoredError,
)
from daskps.layout.slots import marked
from daskps.layout.tables import UnboundedTable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskps.checkpoint.arrays import Slots
    from daskps.checkpoint.listing import CheckpointTarget
    from daskps.checkpoint.manifest import Manifest
    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.link import Link
    from daskps.cluster.protocol.deadline import Deadline
    from daskps.layout.arrays import Layout
    from daskps.layout.tables import TableShape

logger = logging.getLogger(__name__)
#: How long the directory keeps a question until somebody has restored the store.
_ASK_SECONDS = 5.0
#: How often the process that restores a store says that it still does.
_SAY_SECONDS = 2.0
#: Number of tries of a restore during which workers die.
_MOST_TRIES = 5
#: How long a host may take to say the version of its shards.
_VERSION_SECONDS = 2.0


async def after_loss(
    link: Link, uid: str, error: DaskPSError, deadline: Deadline
) -> DaskPSError:
    """Have a store restored that has lost a shard; return the error to raise.

    Parameters
    ----------
    link : Link
        The way to the cluster.
    uid : str
        The store.
    error : DaskPSError
        The error that a call of the store has ended with.
    deadline : Deadline
        The deadline of the call.

    Returns
    -------
    DaskPSError
        A StoreRestoredError, once the store is restored, here or by another process; a
        ShardLostError that says why it could not be; else the error itself.

    Raises
    ------
    TimeoutError
        If the call's time is over before the store is restored, which goes on.
    """
    tried = 0
    while True:
        if deadline.is_over:
            raise deadline.error(
                "it has lost a shard and is restored from its last checkpoint, which goes "
                "on",
                changes=False,
            )
        left = deadline.remaining()
        wait = _ASK_SECONDS if left is None else min(_ASK_SECONDS, left / 2)
        about = {"uid": uid, "owner": link.owner, "wait_seconds": wait, "tried": tried}
        try:
            said = await link.directory("recover", **about)
        except StoreRestoredError as restored:
            return restored
        except (StoreClosedError, StoreNotFoundError) as gone:
            return gone
        except (DaskPSError, OSError) as why:
            logger.debug("store %s is not restored: %r", uid, why)
            return error
        if said["state"] == "whole":
            return error
        if said["state"] == "failed":
            return _not_restored(error, said["why"])
        tried = tried or said["token"]
        if said["state"] == "yours":
            link.keep(_take_turn(link, uid, said))


def known_to(error: StoreRestoredError, version: int) -> StoreRestoredError:
    """Return the error for a handle that has seen a version of the lost store."""
    lost = max(error.lost, version - error.version)
    args: tuple[Any, ...] = (*error.args[:-2], lost, error.uid)
    return StoreRestoredError(*args)


def _not_restored(error: DaskPSError, why: str) -> DaskPSError:
    if not isinstance(error, ShardLostError):
        return error
    reason = (
        f"{error.reason}; restoring the store from its last checkpoint failed: {why}"
    )
    return ShardLostError(error.store, error.shard, error.worker, reason)


async def _take_turn(link: Link, uid: str, turn: Mapping[str, Any]) -> None:
    """Restore a store, and say so as long as that takes; or say why that fails."""
    token = turn["token"]
    work = asyncio.ensure_future(_try_to_restore(link, uid, turn))
    saying = asyncio.ensure_future(_say_on(link, uid, token, work))
    try:
        await work
    except Exception as error:  # noqa: BLE001 - callers that wait for the turn hear it
        why = f"{type(error).__name__}: {error}"
        logger.info("daskps: a store was not restored: %s", why)
        await link.over("recovery_failed", uid=uid, token=token, why=why)
    finally:
        saying.cancel()


async def _say_on(link: Link, uid: str, token: int, work: asyncio.Future[None]) -> None:
    """Keep the turn; stop the work once another process has it."""
    while True:
        await asyncio.sleep(_SAY_SECONDS)
        try:
            await link.directory("recovering", uid=uid, token=token)
        except DaskPSError as error:
            logger.info("a store is no longer restored from here: %r", error)
            work.cancel()
            return
        except OSError:
            logger.debug("the scheduler does not answer")


async def _try_to_restore(link: Link, uid: str, turn: Mapping[str, Any]) -> None:
    """Restore a store; where one of its new owners dies meanwhile, on others."""
    for left in reversed(range(_MOST_TRIES)):
        try:
            await _restore(link, uid, turn)
        except ShardLostError as error:
            if not left:
                raise
            logger.info("a store is restored once more: %s", error)
        else:
            return


async def _restore(link: Link, uid: str, turn: Mapping[str, Any]) -> None:
    """Make the store that replaces a lost one, from its last checkpoint."""
    lost = StoreMap(turn["store"])
    url, packed = turn["where"]
    target = listing.CheckpointTarget(url, unpack_options(packed))
    found = await asyncio.to_thread(
        listing.find, target.url, target.options, lost.lineage
    )
    manifest = found.manifest
    await asyncio.to_thread(_check_fits, lost, manifest, shown(found.url))
    known = await _newest_version(link, uid, turn["hosts"])
    said = {
        "checkpoint": shown(found.url),
        "saved": int(manifest.time),
        "version": manifest.version,
        "lost": max(0, known - manifest.version),
    }
    where = {name: turn[name] for name in ("shards", "servers")}
    replaces = creation.Replaced(lost.uid, turn["token"], said)
    plan = replacing(lost, found, **where, replaces=replaces)
    seconds = config.deadline()
    if seconds is not None:
        seconds += manifest.nbytes / listing.SAVED_NBYTES_A_SECOND
    meta = await creation.create(link, plan, seconds)
    logger.info(
        "daskps: store %r was restored from %s, at version %d",
        *(meta.name, said["checkpoint"], manifest.version),
    )


def replacing(
    old: StoreMap, source: listing.FoundCheckpoint, **how: Any
) -> creation.Blueprint:
    """Return what a store is made of that is to replace another one, and `how`."""
    return creation.Blueprint(
        name=None,
        shapes={p.name: (p.shape, p.dtype) for p in old.layout.parameters},
        tables=_tables(old.layout),
        arrays={},
        collections={},
        initializers={},
        rules=Rules(old.layout, old.rules).by_index,
        seed=source.manifest.seed,
        overwrite=False,
        source=source,
        device=old.device,
        copies=old.copies,
        **how,
    )


def _tables(layout: Layout) -> dict[str, TableShape]:
    """Return the tables of a store as a new store takes them."""
    return {
        t.name: (0, t.dim, t.dtype, t.of)
        if isinstance(t, UnboundedTable)
        else (t.rows, t.dim, t.dtype)
        for t in layout.tables
    }


async def _newest_version(link: Link, uid: str, hosts: list[str]) -> int:
    """Return the largest version of the shards that live; 0 where none answers."""

    async def ask(worker: str) -> int:
        try:
            asked = link.control(worker, "versions", store=uid)
            rows = await asyncio.wait_for(asked, _VERSION_SECONDS)
        except (OSError, DaskPSError):
            return 0
        return max((version for _, version in rows), default=0)

    return max(await asyncio.gather(*map(ask, hosts)), default=0)


async def newest(
    shards: ShardClient, target: CheckpointTarget
) -> tuple[str, Manifest] | None:
    """Return folder and manifest of the last checkpoint of a store, if there is one.

    Parameters
    ----------
    shards : ShardClient
        The store, or another of its name: in a new cluster that is another one.
    target : CheckpointTarget
        Where its checkpoints are.
    """
    return await asyncio.to_thread(_newest, shards.meta, target)


def _newest(meta: StoreMap, target: CheckpointTarget) -> tuple[str, Manifest] | None:
    name = "" if meta.session else meta.name
    for entry in reversed(listing.entries(Storage(target.url, target.options))):
        of = entry.manifest
        if entry.is_unread and entry.error is not None:
            # It may be whole, and the newest.
            raise entry.error
        if of is None:
            # It may be another store's; an older one is never taken in silence.
            logger.warning(
                "daskps: a run goes on without a checkpoint: %s", entry.error
            )
        elif of.lineage == meta.lineage or of.store == name:
            return entry.folder, of
    return None


async def fill(shards: ShardClient, target: CheckpointTarget, folder: str) -> None:
    """Load a checkpoint into all shards of a store, which goes on in its lineage.

    Parameters
    ----------
    shards : ShardClient
        The store, at version 0.
    target : CheckpointTarget
        Where its checkpoints are.
    folder : str
        The one to load.

    Raises
    ------
    CheckpointError
        If a file is missing or damaged, or if the store has other parameters or other
        optimizers; nothing was loaded then.
    """
    meta = shards.meta
    source = await asyncio.to_thread(_verified, meta, target, folder)
    await install(shards.link, meta, source)
    meta.lineage = source.manifest.lineage


def _told(slots: Slots) -> dict[int, Any]:
    """Return first values, and which are marked: those are equal to plain ones."""
    return {index: (tuple(of), marked(of)) for index, of in slots.items()}


def _check_fits(meta: StoreMap, manifest: Manifest, folder: str) -> None:
    """Refuse a checkpoint of a store that was made otherwise.

    Raises
    ------
    CheckpointError
        The message says what differs.
    """
    check_parameters(meta, manifest, folder)
    if _told(manifest.slots) != _told(Rules(meta.layout, meta.rules).slots):
        raise made_otherwise(meta, folder, "optimizers")


def _verified(
    meta: StoreMap, target: CheckpointTarget, folder: str
) -> listing.FoundCheckpoint:
    """Read all of a checkpoint once: nothing undoes a load that ends half-way."""
    source = listing.find(target.folder(folder), target.options)
    _check_fits(meta, source.manifest, folder)
    for error in faults(Storage(source.url, source.options), source.manifest):
        raise error
    return source
