"""Making a store: reserve, allocate on the owners, fill, then show it. Or nothing."""

from __future__ import annotations

import asyncio
import gc
import json
import uuid
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import config
from daskps.checkpoint.local_files import UNFINISHED
from daskps.checkpoint.manifest import MANIFEST
from daskps.checkpoint.storage import Storage, shown
from daskps.cluster import upstream
from daskps.cluster.caller.lifetime import Hold
from daskps.cluster.caller.link import Link, current_link
from daskps.cluster.caller.liveness import Liveness
from daskps.cluster.caller.remote import locate
from daskps.cluster.caller.shard_map import StoreMap
from daskps.cluster.host.rules import initial_slots
from daskps.cluster.keys import Anchor, anchor_key, label_of
from daskps.cluster.protocol.deadline import gather
from daskps.cluster.protocol.packing import pack_array, pack_options, unpack_reply
from daskps.cluster.protocol.wellformed import MOST_SECONDS
from daskps.errors import CheckpointError, LayoutError, ShardLostError
from daskps.init import constant
from daskps.layout.chunks import parts_of, runs_of
from daskps.layout.slots import marked
from daskps.layout.spans import ROWS, WEIGHTS
from daskps.layout.tables import UnboundedIds, UnboundedTable
from daskps.optim import Function
from daskps.shards.memory.room import rows_nbytes
from daskps.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from distributed import Client

    from daskps.checkpoint.listing import CheckpointTarget, FoundCheckpoint
    from daskps.checkpoint.manifest import Manifest
    from daskps.cluster.host.installation import FrozenWords
    from daskps.layout.arrays import Layout
    from daskps.layout.tables import TableShape
    from daskps.optim import Rule
    from daskps.typing import Array

#: Dask's books charge at most this much for one anchor.
_ANCHOR_NBYTES = 64 * 2**20
#: The text of the error of a creation that is late.
CREATION = "the creation of the store, which was undone"


@dataclass(frozen=True, slots=True)
class Replaced:
    """The store that a new one replaces."""

    uid: str
    #: Of the turn to do so.
    token: int
    #: The news for its users: the checkpoint, and the work lost that came after it.
    said: Mapping[str, Any] | None = None
    #: The shards of it that a cut holds, where it is resharded, and a function that is
    #: called when others have all of them.
    frozen: FrozenWords | None = None
    filled: Callable[[], Awaitable[None]] | None = None


@dataclass(frozen=True, slots=True)
class Blueprint:
    """The checked description of a new store, before the cluster hears of it."""

    name: str | None
    shapes: Mapping[str, tuple[tuple[int, ...], str]]
    tables: Mapping[str, TableShape]
    #: Initial values by the index of a parameter or table.
    arrays: Mapping[int, Array]
    #: Dask arrays by parameter index, of the parameter's shape and dtype.
    collections: Mapping[int, Any]
    initializers: Mapping[int, Any]
    rules: Mapping[int, Rule]
    shards: int | None
    servers: str | Sequence[str]
    seed: int
    overwrite: bool
    #: The checkpoint that all values come from, in place of initial ones.
    source: FoundCheckpoint | None = None
    #: Addresses of workers, and indices of the parameters and tables cut over their
    #: shards alone.
    placement: Sequence[tuple[Sequence[str], Sequence[int]]] = ()
    #: Where its checkpoints are, from which it is restored when a shard is lost.
    recover_from: CheckpointTarget | None = None
    #: The store that it replaces, if any.
    replaces: Replaced | None = None
    #: The device of each owner that its shards are on; "" for host memory.
    device: str = ""
    #: How many copies of each shard there are to be.
    copies: int = 1

    @property
    def lineage(self) -> str:
        """That of the checkpoint where all is as it was, "" of a new model."""
        is_same = self.source is not None and self.source.taken is None
        return self.source.manifest.lineage if self.source and is_same else ""


async def create(link: Link, plan: Blueprint, seconds: float | None) -> StoreMap:
    """Make a store; where anything fails, nothing of it stays.

    The scheduler has its directory by then. The link has the hold of a session store
    until a handle takes it.

    Raises
    ------
    StoreExistsError, NotEnoughWorkersError, LayoutError, ProtocolError
        As their names say.
    CheckpointError
        Where the checkpoint that it is made from is not whole, or its owners do not
        share the URL that it is to be restored from.
    ShardLostError
        When an owner dies or closes meanwhile.
    TimeoutError
        When it takes longer than `seconds`.
    """
    uid = uuid.uuid4().hex
    try:
        work = partial(_create, link, plan, uid, seconds)
        return await link.within(work, seconds, CREATION)
    except BaseException:
        link.holds.pop(uid, None)
        # A cancelled create must not leave its half behind.
        await link.wind_up(link.over("close", uid=uid, undo=True))
        raise


