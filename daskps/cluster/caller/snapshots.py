"""Snapshots: the cut, which hosts keep until it is dropped, and futures for the copies."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import Reschedule

from daskps.cluster import upstream
from daskps.cluster.caller.link import task_link
from daskps.cluster.host.node import HOSTS
from daskps.cluster.host.snapshot_copies import CopyGroup, groups_of
from daskps.cluster.keys import copy_key, group_key
from daskps.errors import SnapshotLostError
from daskps.layout.chunks import chunks_of, chunks_of_table, shards_of, unbounded_tables
from daskps.layout.spans import IDS
from daskps.version import Version

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distributed import Client, Future

    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.link import Link
    from daskps.cluster.protocol.deadline import Deadline
    from daskps.layout.arrays import Layout
    from daskps.layout.chunks import Chunk
    from daskps.typing import Array


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
    #: By shard; the shards of one host share a future.
    futures: Mapping[int, Future[CopyGroup]]
    #: Numbers of rows of unbounded tables, by index and shard.
    n_rows: Mapping[int, Mapping[int, int]] = field(default_factory=dict)

    @property
    def groups(self) -> list[Future[CopyGroup]]:
        """The futures, each once."""
        return list({future.key: future for future in self.futures.values()}.values())

    @property
    def client(self) -> Client | None:
        """The client the copies belong to, None where there are none."""
        for future in self.futures.values():
            client: Client = future.client
            return client
        return None


async def take_snapshot(
    shards: ShardClient, index: int | None, deadline: Deadline
) -> Taken:
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
        Copies that contain the same steps of every producer.

    Raises
    ------
    ShardLostError, StoreClosedError, TimeoutError
        As their names say.
    """
    link, meta, cut = shards.link, shards.meta, uuid.uuid4().hex
    if not shards_of(meta.layout, index):
        return Taken(meta.uid, meta.name, meta.layout, meta.owners, Version.of(()), {})
    try:
        found = await take_cut(shards, cut, index=index, deadline=deadline)
        sizes = {shard: nbytes for shard, _, nbytes, *_ in found["versions"]}
        rows = {shard: n for shard, _, _, *n in found["versions"]}
        version = Version.of((shard, v) for shard, v, *_ in found["versions"])
        futures = _submit(shards, index, version, sizes)
        of = meta.uid, meta.name, meta.layout, meta.owners, version
        taken = Taken(*of, futures, _by_table(meta.layout, index, rows))
        # These tasks may have to wait, too: for a thread of a busy worker.
        took = partial(upstream.computed, *taken.groups)
        await link.within(took, deadline.remaining(), deadline.what)
    finally:
        await drop_cut(shards, cut)
    return taken


def _by_table(
    layout: Layout, index: int | None, rows: Mapping[int, Sequence[int]]
) -> dict[int, dict[int, int]]:
    """Return by table the numbers of rows that shards report."""
    tables = enumerate(unbounded_tables(layout, index))
    return {t.index: {shard: n[i] for shard, n in rows.items()} for i, t in tables}


def _submit(
    shards: ShardClient,
    index: int | None,
    version: Version,
    sizes: Mapping[int, int],
) -> dict[int, Future[CopyGroup]]:
    """Have each owner take its copies over into Dask's own memory."""
    meta, client = shards.meta, shards.link.client
    versions = dict(version.pairs)
    futures: dict[int, Future[CopyGroup]] = {}

    def key_of(shard: int) -> str:
        return copy_key(meta.uid, index, shard, versions[shard])

    for owner, group in groups_of(sizes, meta.owners):
        pairs = [(shard, versions[shard]) for shard in group]
        future = client.submit(
            _take_copies,
            [(shard, key_of(shard)) for shard in group],
            meta.name,
            owner,
            key=group_key(meta.uid, index, pairs),
            workers=[owner],
            allow_other_workers=True,
            pure=False,
        )
        futures |= dict.fromkeys(group, future)
    return futures


