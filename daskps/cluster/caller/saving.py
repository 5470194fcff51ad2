"""Writes of a checkpoint: the cut, the chunks by their owners, the manifest last.

Nothing counts before the manifest is there. This process writes it in one put once it
has seen every file itself: where it sees none, owners and it do not share the URL.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
import uuid
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from daskps.checkpoint import listing
from daskps.checkpoint.arrays import Counts, StoredArray, stored_arrays
from daskps.checkpoint.digests import StoredFile, digest
from daskps.checkpoint.manifest import MANIFEST, Manifest, StoredParameter, StoredTable
from daskps.checkpoint.rules import StoredRule
from daskps.checkpoint.storage import Storage
from daskps.checkpoint.texts import to_bytes
from daskps.checkpoint.zarr import nodes
from daskps.cluster.caller.snapshots import drop_cut, take_cut
from daskps.cluster.host.rules import Rules
from daskps.cluster.protocol.deadline import gather
from daskps.cluster.protocol.packing import pack_options
from daskps.errors import CheckpointError, SnapshotLostError
from daskps.layout.chunks import WHOLE, unbounded_tables
from daskps.layout.slots import marked
from daskps.layout.spans import CANDIDATES, IDS
from daskps.layout.tables import UnboundedTable
from daskps.shards.installation import Counted
from daskps.shards.producers import KnownPushes, joined
from daskps.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from daskps.checkpoint.listing import CheckpointTarget
    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.protocol.deadline import Deadline
    from daskps.epochs import Epochs
    from daskps.layout.arrays import Layout
    from daskps.layout.tables import Table

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class WholeCut:
    """Copies of all shards at one moment, kept by their hosts."""

    name: str
    #: By shard its host, its version, and the numbers of rows and of candidates of its
    #: unbounded tables.
    copies: Sequence[tuple[str, int, Sequence[int], Sequence[int]]]
    #: All that the directory has told, as the run that the store was in, or came after.
    told: Mapping[str, Any]

    def counts(self, tables: Sequence[Table]) -> Counts:
        """Return how many rows and candidates all shards have."""
        rows = [of for *_, of, _ in self.copies]
        return Counts.by_shard(tables, rows, [of for *_, of in self.copies])

    def nbytes(self, layout: Layout) -> int:
        """Return about how many bytes it has: values, and up to three slots."""
        tables = unbounded_tables(layout, None)
        counts = self.counts(tables)
        rows = sum(sum(counts.rows[t.index]) * t.row_nbytes for t in tables)
        return 4 * (layout.nbytes + rows)


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The state of training in a checkpoint, in plain values of JSON."""

    #: The progress of the run; by default the directory's of the last run.
    progress: Mapping[str, Any] = field(default_factory=dict)
    history: Sequence[Mapping[str, Any]] = ()
    #: Returns the progress of a store at a place in its epochs, where it is not known
    #: before.
    hear: Callable[[Epochs], Awaitable[Sequence[Mapping[str, Any]]]] | None = None


async def save(
    shards: ShardClient,
    target: CheckpointTarget,
    deadline: Deadline,
    training: TrainingState,
) -> tuple[str, Manifest]:
    """Write a checkpoint of a store.

    Parameters
    ----------
    shards : ShardClient
        The store.
    target : CheckpointTarget
        The place where it goes.
    deadline : Deadline
        When to give up.
    training : TrainingState
        The state of training that it has, too.

    Returns
    -------
    str, Manifest
        The name of its folder, and its manifest.

    Raises
    ------
    ConsistencyError
        Where another save of the store is still being written.
    CheckpointError
        Where the URL cannot be written, is not one for all machines, or a worker that
        writes is lost.
    ShardLostError, StoreClosedError, TimeoutError
        As their names say. Nothing without a manifest counts.
    """
    cut = await take(shards, deadline)
    return await write(shards, cut, target, deadline=deadline, training=training)


async def take(shards: ShardClient, deadline: Deadline, **how: Any) -> WholeCut:
    """Have all hosts copy all shards at one moment, or hold them, as `take_cut` does.

    The next step is :func:`write` or `drop_cut`.

    Raises
    ------
    ConsistencyError, ShardLostError, StoreClosedError, TimeoutError
        As of :func:`save`.
    """
    name, how = uuid.uuid4().hex, how or {"index": WHOLE}
    try:
        found = await take_cut(shards, name, deadline=deadline, **how)
    except BaseException:
        await drop_cut(shards, name)
        raise
    n, owners = len(unbounded_tables(shards.meta.layout, WHOLE)), shards.meta.owners
    copies = [
        (owners[shard], version, of[:n], of[n:])
        for shard, version, _, *of in sorted(found["versions"])
    ]
    return WholeCut(name, copies, found)


