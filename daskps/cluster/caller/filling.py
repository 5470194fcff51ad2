"""Loads of a checkpoint into a store that nobody has pushed to yet.

A restore makes a store; here the handle of the store is there already.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from daskps.checkpoint import listing
from daskps.checkpoint.digests import check_content, digest
from daskps.checkpoint.manifest import MANIFEST
from daskps.checkpoint.storage import Storage
from daskps.checkpoint.texts import from_bytes
from daskps.cluster.caller.far import gather
from daskps.cluster.host.rules import Rules
from daskps.cluster.wire.options import pack_options
from daskps.errors import CheckpointError
from daskps.layout.slots import marked

if TYPE_CHECKING:
    from daskps.checkpoint.arrays import Slots
    from daskps.checkpoint.manifest import Manifest
    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.saving import CheckpointTarget
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.layout.arrays import Layout

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


async def fill(
    shards: ShardClient, target: CheckpointTarget, folder: str, described: str
) -> None:
    """Load a checkpoint into all shards of a store, which goes on in its lineage.

    Parameters
    ----------
    shards : ShardClient
        The store, at version 0.
    target : CheckpointTarget
        Where its checkpoints are.
    folder : str
        The one to load.
    described : str
        A description of the run that has trained it, for the directory.

    Raises
    ------
    CheckpointError
        If a file is missing or damaged, or if the store has other parameters or other
        optimizers; nothing was loaded then.
    """
    link, meta = shards.link, shards.meta
    sealed, manifest = await asyncio.to_thread(_verified, meta, target, folder)
    where = target.folder(folder), pack_options(target.options)
    about = {"store": meta.uid, "where": where, "manifest": sealed}
    await gather(*(link.control(worker, "install", **about) for worker in meta.hosts))
    lineage = manifest.lineage
    told = {"described": described, "lineage": lineage}
    await link.directory("trained_by", uid=meta.uid, **told)
    meta.lineage = lineage


def _shapes(layout: Layout) -> list[Any]:
    """Return the shapes of parameters and tables; the owners compare all of them."""
    arrays = [(p.name, p.shape, p.dtype) for p in layout.parameters]
    return [*arrays, *((t.name, t.rows, t.dim, t.dtype) for t in layout.tables)]


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
    slots = _told(Rules(meta.layout, meta.rules).slots)
    for what, differs in (
        ("parameters", _shapes(manifest.layout(1)) != _shapes(meta.layout)),
        ("optimizers", _told(manifest.slots) != slots),
    ):
        if differs:
            raise CheckpointError(
                f"checkpoint {folder} was saved of a store with other {what} than "
                f"{meta.name!r} has; make the store as it was, or save to another URL",
                MANIFEST,
            )


def _verified(
    meta: StoreMap, target: CheckpointTarget, folder: str
) -> tuple[str, Manifest]:
    """Read all of a checkpoint once: nothing undoes a load that ends half-way."""
    storage = Storage(target.folder(folder), target.options)
    content = storage.read(MANIFEST)
    manifest = from_bytes(content, folder)
    check_fits(meta, manifest, folder)
    for file in manifest.files:
        check_content(storage.read(file.path), file, manifest.parameter_of(file.path))
    return digest(content), manifest
