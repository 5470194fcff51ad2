"""A host's part in a new store: its loops are loaded; a restore fills its shards.

The host reads each file once, whole, and checks its digest, whichever part of it is
needed; no caller has seen the shards by then.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from daskps.checkpoint.digests import digest
from daskps.checkpoint.manifest import MANIFEST
from daskps.checkpoint.plan import (
    ChunkRead,
    chunks_read,
    hash_range,
    rows_local,
    rows_read,
)
from daskps.checkpoint.reading import read_file
from daskps.checkpoint.selection import Selection
from daskps.checkpoint.texts import from_bytes
from daskps.checkpoint.zarr import node_paths
from daskps.cluster.host.rules import Rules
from daskps.cluster.host.saving import (
    CopyWords,
    FrozenShards,
    ThreadFiles,
    planned,
)
from daskps.cluster.protocol.deadline import gather
from daskps.cluster.protocol.handlers import HOST
from daskps.cluster.protocol.packing import unpack_options
from daskps.cluster.protocol.wellformed import layout_of
from daskps.cluster.upstream import loads
from daskps.epochs import Epochs
from daskps.errors import (
    CheckpointError,
    DaskPSError,
    LayoutError,
    ProtocolError,
    StoreClosedError,
)
from daskps.kernels.id_hash import hashes
from daskps.layout.spans import CANDIDATES, COUNTS, IDS, Span
from daskps.layout.tables import UnboundedTable
from daskps.shards.installation import Counted, Installation
from daskps.shards.producers import KnownPushes, take_over

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from daskps.checkpoint.arrays import StoredArray
    from daskps.checkpoint.manifest import Manifest
    from daskps.checkpoint.plan import ChunkPart, StoredChunk
    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.host.hosted import HostedShard
    from daskps.typing import Array


#: A cut, its copies, the layout that they have, and what they know of pushes.
FrozenWords: TypeAlias = tuple[
    str, Sequence[CopyWords], Mapping[str, Any], tuple[Any, Any, int]
]
#: Files that a host reads at the same time.
_IN_FLIGHT = 2
#: Areas of unbounded tables that define which rows exist.
_WHICH = (IDS, CANDIDATES, COUNTS)


@dataclass(eq=False)
class _Installing:
    """The new shards of one host, and the checkpoint that they are filled from."""

    files: ThreadFiles
    #: The digest of the manifest when the caller read it, or all of it.
    sealed: Any
    hosted: Mapping[int, HostedShard]
    taken: Sequence[tuple[int, str, str, bool]] | None
    manifest: Manifest = field(init=False)
    selection: Selection = field(init=False)
    into: Mapping[int, Installation] = field(init=False)
    #: For each file the shards that need it, and their parts of it.
    jobs: Iterator[tuple[ChunkRead, list[tuple[int, ChunkPart]]]] = field(init=False)

    def read_manifest(self) -> Manifest:
        """Return the manifest, which must be the one that the caller has read.

        Raises
        ------
        CheckpointError
            If it is another one, or missing.
        """
        content = self.files.storage.read(MANIFEST)
        if digest(content) != self.sealed:
            raise CheckpointError(
                f"{MANIFEST} is another one here than where the restore was asked for; "
                f"this URL is not shared, or the checkpoint was replaced meanwhile",
                MANIFEST,
            )
        return from_bytes(content)

    def content(self, read: ChunkRead) -> Array:
        """Return the elements of a file, after a check of its digest.

        They are in memory that this thread's next file overwrites.
        """
        files, file = self.files, self.manifest.file_at[read.path]
        if files.room.nbytes < file.nbytes:
            files.room = np.empty(file.nbytes, np.uint8)
        room = files.room[: file.nbytes]
        content = read_file(files.storage, self.manifest, file, room)
        return np.frombuffer(content, read.dtype)

    def values(self, read: ChunkRead, parts: Sequence[ChunkPart]) -> list[Array]:
        """Return elements of a file, all of which is read."""
        content = self.content(read)
        return [content[part.start : part.stop] for part in parts]

    def begin(self) -> None:
        """Give rows to ids, and list the remaining files to read."""
        self.manifest = self.read_manifest()
        layout = next(iter(self.hosted.values())).layout
        self.selection = Selection(self.manifest, self.taken, layout)
        self.into = {
            shard: Installation(hosted.shard.segment)
            for shard, hosted in self.hosted.items()
        }
        wanted: dict[str, list[tuple[int, ChunkPart]]] = defaultdict(list)
        reads: dict[str, ChunkRead] = {}
        nodes = sorted(node_paths(self.selection.arrays)) if self.manifest.files else []
        for shard, hosted in self.hosted.items():
            layout, arrays = hosted.layout, self.selection.arrays
            # No store needs these files, but a damaged one damages the checkpoint.
            for path in nodes[shard :: layout.n_shards]:
                nbytes = self.manifest.file_at[path].nbytes
                reads[path] = ChunkRead(path, nbytes, "u1", ())
                wanted[path] = []
            for read in chunks_read(layout, arrays, shard):
                reads[read.path] = read
                wanted[read.path] += [(shard, part) for part in read.parts]
            for table in layout.tables:
                if (
                    isinstance(table, UnboundedTable)
                    and table.index in self.selection.members
                ):
                    for read in self._begin_table(shard, table):
                        reads[read.path] = read
                        wanted[read.path] += [(shard, part) for part in read.parts]
        self.jobs = iter([(reads[path], parts) for path, parts in wanted.items()])

    def _begin_table(self, shard: int, table: UnboundedTable) -> Iterator[ChunkRead]:
        """Give rows to the ids of a shard; yield the remaining reads of these rows."""
        position = self.hosted[shard].layout.table_position(shard, table.index)
        of: Any = self.selection.members[table.index]
        every = self.selection.arrays
        arrays = {a.area: a for a in every if a.members[0].index == table.index}
        at, ids = self._own(shard, table, arrays[IDS], of.begins)
        candidates = np.empty((2, 0), np.int64)
        if CANDIDATES in arrays:
            begins = of.candidate_begins
            own, counted = self._own(shard, table, arrays[CANDIDATES], begins)
            end = own + len(counted)
            counts = self._rows(rows_read(arrays[COUNTS], position, own, end))
            candidates = np.array([counted, counts])
        self.into[shard].begin_table(position, ids, candidates)
        for area, array in arrays.items():
            if area not in _WHICH:
                yield from rows_read(array, position, at, at + len(ids))

    def _own(
        self, shard: int, table: UnboundedTable, array: StoredArray, begins: Any
    ) -> tuple[int, Array]:
        """Return the ids of an array that are a shard's, and the place of the first."""
        n_shards = self.hosted[shard].layout.n_shards
        low, high = hash_range(table, n_shards, shard)
        start, stop = rows_local(array, begins, low, high)
        local = self._rows(rows_read(array, 0, start, stop))
        if not len(local):
            return start, local
        found = hashes(local, table.hash_seed)
        first = int(np.searchsorted(found, np.uint64(low)))
        end = int(np.searchsorted(found, np.uint64(high - 1), "right"))
        return start + first, local[first:end]

    def _rows(self, reads: Iterable[ChunkRead]) -> Array:
        parts = [np.empty(0, np.int64)]
        for read in reads:
            parts += map(np.array, self.values(read, read.parts))
        return np.concatenate(parts)

    def put(self, read: ChunkRead, wanted: Sequence[tuple[int, ChunkPart]]) -> None:
        """Read a file, and write the needed parts of it to their shards."""
        every = self.values(read, [part for _, part in wanted])
        for (shard, part), values in zip(wanted, every, strict=True):
            self.into[shard].put(part.span, values)

    def count(self) -> None:
        """Set the counters of the shards to their saved values."""
        of, every = self.manifest, self.selection.members
        tables = self.selection.tables
        counted = Counted(
            version=of.version,
            steps={i: one.steps for i, one in every.items()},
            clocks=[table.clock if table else 0 for table in tables],
            came=[(0, 0)] * len(tables),
            epochs=Epochs(*(of.epochs if self.taken is None else ())),
            factors={i: one.lr_factor for i, one in every.items()},
        )
        for shard, hosted in self.hosted.items():
            mine = counted
            if shard == 0:
                # These count for all shards of a table together.
                came = [(t.admitted, t.evicted) if t else (0, 0) for t in tables]
                mine = replace(counted, came=came)
            mine.put(hosted.shard.segment)