async def write(
    shards: ShardClient,
    cut: WholeCut,
    target: CheckpointTarget,
    *,
    deadline: Deadline,
    training: TrainingState,
) -> tuple[str, Manifest]:
    """Write a checkpoint from the copies of a cut, and free these in any case.

    Raises
    ------
    CheckpointError, TimeoutError
        As of :func:`save`; also where a worker that writes is lost.
    """
    silent, wrote = set[str](), dict[str, Any]()
    about: dict[str, Any] = {"silent": silent, "wrote": wrote}
    work = partial(_write, shards, cut, target, training, **about)
    try:
        seconds = deadline.remaining()
        return await shards.link.within(work, seconds, deadline.what, silent)
    except SnapshotLostError as error:
        raise CheckpointError(
            f"no checkpoint of store {shards.meta.name!r} was made: worker "
            f"{error.worker}, which writes shard {error.shard}, {error.reason}. Those "
            f"made before are whole; save again"
        ) from error
    finally:
        await drop_cut(shards, cut.name, **wrote)


async def _write(
    shards: ShardClient,
    cut: WholeCut,
    target: CheckpointTarget,
    training: TrainingState,
    *,
    silent: set[str],
    wrote: dict[str, Any],
) -> tuple[str, Manifest]:
    lineage = shards.meta.lineage
    folder, sequence, parent = await asyncio.to_thread(_place, target, lineage)
    try:
        where = target.folder(folder), pack_options(target.options)
        manifest, said, held = await _by_owners(shards, cut, where, silent)
        history = training.history
        if training.hear is not None:
            history = await training.hear(said.counted.epochs)
        manifest = replace(manifest, parent=parent, sequence=sequence, history=history)
        if training.progress:
            manifest = replace(manifest, progress=training.progress)
        manifest = await _whole(_seal, target, folder, manifest, said)
        # For users who watch; if they never hear of it the checkpoint counts all the same.
        wrote |= {"checkpoint": folder, "nbytes": manifest.nbytes, "held": held}
    except BaseException:
        # Nobody takes it for a checkpoint; the rest of it is swept later.
        await shards.link.wind_up(asyncio.to_thread(_remove, target, folder))
        raise
    return folder, manifest


async def describe(
    shards: ShardClient, cut: WholeCut, silent: set[str]
) -> tuple[Manifest, KnownPushes]:
    """Return what a checkpoint of a cut would say, and what its shards know of pushes.

    It has no files. In `silent` are the owners that have yet to answer. Raises as
    :func:`write`.
    """
    manifest, said, _ = await _by_owners(shards, cut, None, silent)
    return manifest, said.applied


def _manifest(
    meta: StoreMap, cut: WholeCut, rules: Rules, said: _OwnersSaid
) -> Manifest:
    """Return the manifest of a cut, without files."""
    counts = cut.counts(unbounded_tables(meta.layout, WHOLE))
    return Manifest(
        store="" if meta.session else meta.name,
        lineage=meta.lineage,
        parent="",
        sequence=0,
        time=time.time(),
        seed=_seed(meta.layout.tables),
        version=said.counted.version,
        **_contents(meta.layout, rules, counts, said),
        epochs=said.counted.epochs,
        progress={"run": json.loads(run)} if (run := cut.told["trained_by"]) else {},
        files=(),
        daskps=VERSION,
    )


