"""Choosing the hosts of a new store, and what workers hold."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from daskps.backend.stream import DeviceInfo
from daskps.cluster.directory.entry import Hosts, StoreEntry
from daskps.cluster.protocol.messages import check_protocol
from daskps.errors import (
    DaskPSError,
    LayoutError,
    NotEnoughWorkersError,
    ProtocolError,
    ShardLostError,
)
from daskps.layout.arrays import Layout
from daskps.layout.placement import check_memory, place, shards_on
from daskps.layout.slots import with_marks
from daskps.limits import check_parameters, check_placed, check_shards
from daskps.shards.memory.segment import Segment

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from distributed import Scheduler
    from distributed.scheduler import WorkerState

#: Seconds between two looks for workers that may still be starting.
_LOOK_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """A store that a client asks the directory to make room for."""

    uid: str
    name: str
    client: str
    session: bool
    #: Name, shape and dtype of each parameter.
    params: Sequence[tuple[str, Sequence[int], str]]
    #: Name, rows, their length and dtype of each table.
    tables: Sequence[tuple[str, int, int, str]]
    shards: int | None
    servers: str | Sequence[str]
    rules: bytes
    #: Parameter index and repr of its rule.
    optimizers: Sequence[tuple[int, str]]
    #: Parameter index and initial values of its slots.
    slots: Sequence[tuple[int, Sequence[float]]]
    overwrite: bool
    memory_share: float
    #: Name of each unbounded table, and what its rows begin with: a kind, its numbers
    #: and a seed.
    unbounded: Sequence[tuple[str, str, Sequence[float], str, Sequence[int]]]
    #: Whether other processes of a shard's machine may map it.
    machine: bool
    wait_seconds: float
    #: Parameter index, and which of its slots are no plain ones, by
    #: `layout.slots.marked`.
    row_slots: Sequence[tuple[int, Sequence[int]]] = ()
    #: Of a store made from a checkpoint, the uid of the store that this goes back to,
    #: and how many bytes its shards take for the unbounded rows that they begin with.
    lineage: str = ""
    rows_nbytes: int = 0
    #: Addresses of workers, and the parameters and tables that are cut over their
    #: shards.
    placement: Sequence[tuple[Sequence[str], Sequence[int]]] = ()
    #: URL and options to restore the store from, where a shard of it is lost.
    recover_from: tuple[str, str] | None = None
    #: The store that this one takes the place of, and the number of the turn to do so.
    replaces: tuple[str, int] | None = None
    #: The device of each owner's process that the shards are on; "" for host memory.
    device: str = ""
    device_share: float = 1.0
    #: How many copies of each shard there are to be: 1, or 2.
    copies: int = 1


def reserve(
    scheduler: Scheduler,
    wanted: StoreRequest,
    workers: list[str],
    held: Mapping[str, int],
    *,
    devices: Mapping[str, DeviceInfo] = MappingProxyType({}),
    sessions: Iterable[StoreEntry] = (),
) -> StoreEntry:
    """Lay a store out over workers, or refuse it for want of memory.

    Older `sessions` of the same client may take that memory: they are named then. The
    `devices` are those of the workers, where it is to be on these.
    """
    n_shards = wanted.shards or len(workers)
    check_shards(n_shards)
    of_arrays, tables = wanted.params, wanted.tables
    check_parameters(of_arrays, len(of_arrays), n_shards, tables)
    wire = {"parameters": of_arrays, "tables": tables, "shards": n_shards}
    owners = place(n_shards, workers)
    placed = [(shards_on(on, owners), indices) for on, indices in wanted.placement]
    check_placed(placed, len(of_arrays) + len(tables))
    layout = Layout.from_wire({**wire, "unbounded": wanted.unbounded, "placed": placed})
    nbytes: dict[str, int] = {}
    sizes: dict[int, int] = {}
    of_rows = dict(wanted.row_slots)
    slots = {i: with_marks(v, of_rows.get(i, ())) for i, v in wanted.slots}
    on_devices = dict[str, int]()
    for shard, worker in enumerate(owners):
        need = Segment.needed_nbytes(layout, shard, slots, durable=wanted.machine)
        if devices:
            there = Segment.needed_of_device(layout, shard, slots)
            on_devices[worker] = on_devices.get(worker, 0) + there
            need -= there
        need += -(-wanted.rows_nbytes // n_shards)
        sizes[shard] = need
        nbytes[worker] = nbytes.get(worker, 0) + need
    of_devices = _check_devices(on_devices, devices, sessions, wanted.device_share)
    limits = {w: scheduler.workers[w].memory_limit for w in nbytes}
    try:
        check_memory(nbytes, held, limits, wanted.memory_share)
        if wanted.copies > 1:
            _check_copies(nbytes, held, scheduler.running, wanted.memory_share)
    except LayoutError as error:
        text = str(error)
        # A reshard keeps the number of copies.
        if wanted.copies > 1 and not wanted.replaces:
            total = 2 * sum(nbytes.values())
            text += f"; copies=2 needs {total:,} bytes in all, copies=1 half of it"
        older = [
            f"{e.name!r} ({sum(e.nbytes.values()):,} bytes)"
            for e in sessions
            if e.session and e.client == wanted.client
        ]
        if older:
            more = f" and {len(older) - 8} more" if len(older) > 8 else ""
            text += (
                f"; or free session stores that this client has made before, by close() "
                f"or with their last handles: {', '.join(older[:8])}{more}"
            )
        raise LayoutError(text) from None
    return StoreEntry(
        uid=wanted.uid,
        name=wanted.name,
        client=wanted.client,
        session=wanted.session,
        layout=layout.to_wire(),
        owners=owners,
        nbytes=nbytes,
        sizes=sizes,
        memory_share=wanted.memory_share,
        rules=wanted.rules,
        optimizers=dict(wanted.optimizers),
        lineage=wanted.lineage,
        replaces=wanted.replaces,
        recover_from=wanted.recover_from,
        asked_shards=wanted.shards,
        asked_servers=wanted.servers,
        asked_placement=wanted.placement,
        cluster=scheduler.id if wanted.machine else "",
        device=wanted.device,
        of_devices=of_devices,
        n_copies=wanted.copies,
    )


def _check_copies(
    nbytes: Mapping[str, int],
    held: Mapping[str, int],
    running: Iterable[WorkerState],
    share: float,
) -> None:
    """Refuse second copies for which all workers together have no room."""
    need, room = sum(nbytes.values()), 0
    for ws in running:
        if not ws.memory_limit:
            return
        used = held.get(ws.address, 0) + nbytes.get(ws.address, 0)
        room += max(0, int(share * ws.memory_limit) - used)
    if need > room:
        raise LayoutError(
            f"the second copies need {need:,} bytes beside the shards, and all workers "
            f"have room for {room:,}, at {share:.0%} of their memory limits; add "
            f"workers, or raise their memory limit or the configuration value "
            f"daskps.memory-share"
        )


async def find_devices(
    hosts: Hosts, wanted: StoreRequest, workers: list[str]
) -> dict[str, DeviceInfo]:
    """Return the device of each worker that has the one that a store is to be on.

    Raises
    ------
    NotEnoughWorkersError
        If none has it, or not all that were named, with the reason of each.
    """
    if not wanted.device:
        return {}

    async def ask(worker: str) -> DeviceInfo | str:
        try:
            return DeviceInfo(
                *await hosts.control(worker, "device", name=wanted.device)
            )
        except (OSError, DaskPSError) as error:
            return str(error)

    found = dict(zip(workers, await asyncio.gather(*map(ask, workers)), strict=True))
    having = {w: of for w, of in found.items() if not isinstance(of, str)}
    named = not isinstance(wanted.servers, str)
    if not having or (named and len(having) < len(found)):
        reasons = [f"{w}: {of}" for w, of in found.items() if isinstance(of, str)]
        raise NotEnoughWorkersError(
            f"device={wanted.device!r} is on {len(having)} of the {len(found)} workers "
            f"that servers={wanted.servers!r:.60} stands for; {'; '.join(reasons[:8])}. "
            f"Start workers with one, name others in servers=, or leave device= out"
        )
    return having


def _check_devices(
    need: Mapping[str, int],
    devices: Mapping[str, DeviceInfo],
    stores: Iterable[StoreEntry],
    share: float,
) -> dict[str, int]:
    """Refuse shards that would fill a device; return the bytes of each, by its uuid.

    All shards on one device count, of whichever worker and store.

    Raises
    ------
    LayoutError
        Naming the worker, the device, the need and the limit.
    """
    held, new = Counter[str](), Counter[str]()
    for entry in stores:
        held.update(entry.of_devices)
    for worker, of in devices.items():
        if not (nbytes := need.get(worker, 0)):
            continue
        new[of.uuid] += nbytes
        limit, taken = int(share * of.total), held[of.uuid] + new[of.uuid]
        if taken > limit or new[of.uuid] > of.free:
            raise LayoutError(
                f"the shards for {of.name} of worker {worker} need {new[of.uuid]:,} bytes "
                f"and shards hold {held[of.uuid]:,} of it already; {of.free:,} of its "
                f"{of.total:,} bytes are free, and shards may fill {share:.0%} of them. "
                f"Use more devices, or raise the configuration value "
                f"daskps.device-memory-share"
            )
    return dict(new)


async def find_servers(
    scheduler: Scheduler, servers: str | Sequence[str], wait_seconds: float
) -> list[str]:
    """Return the workers that may own shards, waiting for those that start.

    Raises
    ------
    NotEnoughWorkersError
        When there is none, or not all that were named, after `wait_seconds`.
    """
    known = isinstance(servers, str) and (
        servers in ("auto", "all") or servers.startswith("resource:")
    )
    if not (known or (servers and not isinstance(servers, str))):
        raise ValueError(f"servers={servers!r:.60} names no worker")
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_seconds
    while True:
        found = eligible(scheduler, servers)
        missing = set() if isinstance(servers, str) else set(servers) - set(found)
        if found and not missing:
            return found
        if loop.time() >= deadline:
            absent = f", {sorted(missing)} are not among them" if missing else ""
            others = [
                w for w in scheduler.workers.values() if w not in scheduler.running
            ]
            idle = "".join(f", {ws.address}: {ws.status.name}" for ws in others)
            raise NotEnoughWorkersError(
                f"servers={servers!r} found {len(found)} running workers{absent}; the "
                f"cluster has {len(scheduler.workers)}{idle}. Start workers, or name "
                f"others in servers="
            )
        await asyncio.sleep(_LOOK_SECONDS)


def eligible(scheduler: Scheduler, servers: str | Sequence[str]) -> list[str]:
    """Return the running workers that ``servers=`` stands for."""
    running = {ws.address: ws for ws in scheduler.running}
    ordered = [address for address in scheduler.workers if address in running]
    if not isinstance(servers, str):
        return [address for address in dict.fromkeys(servers) if address in running]
    resource = "PS" if servers == "auto" else servers.removeprefix("resource:")
    having = [a for a in ordered if running[a].resources.get(resource)]
    if servers == "all" or (servers == "auto" and not having):
        return ordered
    return having


async def check_hosts(hosts: Hosts, entry: StoreEntry) -> None:
    """Refuse workers without a host, or with one of another protocol.

    Raises
    ------
    ProtocolError
        Naming the worker and both versions.
    ShardLostError
        If one died, of which the scheduler has not heard yet.
    """

    async def hello(worker: str) -> None:
        asked = asyncio.ensure_future(greet(hosts, worker))
        try:
            while not (await asyncio.wait({asked}, timeout=_LOOK_SECONDS * 10))[0]:
                if not hosts.has_worker(worker):
                    # Dask would try to reach it for long.
                    raise OSError("it has left")
            entry.memories[worker] = asked.result()
        except OSError as error:
            reason = f"died while the store was made ({error})"
            shard = entry.owners.index(worker)
            raise ShardLostError(entry.name, shard, worker, reason) from error
        finally:
            asked.cancel()

    await asyncio.gather(*map(hello, entry.nbytes))


async def greet(hosts: Hosts, worker: str, seconds: float | None = None) -> str:
    """Refuse a worker of another daskps, or return the folder of its memory.

    Raises
    ------
    OSError
        Where it does not answer, or not within `seconds`.
    ProtocolError
        Naming the worker and both versions.
    """
    about = await asyncio.wait_for(hosts.control(worker, "hello"), seconds)
    try:
        check_protocol(about["protocol"], about["version"], f"worker {worker}")
    except ProtocolError:
        hosts.foreign.add(worker)
        raise
    return str(about.get("memory", ""))


def held_bytes(stores: Iterable[StoreEntry]) -> Counter[str]:
    """Return the bytes of all shards, and views, on each worker."""
    held: Counter[str] = Counter()
    for entry in stores:
        held.update(entry.nbytes)
        held.update(entry.viewers)
    return held


def find_room(
    entry: StoreEntry,
    shards: Sequence[int],
    held: Counter[str],
    workers: Mapping[str, WorkerState],
    *,
    servers: Collection[str] = (),
    last: Collection[str] = (),
) -> dict[int, str]:
    """Return a worker for each shard that has room for it beside what all have.

    Adds that to what it has. Of `servers` they come first, and last where they were
    drained, or are of `last`.

    Raises
    ------
    LayoutError
        Where there is none.
    """

    def turn(worker: str) -> tuple[bool, bool, int]:
        is_last = worker in last or worker in entry.drained
        return is_last, worker not in servers, held[worker]

    found = dict[int, str]()
    for shard in shards:
        need, why = entry.sizes[shard], "no other worker runs"
        for target in sorted(workers, key=turn):
            try:
                limits = {target: workers[target].memory_limit}
                check_memory({target: need}, held, limits, entry.memory_share)
            except LayoutError as error:
                why = str(error)
                continue
            found[shard] = target
            held[target] += need
            break
        else:
            raise LayoutError(
                f"no other worker can have shard {shard} of store {entry.name!r}, "
                f"{need:,} bytes: {why}"
            )
    return found