@dataclass(eq=False)
class _Relaying(_Installing):
    """The same from shards that a cut holds, as they were laid out before."""

    frozen: FrozenShards
    layout: Mapping[str, Any]
    copies: Sequence[CopyWords]
    applied: KnownPushes
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    #: By path of a file that a checkpoint would have.
    chunks: Mapping[str, StoredChunk] = field(init=False)

    def read_manifest(self) -> Manifest:
        """Return what a checkpoint would say."""
        manifest: Manifest = loads(self.sealed)
        every = planned(layout_of(self.layout), manifest.slots, self.copies)
        self.chunks = {chunk.path: chunk for chunk in every}
        return manifest

    def values(self, read: ChunkRead, parts: Sequence[ChunkPart]) -> list[Array]:
        """Return elements that such a file would have, of whichever shards have them."""
        whole = self.chunks[read.path]
        ends = [*accumulate(span.stop - span.start for _, span in whole.parts)]
        pieces = [[*_within(whole, ends, part)] for part in parts]
        chunk = whole._replace(parts=tuple(piece for of in pieces for piece in of))
        asked = asyncio.run_coroutine_threadsafe(self.frozen.fetch(chunk), self.loop)
        found = iter(self.frozen.values(chunk, asked.result()))
        return [np.concatenate([next(found) for _ in of]) for of in pieces]

    def count(self) -> None:
        """Set the counters, and have the shards know what was pushed."""
        super().count()
        for hosted in self.hosted.values():
            take_over(hosted.shard.segment.current, self.applied)