async def _whole(work: Callable[..., _T], *args: Any) -> _T:
    """Do some work in a thread; a cancelled caller waits for its end all the same."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        # Else the thread would write files after the caller has removed them.
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()
        raise


def _seed(tables: Sequence[Table]) -> int:
    """Return the seed of unbounded tables; nobody keeps the seed of arrays."""
    seeds = (t.of.seed for t in tables if isinstance(t, UnboundedTable))
    return next(seeds, 0)


def _place(target: CheckpointTarget, lineage: str) -> tuple[str, int, str]:
    """Return the folder of a new checkpoint, its number, and the one before it."""
    storage = Storage(target.url, target.options)
    before = listing.newest(storage, lineage)
    folder, sequence = listing.next_folder(storage, secrets.token_hex(4))
    return folder, sequence, "" if before is None else before.folder


async def _by_owners(
    shards: ShardClient,
    cut: WholeCut,
    where: tuple[str, str] | None,
    silent: set[str],
) -> tuple[Manifest, _OwnersSaid, list[str]]:
    """Have all owners write their chunks; return a manifest that has yet to name them.

    Also the answers of the owners, and which of them had no room. `where` are the URL of
    the folder, and options as JSON; None is for a description alone. In `silent` are the
    owners that have yet to write.
    """
    meta, link = shards.meta, shards.link
    rules = Rules(meta.layout, meta.rules)
    slots = [(i, [*map(float, of)], marked(of)) for i, of in rules.slots.items()]
    about = {
        "store": meta.uid,
        "cut": cut.name,
        "where": where,
        "slots": slots,
        "copies": cut.copies,
    }

    async def ask(worker: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = await link.control(
                worker, "write_checkpoint", **about
            )
        except OSError as error:
            shard = [owner for owner, *_ in cut.copies].index(worker)
            why = f"died or cannot be reached while it wrote a checkpoint ({error})"
            raise SnapshotLostError(meta.name, shard, worker, why) from error
        silent.discard(worker)
        return found

    workers = [*dict.fromkeys(owner for owner, *_ in cut.copies)]
    silent.update(workers)
    replies = await gather(*map(ask, workers))
    said, pairs = _OwnersSaid.joined(replies), zip(workers, replies, strict=True)
    held = [worker for worker, of in pairs if of["holds"]]
    return _manifest(meta, cut, rules, said), said, held


def _seal(
    target: CheckpointTarget, folder: str, manifest: Manifest, said: _OwnersSaid
) -> Manifest:
    """Look at all files, and write the files that describe them, the manifest last.

    Raises
    ------
    CheckpointError
        Where a file is not there, or has another size.
    """
    storage = Storage(target.folder(folder), target.options)
    there = storage.sizes()
    for path, nbytes, _ in said.files:
        if there.get(path) != nbytes:
            raise CheckpointError(
                f"a worker wrote {nbytes:,} bytes to {path} of checkpoint {folder}, and "
                f"here it has {there.get(path, 'none')}: this URL is not shared by all "
                f"machines; save to one that all of them reach. No checkpoint was made",
                path,
                manifest.parameter_of(path),
            )
    summary = {
        "store": manifest.store,
        "version": manifest.version,
        "sequence": manifest.sequence,
        "daskps": manifest.daskps,
    }
    texts = nodes(manifest.arrays, summary)
    for path, text in texts.items():
        storage.write(path, text)
    storage.sync_names(texts)
    files = [StoredFile(path, len(text), digest(text)) for path, text in texts.items()]
    manifest = replace(manifest, files=(*sorted(said.files), *files))
    storage.put_last(MANIFEST, to_bytes(manifest))
    return manifest


def _remove(target: CheckpointTarget, folder: str) -> None:
    listing.remove(Storage(target.url, target.options), folder)


@dataclass(frozen=True, slots=True)
class _OwnersSaid:
    """The answers of all hosts, as one."""

    files: Sequence[StoredFile]
    #: By path of a chunk of ids the hash that it begins with.
    begins: Mapping[str, int]
    #: The counts of the store.
    counted: Counted
    #: The pushes that held shards have applied.
    applied: KnownPushes

    @classmethod
    def joined(cls, replies: Sequence[Mapping[str, Any]]) -> _OwnersSaid:
        """Return the answers of all hosts as one."""
        files = [StoredFile(*row) for reply in replies for row in reply["files"]]
        begins = dict(tuple(row) for reply in replies for row in reply["begins"])
        every = [Counted(*row) for reply in replies for row in reply["counted"]]
        applied = joined(KnownPushes(*reply["applied"]) for reply in replies)
        return cls(files, begins, Counted.joined(every), applied)


def _contents(
    layout: Layout, rules: Rules, counts: Counts, said: _OwnersSaid
) -> dict[str, Any]:
    """Return the entries of a manifest on parameters, tables and rules."""
    slots, number = rules.slots, dict[int, int]()
    stored: list[StoredRule] = []
    # Thousands of parameters may share one rule, and a description of it takes long.
    seen = dict[int, int]()
    for index, rule in rules.by_index.items():
        if id(rule) not in seen:
            one = StoredRule.of(rule, slots[index])
            if one not in stored:
                stored.append(one)
            seen[id(rule)] = stored.index(one)
        number[index] = seen[id(rule)]
    parameters = tuple(
        StoredParameter(
            *(p.name, p.shape, p.dtype, number.get(p.index)),
            *(
                said.counted.steps.get(p.index, 0),
                said.counted.factors.get(p.index, 1.0),
            ),
        )
        for p in layout.parameters
    )
    # Only unbounded tables need their stored arrays here: parameters may be many.
    is_asked = any(isinstance(table, UnboundedTable) for table in layout.tables)
    arrays = stored_arrays(layout, slots, counts) if is_asked else []
    tables = tuple(
        _table(
            i,
            table,
            rule=number.get(table.index),
            arrays=arrays,
            counts=counts,
            said=said,
        )
        for i, table in enumerate(layout.tables)
    )
    return {"parameters": parameters, "tables": tables, "rules": tuple(stored)}


def _table(
    ordinal: int,
    table: Table,
    *,
    rule: int | None,
    arrays: Sequence[StoredArray],
    counts: Counts,
    said: _OwnersSaid,
) -> StoredTable:
    known: dict[str, Any] = {"steps": said.counted.steps.get(table.index, 0)}
    known["lr_factor"] = said.counted.factors.get(table.index, 1.0)
    known["clock"] = said.counted.clocks[ordinal]
    if isinstance(table, UnboundedTable):
        known["unbounded"] = table.of
        known["n_rows"] = sum(counts.rows[table.index])
        known["n_candidates"] = sum(counts.candidates[table.index])
        known["admitted"], known["evicted"] = said.counted.came[ordinal]
        of = {a.area: a for a in arrays if a.members[0].index == table.index}
        known["begins"] = _begins(of.get(IDS), said)
        known["candidate_begins"] = _begins(of.get(CANDIDATES), said)
    return StoredTable(
        table.name, table.rows, table.dim, table.dtype, rule=rule, **known
    )


def _begins(array: StoredArray | None, said: _OwnersSaid) -> tuple[int, ...]:
    if array is None:
        return ()
    return tuple(said.begins[array.path_of(chunk)] for chunk in array.grid.chunks())