async def _create(
    link: Link, plan: Blueprint, uid: str, seconds: float | None
) -> StoreMap:
    settings, client = config.load(), link.client
    wait = min(settings.register_timeout_seconds, MOST_SECONDS)
    with user_code("the optimizer"):
        optimizers = [(i, repr(rule)) for i, rule in plan.rules.items()]
    slots = [(i, initial_slots(rule)) for i, rule in plan.rules.items()]
    unbounded = [
        (n, *of.to_wire())
        for n, (*_, of) in plan.tables.items()
        if isinstance(of, UnboundedIds)
    ]
    places: dict[str, Any] = {}
    if plan.recover_from is not None:
        target = plan.recover_from
        places["recover_from"] = target.url, pack_options(target.options)
    if plan.replaces is not None:
        places["replaces"] = plan.replaces.uid, plan.replaces.token
    # Hashes deal rows out evenly, about.
    rows = 0 if plan.source is None else _rows_nbytes(plan.source)
    wire = await _reserved(
        link,
        {
            "uid": uid,
            "name": plan.name or f"session-{uid[:8]}",
            "client": client.id,
            "session": plan.name is None,
            "params": [(n, list(s), d) for n, (s, d) in plan.shapes.items()],
            "tables": [(n, *table[:3]) for n, table in plan.tables.items()],
            "unbounded": unbounded,
            "shards": plan.shards,
            "servers": plan.servers,
            "rules": _pickled(dict(plan.rules), "the optimizer", "its class"),
            "optimizers": optimizers,
            "slots": [(i, [float(v) for v in values]) for i, values in slots],
            "row_slots": [(i, marked(values)) for i, values in slots],
            "lineage": plan.lineage,
            "rows_nbytes": rows,
            "placement": plan.placement,
            **places,
            "overwrite": plan.overwrite,
            "memory_share": settings.memory_share,
            # Memory of a device is its owner's alone.
            "machine": settings.machine_carrier and not plan.device,
            "device": plan.device,
            "device_share": settings.device_memory_share,
            "copies": plan.copies,
            "wait_seconds": wait if seconds is None else min(wait, 0.9 * seconds),
        },
    )
    _check_whole(StoreMap(wire).layout, plan.rules)
    if plan.recover_from is not None and plan.replaces is None:
        owners, ask = StoreMap(wire).owners, partial(_control, link, StoreMap(wire))
        await _try_out(link, plan.recover_from, owners, ask)
    segments = await _allocate(link, StoreMap(wire), plan)
    meta = StoreMap({**wire, "segments": segments})
    replaced = plan.replaces or Replaced("", 0)
    if plan.source is not None:
        await install(link, meta, plan.source, replaced)
    await load(link, meta, dict.fromkeys(plan.arrays, 0), plan.arrays)
    # These tasks need nothing of the rules and the blocks of memory.
    slim = {**wire, "rules": b"", "optimizers": [], "cluster": "", "segments": []}
    await _load_collections(client, slim, plan.collections)
    futures = await _anchored(link, meta, plan)
    await link.directory(
        "commit" if replaced.frozen is None else "reshard_commit",
        uid=uid,
        anchors=[f.key for f in futures],
        segments=segments,
        overwrite=plan.overwrite,
        loaded=replaced.said,
    )
    if plan.name is None and plan.replaces is None:
        link.holds[uid] = Hold(link, uid, futures)
    return meta


async def _reserved(link: Link, request: dict[str, Any]) -> Any:
    """Have the directory reserve a store; where it lacks room, free some once."""
    try:
        return await link.directory("create", request=request)
    except LayoutError:
        # Handles in cycles are gone only when Python looks for them.
        gc.collect()
    # Handles collected just now have handed over work, which the event loop begins in
    # its next turn.
    await asyncio.sleep(0)
    if freeing := set(link.freeing):
        await asyncio.wait(freeing)
    return await link.directory("create", request=request)


def _check_whole(layout: Layout, rules: Mapping[int, Rule]) -> None:
    """Refuse functions of whole arrays for parameters that are cut."""
    for index in [i for i, rule in rules.items() if isinstance(rule, Function)]:
        if (n := len(layout.pieces_of[index])) > 1:
            name = layout.parameters[index].name[:60]
            raise LayoutError(
                f"the optimizer of {name!r} is {rules[index]!r}, which takes it whole, "
                f"and it is cut over {n} shards; keep it whole with "
                f"placement={{{name!r}: address of a worker}}, or create the store "
                f"with shards=1"
            )


def _pickled(value: Any, what: str, it: str) -> bytes:
    try:
        return upstream.dumps(value)
    except Exception as error:
        raise LayoutError(
            f"{what} cannot be pickled ({error}); define {it} at module level or "
            f"without open files and locks"
        ) from error


