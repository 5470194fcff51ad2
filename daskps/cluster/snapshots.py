"""Taking a snapshot: the cut, then one Dask future for each shard's copy."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from distributed import get_worker

from daskps.cluster import upstream
from daskps.cluster.copies import ShardCopy, copy_key
from daskps.cluster.host import HOSTS
from daskps.errors import SnapshotLostError
from daskps.version import Version

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distributed import Client, Future

    from daskps.cluster.client import ShardClient
    from daskps.cluster.deadline import Deadline
    from daskps.cluster.messages import Array, Range
    from daskps.layout import Layout

#: How much longer than asked for the directory may take to say that it timed out.
MARGIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Taken:
    """Copies of some shards of a store, of one cut.

    The futures keep them alive; everything else is plain.
    """

    uid: str
    name: str
    layout: Layout
    owners: tuple[str, ...]
    version: Version
    futures: Mapping[int, Future[ShardCopy]]

    @property
    def client(self) -> Client | None:
        """The client the copies belong to, None where there are none."""
        for future in self.futures.values():
            client: Client = future.client
            return client
        return None


async def take(shards: ShardClient, index: int | None, deadline: Deadline) -> Taken:
    """Take a snapshot of a store, or of one of its parameters.

    Parameters
    ----------
    shards : ShardClient
        The store.
    index : int, optional
        The only parameter to copy; all by default.
    deadline : Deadline
        When to give up.

    Returns
    -------
    Taken
        Whose shards contain the same steps of every producer.

    Raises
    ------
    ShardLostError, StoreClosedError, TimeoutError
        For what its name says.
    """
    link, meta, cut = shards.link, shards.meta, uuid.uuid4().hex
    wanted = list(range(meta.layout.n_shards))
    if index is not None:
        wanted = [piece.shard for piece in meta.layout.pieces_of[index]]
    if not wanted:
        return Taken(meta.uid, meta.name, meta.layout, meta.owners, Version.of(()), {})
    seconds = deadline.remaining()
    try:
        asked = link.directory(
            "cut",
            uid=meta.uid,
            owner=link.owner,
            seconds=seconds,
            cut=cut,
            shards=wanted,
            index=index,
        )
        margin = None if seconds is None else seconds + MARGIN_SECONDS
        found = await link.within(asked, margin, deadline.what)
        if "waited_for" in found:
            raise TimeoutError(
                f"timed out after {seconds:g} s waiting for {deadline.what}, which "
                f"waited for {found['waited_for']}; no shard is held any more. Pass "
                f"a larger timeout=, or None to wait for ever"
            )
        meta.update(found["where"])
        version = Version.of((shard, v) for shard, v in found["versions"])
        futures = _submit(shards, index, version)
        # Also these may have to wait: for a thread of a busy worker.
        took = upstream.settled(list(futures.values()))
        await link.within(took, deadline.remaining(), deadline.what)
    finally:
        # Shielded: a snapshot that is cancelled must not leave its half behind.
        await asyncio.shield(_forget(shards, cut))
    return Taken(meta.uid, meta.name, meta.layout, meta.owners, version, futures)


async def _forget(shards: ShardClient, cut: str) -> None:
    if not shards.link.live:
        # The directory forgets the cuts of a client that left by itself.
        return
    # A scheduler that cannot be reached has gone, and the hosts with it.
    with contextlib.suppress(OSError):
        told = shards.link.directory("drop_cut", cut=cut)
        await asyncio.wait_for(told, MARGIN_SECONDS)


def _submit(
    shards: ShardClient, index: int | None, version: Version
) -> dict[int, Future[ShardCopy]]:
    """Have each owner take its copy over into Dask's own memory."""
    meta, client = shards.meta, shards.link.client
    futures = {}
    for shard, v in version.pairs:
        key, owner = copy_key(meta.uid, index, shard, v), meta.owners[shard]
        futures[shard] = client.submit(
            take_copy,
            key,
            meta.name,
            shard,
            owner,
            key=key,
            workers=[owner],
            allow_other_workers=True,
            pure=False,
        )
    return futures


def take_copy(key: str, name: str, shard: int, owner: str) -> ShardCopy:
    """Take a copy from the host of this worker: the task behind a snapshot's shard.

    Raises
    ------
    SnapshotLostError
        On any worker but the owner, and wherever it runs a second time.
    """
    host = HOSTS.get(get_worker().address)
    found = None if host is None else host.snapshots.find(key)
    if found is None:
        raise SnapshotLostError(name, shard, owner, "no longer has the copy")
    return found


def take_edge(copy: ShardCopy, span: Range) -> Array:
    """Take a few elements of a copy, for a neighbour whose row ends in this shard."""
    edge = copy.get(*span).copy()
    edge.flags.writeable = False
    return edge


def submit_edge(taken: Taken, shard: int, span: Range) -> Future[Array]:
    """Have the owner of a shard cut a few elements out of its copy."""
    future, owner = taken.futures[shard], taken.owners[shard]
    edge: Future[Array] = future.client.submit(
        take_edge,
        future,
        span,
        key=f"daskps-edge-{future.key}-" + "-".join(map(str, span)),
        workers=[owner],
        allow_other_workers=True,
        pure=False,
    )
    return edge


async def values(taken: Taken) -> dict[str, Array]:
    """Return the parameters of a snapshot of a whole store, on the event loop."""
    layout = taken.layout
    flats = {d: np.empty(n, d) for d, n in layout.lengths.items()}
    client = taken.client
    futures = list(taken.futures.values())
    copies = [] if client is None else await upstream.results(client, futures)
    for shard, copy in zip(taken.futures, copies, strict=True):
        for dtype, flat in flats.items():
            start, stop = layout.extent(shard, dtype)
            if stop > start:
                flat[start:stop] = copy.get(dtype, 0, stop - start)
    return {
        p.name: flats[p.dtype][p.offset : p.offset + p.size].reshape(p.shape)
        for p in layout.parameters
    }