def _take_copies(keys: Sequence[tuple[int, str]], store: str, owner: str) -> CopyGroup:
    """Take copies from the host of this worker: the task behind a snapshot's shards.

    Raises
    ------
    SnapshotLostError
        Where the owner is gone, and wherever it runs a second time.
    Reschedule
        On any other worker: an idle one steals from one that is busy.
    """
    link, found = task_link(), {}
    host = HOSTS.get(link.node.address)
    for shard, key in keys:
        copy = None if host is None else host.snapshots.find(key)
        if copy is None:
            ask = partial(_has, link, owner, key)
            if link.node.address != owner and link.run(ask):
                raise Reschedule
            raise SnapshotLostError(store, shard, owner, "no longer has the copy")
        found[shard] = copy
    return CopyGroup(found)


async def _has(link: Link, owner: str, key: str) -> bool:
    """Return whether a worker has a copy."""
    # First: Dask would try for half a minute to reach one that is gone.
    if not await link.node.scheduler.ncores(workers=[owner]):
        return False
    try:
        found: bool = await link.control(owner, "has_copy", key=key)
    except OSError:
        return False
    return found


async def values(taken: Taken, *, tables: bool = False) -> dict[str, Any]:
    """Return the parameters of a snapshot of a whole store, on the event loop.

    With `tables` also all rows of the tables that were copied: of an unbounded table as
    a pair of ids and rows.
    """
    layout = taken.layout
    client, futures = taken.client, taken.groups
    copies = [] if client is None else await upstream.results(client, futures)
    by_key = {f.key: copy for f, copy in zip(futures, copies, strict=True)}
    groups = {shard: by_key[future.key] for shard, future in taken.futures.items()}

    def joined(chunks: Sequence[Chunk], dtype: str, *shape: int) -> Array:
        parts = [part for chunk in chunks for part in chunk.parts]
        found = [groups[shard].get(shard, span) for shard, span in parts]
        whole = np.concatenate(found) if found else np.empty(0, dtype)
        return whole.reshape(shape)

    found: dict[str, Any] = {
        p.name: joined(chunks_of(layout, p), p.dtype, *p.shape)
        for p in layout.parameters
    }
    for table in layout.tables if tables else ():
        n_rows = taken.n_rows.get(table.index)
        rows = chunks_of_table(layout, table, n_rows)
        found[table.name] = joined(rows, table.dtype, -1, table.dim)
        if n_rows is not None:
            ids = joined(chunks_of_table(layout, table, n_rows, IDS), "int64", -1)
            found[table.name] = ids, found[table.name]
    return found


#: How much longer than asked for the directory may take to say that it timed out.
_MARGIN_SECONDS = 1.0


async def take_cut(
    shards: ShardClient,
    cut: str,
    *,
    deadline: Deadline,
    method: str = "cut",
    **about: Any,
) -> Mapping[str, Any]:
    """Have all hosts copy their shards at one moment.

    The caller ends it by :func:`drop_cut` in any case.

    Parameters
    ----------
    shards : ShardClient
        The store.
    cut : str
        A name that no other cut has.
    deadline : Deadline
        When to give up.
    method : str
        The message to the directory: "cut", or "reshard".
    **about : object
        More of it: the `index` of the part of the shards to copy, see
        :mod:`daskps.layout.chunks`; or the servers of a reshard.

    Returns
    -------
    mapping
        "where" the shards are, and "versions": shard, version and numbers of rows.

    Raises
    ------
    ConsistencyError, ShardLostError, StoreClosedError, TimeoutError
        As their names say; no shard is held any more.
    """
    link, meta, seconds = shards.link, shards.meta, deadline.remaining()
    of = {"uid": meta.uid, "owner": link.owner, "seconds": seconds, "cut": cut}
    ask = partial(link.directory, method, **of, **about)
    margin = None if seconds is None else seconds + _MARGIN_SECONDS
    found: Mapping[str, Any] = await link.within(ask, margin, deadline.what)
    if "waited_for" in found:
        raise deadline.error(
            f"it waited for {found['waited_for']}; no shard is held", changes=False
        )
    meta.update(found["where"])
    return found


async def drop_cut(shards: ShardClient, cut: str, **wrote: Any) -> None:
    """Have the hosts free the copies of a cut, also where it was cancelled half-way.

    What a save `wrote` of it travels along: another message might come later.
    """
    link = shards.link
    # The directory forgets the cuts of a client that left by itself.
    if link.live:
        await link.wind_up(link.over("drop_cut", cut=cut, **wrote))