async def _allocate(link: Link, meta: StoreMap, plan: Blueprint) -> list[Any]:
    """Have the hosts make the shards; return the memory where these can be mapped."""
    fills = _pickled((dict(plan.initializers), plan.seed), "an initializer", "it")
    found = await gather(
        *(
            _control(
                link,
                meta,
                worker,
                "create",
                name=meta.name,
                layout=meta.layout.to_wire(),
                shards=shards,
                pickled=(meta.rules, fills),
                memory=(meta.cluster, plan.source is not None, plan.device),
            )
            for worker, shards in meta.hosts.items()
        )
    )
    return [segment for segments in found for segment in segments]


def _rows_nbytes(source: FoundCheckpoint) -> int:
    """Return about how many bytes unbounded rows take; a new store has no such rows."""
    of, taken = source.manifest, source.taken
    read = None if taken is None else {one.stored for one in taken}
    pairs = zip(of.layout(1).tables, of.tables, strict=True)
    return sum(
        rows_nbytes(table, of.slots.get(table.index, ()), t.n_rows, t.n_candidates)
        for table, t in pairs
        if t.unbounded and (read is None or table.index in read)
    )


async def install(
    link: Link,
    meta: StoreMap,
    source: FoundCheckpoint,
    replaced: Replaced | None = None,
) -> None:
    """Have all owners read their shards' parts of a checkpoint, into a new store.

    Or of the frozen shards of what is `replaced`, which a checkpoint would be made of.

    Raises
    ------
    CheckpointError
        If a file is missing or damaged, or if the store has other parameters.
    """
    if source.taken is None:
        check_parameters(meta, source.manifest, shown(source.url))
    where = source.url, pack_options(source.options or {})
    frozen = None if replaced is None else replaced.frozen
    sealed = source.digest if frozen is None else upstream.dumps(source.manifest)
    about: dict[str, Any] = {"where": where, "manifest": sealed, "frozen": frozen}
    about["taken"] = source.taken
    every = (_control(link, meta, w, "install", **about) for w in meta.hosts)
    await gather(*every)
    if replaced is not None and replaced.filled is not None:
        await replaced.filled()
    if source.taken is not None:
        return  # another model
    run, lineage = source.manifest.progress.get("run"), source.manifest.lineage
    described = json.dumps(run) if run else ""
    told = {"described": described, "lineage": lineage}
    await link.directory("trained_by", uid=meta.uid, **told)


def check_parameters(meta: StoreMap, manifest: Manifest, folder: str) -> None:
    """Refuse a checkpoint of a store with other parameters or tables."""
    if _kept(manifest.layout(1)) != _kept(meta.layout):
        raise made_otherwise(meta, folder, "parameters")


def made_otherwise(meta: StoreMap, folder: str, what: str) -> CheckpointError:
    """Return the refusal of a checkpoint that does not fit a store."""
    return CheckpointError(
        f"checkpoint {folder} was saved of a store with other {what} than "
        f"{meta.name!r} has; make the store as it was, or save to another URL",
        MANIFEST,
    )


def _kept(layout: Layout) -> list[object]:
    """Return the parts of a layout that must be as they were saved.

    All but the placement, and the first values of absent rows.
    """
    tables = [
        replace(t, of=replace(t.of, init=constant(0.0)), shards=None)
        if isinstance(t, UnboundedTable)
        else replace(t, shards=None)
        for t in layout.tables
    ]
    return [[(p.name, p.shape, p.dtype) for p in layout.parameters], tables]


async def _control(
    link: Link, meta: StoreMap, worker: str, method: str, **about: Any
) -> Any:
    """Have an owner do something for a store that is being made.

    The error tells an owner that dies meanwhile from an initializer that cannot open a
    file. The directory hears of a death at once; Dask would try to reach the owner for
    long.
    """
    shard, ask = meta.owners.index(worker), partial(locate, link, meta.uid)
    try:
        async with Liveness(ask, meta.name, 1).over(worker, [shard]):
            reply = await link.reply(worker, method, store=meta.uid, **about)
    except (OSError, ShardLostError) as error:
        reason = f"died while the store was made ({error})"
        raise ShardLostError(meta.name, shard, worker, reason) from error
    return unpack_reply(reply, f"worker {worker}")


