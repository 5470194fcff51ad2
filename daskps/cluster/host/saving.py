"""A host's part in a checkpoint: it writes the chunks that begin in its shards.

It writes from the copies of a cut, in threads of its own. If a chunk ends in shards of
other hosts, it fetches those elements from them; they keep their copies until then.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from daskps.checkpoint.arrays import Counts, stored_arrays
from daskps.checkpoint.digests import digest
from daskps.checkpoint.plan import StoredChunk, chunks_written
from daskps.checkpoint.storage import Storage, full_url
from daskps.cluster.keys import saved_key
from daskps.cluster.protocol.deadline import gather
from daskps.cluster.protocol.handlers import HOST
from daskps.cluster.protocol.packing import pack_array, unpack_array, unpack_options
from daskps.errors import ConsistencyError, ProtocolError, SnapshotLostError
from daskps.kernels.id_hash import hashes
from daskps.layout.chunks import WHOLE, unbounded_tables
from daskps.layout.slots import with_marks
from daskps.layout.spans import CANDIDATES, IDS, Span
from daskps.shards.frozen import HeldShard
from daskps.shards.producers import joined

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from daskps.checkpoint.arrays import Slots
    from daskps.cluster.host.host import ShardHost
    from daskps.layout.arrays import Layout
    from daskps.shards.frozen import FrozenShard
    from daskps.typing import Array

#: Of a shard in a cut: the host of its copy, its version, and the numbers of rows and
#: of candidates of its unbounded tables.
CopyWords: TypeAlias = tuple[str, int, Sequence[int], Sequence[int]]
#: Chunks that a host writes at the same time from copies; the other number is for held
#: shards, whose chunks are copied. With eight, pushes on two cores waited half as long
#: again.
_IN_FLIGHT = 4
_IN_FLIGHT_HELD = 2
#: Areas of ids, in the order of their hashes.
_WITH_IDS = IDS, CANDIDATES


class ThreadFiles(threading.local):
    """Files of a checkpoint, for several threads: these must share no file system.

    Parameters
    ----------
    url, options
        As of :class:`~daskps.checkpoint.storage.Storage`.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        # Called in each thread that uses the object.
        self._at = url, options
        #: Memory that a thread reads into.
        self.room = np.empty(0, np.uint8)

    @cached_property
    def storage(self) -> Storage:
        """The storage of this thread."""
        return Storage(*self._at)


@dataclass(eq=False, slots=True)
class FrozenShards:
    """All shards of a store as a cut has them, read by one host."""

    host: ShardHost
    store: str
    #: For all shards: the host of the copy, and its key.
    owners: Sequence[str]
    keys: Sequence[str]
    #: Copies on this host.
    copies: Mapping[int, FrozenShard]

    @classmethod
    def of(
        cls, host: ShardHost, name: str, cut: str, copies: Sequence[CopyWords]
    ) -> FrozenShards:
        """Return the shards of a cut, of a store of this name, for one of its hosts.

        Raises
        ------
        SnapshotLostError
            If a copy that was made here is gone.
        """
        owners, mine = [owner for owner, *_ in copies], dict[int, "FrozenShard"]()
        keys = [saved_key(cut, shard, of[1]) for shard, of in enumerate(copies)]
        for shard in [i for i, w in enumerate(owners) if w == host.worker.address]:
            if (copy := host.snapshots.find(keys[shard])) is None:
                why = "no longer has the copy"
                raise SnapshotLostError(name, shard, owners[shard], why)
            mine[shard] = copy
        return cls(host, name, owners, keys, mine)

    async def fetch(self, chunk: StoredChunk) -> dict[tuple[int, Span], Array]:
        """Return the elements of a chunk that shards of other hosts have."""
        wanted: dict[str, list[tuple[int, Span]]] = {}
        for shard, span in chunk.parts:
            if shard not in self.copies:
                wanted.setdefault(self.owners[shard], []).append((shard, span))
        found: dict[tuple[int, Span], Array] = {}
        for owner, parts in wanted.items():
            asked = [(self.keys[shard], tuple(span)) for shard, span in parts]
            packed = await self._ask(owner, asked, parts[0][0])
            arrays = [unpack_array(one, chunk.dtype) for one in packed]
            found |= dict(zip(parts, arrays, strict=True))
        return found

    async def _ask(self, owner: str, wanted: Sequence[Any], shard: int) -> list[Any]:
        try:
            found: list[Any] = await self.host.worker.ask(owner, "edges", wanted=wanted)
        except OSError as error:
            why = f"died or cannot be reached ({error})"
            raise SnapshotLostError(self.store, shard, owner, why) from error
        return found

    def values(
        self, chunk: StoredChunk, remote: Mapping[tuple[int, Span], Array]
    ) -> list[Array]:
        """Return the parts of a chunk, those of other hosts among what was fetched."""
        return [
            self.copies[shard].get(span)
            if shard in self.copies
            else remote[shard, span]
            for shard, span in chunk.parts
        ]


