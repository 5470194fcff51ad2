"""Loads of a checkpoint into a store that nobody has pushed to yet.

A restore makes a store; here the handle of the store is there already.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from daskps.checkpoint import listing
from daskps.checkpoint.reading import faults
from daskps.checkpoint.storage import Storage
from daskps.cluster.caller.creation import (
    check_parameters,
    install,
    made_otherwise,
)
from daskps.cluster.host.rules import Rules
from daskps.layout.slots import marked

if TYPE_CHECKING:
    from daskps.checkpoint.arrays import Slots
    from daskps.checkpoint.listing import CheckpointTarget
    from daskps.checkpoint.manifest import Manifest
    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.shard_map import StoreMap

logger = logging.getLogger(__name__)


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


def check_fits(meta: StoreMap, manifest: Manifest, folder: str) -> None:
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
    check_fits(meta, source.manifest, folder)
    for error in faults(Storage(source.url, source.options), source.manifest):
        raise error
    return source