async def load(
    link: Link, meta: StoreMap, starts: Mapping[int, int], flats: Mapping[int, Array]
) -> None:
    """Write initial values, each from element `starts[index]` of its parameter on."""
    rows, n = dict[str, list[Any]](), len(meta.layout.parameters)
    for index, flat in flats.items():
        area, width, first = WEIGHTS, 1, starts[index]
        if index >= n:
            area, width = ROWS, meta.layout.tables[index - n].dim
        runs = runs_of(meta.layout, index, width=width)
        for shard, span in parts_of(runs, area, first, first + len(flat)):
            data, flat = np.split(flat, [span.stop - span.start])
            row = [shard, span, pack_array(data)]
            rows.setdefault(meta.owners[shard], []).append(row)
    await gather(
        *(
            _control(link, meta, worker, "load", items=items)
            for worker, items in rows.items()
        )
    )


async def _load_collections(
    client: Client, wire: Mapping[str, Any], collections: Mapping[int, Any]
) -> None:
    """Have the workers that hold the chunks of dask arrays write them."""
    futures = []
    # Whole trailing dimensions, so that a chunk is one run of elements.
    rows = [
        array.rechunk(dict.fromkeys(range(1, array.ndim), -1))
        for array in collections.values()
    ]
    # In one call: arrays that were made of one another share tasks.
    for index, stored in zip(collections, upstream.persist(client, rows), strict=True):
        blocks = stored.to_delayed().reshape(-1)
        start = 0
        heights = stored.chunks[0] if stored.ndim else (1,)
        for block, height in zip(blocks, heights, strict=True):
            futures.append(
                client.submit(
                    _write_chunk,
                    upstream.compute(client, block),
                    wire,
                    index,
                    start,
                    pure=False,
                )
            )
            start += height * int(np.prod(stored.shape[1:], dtype=np.int64))
    await gather(*(upstream.result(future) for future in futures))


def _write_chunk(chunk: Any, wire: Mapping[str, Any], index: int, start: int) -> None:
    """Write one chunk of a dask array from the worker that holds it."""
    meta = StoreMap(wire)
    dtype = meta.layout.dtype_of(index)
    flat = np.ascontiguousarray(chunk, dtype=dtype).reshape(-1)
    link = current_link()
    link.run(lambda: load(link, meta, {index: start}, {index: flat}))


async def _anchored(link: Link, meta: StoreMap, plan: Blueprint) -> list[Any]:
    """Have copies made, and submit one anchor per shard, on its owner; it does nothing."""
    if plan.copies > 1 and (plan.replaces is None or plan.replaces.frozen):
        segments = [(i, *where) for i, where in meta.where.segments.items()]
        await link.directory("copies", uid=meta.uid, segments=segments)
    nbytes = max(1, min(_ANCHOR_NBYTES, meta.layout.nbytes // meta.layout.n_shards))
    label = label_of(meta.name, meta.uid)
    futures = [
        link.client.submit(
            Anchor,
            meta.name,
            shard,
            nbytes,
            key=anchor_key(label, shard),
            workers=[owner],
            allow_other_workers=True,
            pure=False,
        )
        for shard, owner in enumerate(meta.owners)
    ]
    await gather(*(upstream.result(future) for future in futures))
    return futures


async def _try_out(
    link: Link,
    target: CheckpointTarget,
    owners: Sequence[str],
    ask: Callable[..., Awaitable[Any]],
) -> None:
    """Write a file, have all owners look for it, and remove it.

    Parameters
    ----------
    link : Link
        The link that sees to the file's removal where the call is given up.
    target : CheckpointTarget
        The place where checkpoints are to go.
    owners : sequence of str
        Owners of the shards, which would write them.
    ask : callable
        ``await ask(owner, message, **about)`` returns a host's answer.

    Raises
    ------
    CheckpointError
        If the file cannot be written, or an owner does not see it.
    """
    path = f"{UNFINISHED}{uuid.uuid4().hex}"
    where = target.url, pack_options(target.options)
    try:
        await asyncio.to_thread(_write_trial, target, path)
        workers = [*dict.fromkeys(owners)]
        seen = await gather(
            *(ask(worker, "sees_file", where=where, path=path) for worker in workers)
        )
    except BaseException:
        await link.wind_up(asyncio.to_thread(_remove_trial, target, path))
        raise
    await asyncio.to_thread(_remove_trial, target, path)
    for worker, sees in zip(workers, seen, strict=True):
        if not sees:
            raise CheckpointError(
                f"checkpoints cannot go to {shown(target.url)}: worker {worker} does not "
                f"see there what this process has written, as where a path or memory:// "
                f"is another one on each machine or in each process; give recover_from= "
                f"an URL that all workers reach"
            )


def _write_trial(target: CheckpointTarget, path: str) -> None:
    storage = Storage(target.url, target.options)
    storage.write(path, b"")
    # A restore lists the folders, so that must work, too.
    storage.folders()


def _remove_trial(target: CheckpointTarget, path: str) -> None:
    Storage(target.url, target.options).remove(path)