@dataclass(eq=False, slots=True)
class _Writing:
    """The chunks that one message makes a host write."""

    layout: Layout
    shards: FrozenShards
    to: ThreadFiles
    chunks: Iterator[StoredChunk]
    files: list[tuple[str, int, str]] = field(default_factory=list)
    #: The hash of the first id of each chunk of ids, by path.
    begins: list[tuple[str, int]] = field(default_factory=list)

    async def write_all(self, pool: ThreadPoolExecutor) -> None:
        """Write one chunk after the other; several of these tasks share the chunks."""
        loop = asyncio.get_running_loop()
        for chunk in self.chunks:
            remote = await self.shards.fetch(chunk)
            file = await loop.run_in_executor(pool, self._write, chunk, remote)
            self.files.append(file)

    def _write(
        self, chunk: StoredChunk, remote: Mapping[tuple[int, Span], Array]
    ) -> tuple[str, int, str]:
        """Write a chunk, in a thread that may wait; return its description."""
        values = self.shards.values(chunk, remote)
        if chunk.parts[0][1].area in _WITH_IDS:
            self.begins.append((chunk.path, self._hash_of(chunk, values[0][:1])))
        if len(values) == 1 and not chunk.pad:
            content = np.ascontiguousarray(values[0])
        else:
            pad = np.zeros(chunk.pad, chunk.dtype)
            content = np.concatenate([*values, pad])
        data = content.view(np.uint8).data
        self.to.storage.write(chunk.path, data)
        return chunk.path, data.nbytes, digest(data)

    def describe(self) -> None:
        """Say where chunks of ids would begin: whoever reads them asks the shards."""
        for chunk in self.chunks:
            shard, span = chunk.parts[0]
            if span.area in _WITH_IDS:
                first = self.shards.copies[shard].get(
                    span._replace(stop=span.start + 1)
                )
                self.begins.append((chunk.path, self._hash_of(chunk, first)))

    def sync_names(self) -> None:
        """Sync the names of all written files to the disk."""
        if self.files:
            self.to.storage.sync_names(path for path, *_ in self.files)

    def _hash_of(self, chunk: StoredChunk, first: Array) -> int:
        shard, span = chunk.parts[0]
        n = span.position - len(self.layout.pieces[shard])
        table: Any = self.layout.tables[n]
        return int(hashes(first, table.hash_seed)[0])