def _within(
    chunk: StoredChunk, ends: Sequence[int], part: ChunkPart
) -> Iterator[tuple[int, Span]]:
    """Give the parts of a chunk, which end at `ends`, that have some elements of it."""
    at = part.start
    for i in range(bisect_right(ends, at), len(ends)):
        shard, span = chunk.parts[i]
        stop, before = min(part.stop, ends[i]), span.stop - ends[i]
        yield shard, span._replace(start=at + before, stop=stop + before)
        if (at := stop) == part.stop:
            break


@HOST.handles("install")
async def _install(
    host: ShardHost,
    *,
    store: str,
    where: tuple[str, str],
    manifest: str | bytes,
    taken: Sequence[tuple[int, str, str, bool]] | None,
    frozen: FrozenWords | None,
) -> None:
    """Fill the shards here of a store, before any caller sees it, from a checkpoint.

    `where` are the URL of its folder, and options as JSON; `manifest` is the digest of
    the file of that name; `taken` says what of it is read, None for all as it is. Or
    from the shards of a cut, which are `frozen`: then it is the manifest that they would
    have, pickled.
    """
    url, options = where
    hosted = {one.index: one for one in host.of(store)}
    for index, one in hosted.items():
        run = one.shard.run_state.run
        # A run that ended before its first round has changed nothing.
        if run or one.shard.segment.current.version:
            what = "is in a run" if run else "has been pushed to, or filled"
            raise ProtocolError(
                f"shard {index} of store {one.name!r} is to be filled from a checkpoint "
                f"and {what} already; restore to a new store"
            )
    loop = asyncio.get_running_loop()
    pool = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="daskps-restore")
    of = ThreadFiles(url, unpack_options(options)), manifest, hosted, taken
    made = _Installing(*of)
    if frozen is not None:
        cut, copies, layout, applied = frozen
        shards = FrozenShards.of(host, store, cut, copies)
        made = _Relaying(*of, shards, layout, copies, KnownPushes(*applied))

    async def read() -> None:
        for job in made.jobs:
            if store in host.dropped:
                raise StoreClosedError(f"store {store} was undone while it was filled")
            await loop.run_in_executor(pool, made.put, *job)

    try:
        await loop.run_in_executor(pool, made.begin)
        await gather(*(read() for _ in range(_IN_FLIGHT)))
        await _has_memory(hosted.values())
        made.count()
    except DaskPSError:
        raise
    except ValueError as error:
        raise CheckpointError(
            f"the checkpoint at its URL has what no store of daskps has: {error}; "
            f"nothing was loaded, restore another one",
            MANIFEST,
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


async def _has_memory(hosted_shards: Iterable[HostedShard]) -> None:
    """Wait until shards have all of their memory, before any caller can push."""
    taken = [one.has_memory for one in hosted_shards if one.has_memory is not None]
    if taken:
        await asyncio.wait(taken)
    # A new error: shards refer to the futures, whose errors would have frames that
    # refer to the shards, and keep their memory until such cycles are collected.
    said = [str(error) for of in taken if (error := of.exception()) is not None]
    if said:
        raise LayoutError(said[0])


#: Seconds between looks whether the worker is idle; idle looks in a row before the host
#: loads; and looks after which it loads anyway.
LOOK_SECONDS = 0.1
QUIET_LOOKS = 5
MOST_LOOKS = 50


@HOST.handles("warm")
async def warm(host: ShardHost, layout: Mapping[str, Any], rules: bytes) -> None:
    """Load the loops of a store in a thread, when the worker is idle.

    Not at once: the first tasks after a store was made, or a worker has come, would
    share the interpreter with it. And in a thread of its own: the host's threads serve
    calls of other stores meanwhile.
    """
    ready = partial(Rules(layout_of(layout), rules).warm, durable=True)
    await _when_quiet(host, ready)


async def _when_quiet(host: ShardHost, ready: Callable[[], object]) -> None:
    quiet = 0
    for _ in range(MOST_LOOKS):
        if quiet == QUIET_LOOKS:
            break
        await asyncio.sleep(LOOK_SECONDS)
        quiet = 0 if host.worker.is_busy() else quiet + 1
    thread = ThreadPoolExecutor(1, thread_name_prefix="daskps-warm")
    try:
        await asyncio.get_running_loop().run_in_executor(thread, ready)
    finally:
        thread.shutdown(wait=False)