@HOST.handles("write_checkpoint")
async def _write_checkpoint(
    host: ShardHost,
    *,
    store: str,
    cut: str,
    where: tuple[str, str] | None,
    slots: Sequence[tuple[int, Sequence[float], Sequence[int]]],
    copies: Sequence[CopyWords],
) -> dict[str, Any]:
    """Write the chunks whose first element one of the shards here has copied.

    `where` are the URL of the folder, and options as JSON, None for a description of
    all but the files, and of what the shards know of pushes; `slots` first values by
    index and the marked ones among them; `copies` for each shard its host, its version,
    and the number of rows and candidates of each unbounded table. Returns the files,
    the hashes at which chunks of ids begin, the counters of each shard, and whether the
    shards were held.
    """
    if (known := host.snapshots.stores.get(store)) is None:
        raise ConsistencyError(f"worker {host.worker.address} has no part in cut {cut}")
    name, layout = known
    shards = FrozenShards.of(host, name, cut, copies)
    counted = []
    for shard, copy in shards.copies.items():
        if copy.counted is None:
            raise ConsistencyError(f"the copy of shard {shard} is none of everything")
        counted.append(astuple(copy.counted))
    first = {index: with_marks(values, of) for index, values, of in slots}

    def plan() -> list[StoredChunk]:
        every = planned(layout, first, copies)
        return [chunk for chunk in every if chunk.home in shards.copies]

    url, options = where or ("", "{}")
    chunks = iter(await host.in_thread(plan))
    claim = host.snapshots.claim(store, cut)
    in_flight = _IN_FLIGHT_HELD if claim.holds else _IN_FLIGHT
    pool = ThreadPoolExecutor(in_flight, thread_name_prefix="daskps-save")
    work = _Writing(layout, shards, ThreadFiles(url, unpack_options(options)), chunks)
    last = work.describe
    try:
        if where is not None:
            writing = gather(*(work.write_all(pool) for _ in range(in_flight)))
            claim.writing = asyncio.ensure_future(writing)
            await claim.writing
            # Before this host reports the files: the manifest is written after that.
            last = work.sync_names
        await asyncio.get_running_loop().run_in_executor(pool, last)
    except asyncio.CancelledError:
        if not host.snapshots.is_over(cut):
            raise
        raise ConsistencyError(
            f"a save of store {name} was given up; nothing of it counts"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return {
        "holds": claim.holds,
        "files": work.files,
        "begins": work.begins,
        "applied": joined(
            copy.applied
            for copy in shards.copies.values()
            if isinstance(copy, HeldShard)
        ),
        "counted": counted,
    }


def planned(
    layout: Layout, slots: Slots, copies: Sequence[CopyWords]
) -> Iterator[StoredChunk]:
    """Give the chunks of a checkpoint of a cut, with the place of their elements."""
    rows, candidates = [of for *_, of, _ in copies], [of for *_, of in copies]
    counts = Counts.by_shard(unbounded_tables(layout, WHOLE), rows, candidates)
    return chunks_written(layout, stored_arrays(layout, slots, counts), counts)


@HOST.handles("edges")
async def _edges(
    host: ShardHost, wanted: Sequence[tuple[str, tuple[str, int, int, int]]]
) -> list[Any]:
    """Return elements of copies; each request has the key of a copy and a span.

    Raises
    ------
    ConsistencyError
        If a copy, or the requested span of it, is not here.
    ProtocolError
        If more elements are requested than all copies have: some come twice.
    """
    found, copies = list[Any](), {}

    def read() -> None:
        for key, span in wanted:
            copy = host.snapshots.find(key)
            if copy is None:
                raise ConsistencyError(
                    f"worker {host.worker.address} no longer has copy {key}"
                )
            copies[key] = copy
            try:
                found.append(copy.get(Span(*span)))
            except LookupError as error:
                raise ConsistencyError(f"copy {key} has no {span}") from error

    await host.in_thread(read)
    asked = sum(values.nbytes for values in found)
    if asked > sum(copy.nbytes for copy in copies.values()):
        raise ProtocolError(
            f"{len(found)} edges with {asked:,} bytes, some of it twice"
        )
    return [pack_array(array) for array in found]


@HOST.handles("has_copy")
async def _has_copy(host: ShardHost, key: str) -> bool:
    """Return whether this host has the copy of a key."""
    return host.snapshots.find(key) is not None


@HOST.handles("sees_file")
async def _sees_file(
    host: ShardHost, store: str, where: tuple[str, str], path: str
) -> bool:
    """Return whether this host sees a file that another process has written.

    `where` are a URL and options, as of :func:`write_checkpoint`; a caller is making
    `store`.
    """
    url, options = where
    at = full_url(url), unpack_options(options)
    return await host.in_thread(lambda: Storage(*at).has(path))
