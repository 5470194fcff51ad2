"""Handlers of stores: making, filling, inspecting and freeing them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import numpy as np

from daskps.backend import find
from daskps.cluster.counters import counters_of
from daskps.cluster.host.growth import Budget, new_segment
from daskps.cluster.host.hosted import HostedShard, free_moving
from daskps.cluster.host.rules import Rules
from daskps.cluster.machine.membership import memory_id
from daskps.cluster.protocol.handlers import HOST
from daskps.cluster.protocol.messages import identity
from daskps.cluster.protocol.packing import unpack_array
from daskps.cluster.protocol.wellformed import layout_of
from daskps.cluster.upstream import loads
from daskps.errors import (
    DaskPSError,
    LayoutError,
    ProtocolError,
    PushRejectedError,
    ShardLostError,
    StoreClosedError,
)
from daskps.init import fill
from daskps.layout.arrays import counted
from daskps.layout.spans import Span
from daskps.row_init import fill_rows
from daskps.shards.arrays.device import DeviceMemory
from daskps.shards.arrays.payload import NUMPY, Payload
from daskps.shards.cuts.cut import has_applied
from daskps.shards.memory.format import (
    GENERATION,
    N_APPLIED,
    N_DROPPED,
    N_DUPLICATES,
    NONCE,
    RUN,
    VERSION,
)
from daskps.shards.memory.segment import Segment
from daskps.shards.run_record import delays_of, epochs_of
from daskps.shards.shard import Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.machine.blocks import Block
    from daskps.cluster.machine.membership import Membership
    from daskps.layout.arrays import Layout
    from daskps.typing import Array

logger = logging.getLogger(__name__)
#: Elements of weights that are made at a time: those of a device are made here first.
_FILLED = 2**22
#: The host logs a compilation that takes longer.
SLOW_COMPILE_SECONDS = 1.0


@HOST.handles("hello")
async def _hello(host: ShardHost) -> dict[str, Any]:
    """Return the protocol of this host, and which shared memory it has."""
    return {**identity(), "memory": memory_id()}


@HOST.handles("device")
async def _device(host: ShardHost, name: str) -> tuple[str, str, int, int]:
    """Return a device of this process: its name, uuid, and its bytes free and in all.

    Raises
    ------
    LayoutError
        If there is none, with the reason.
    """

    def look() -> tuple[str, str, int, int]:
        try:
            name_, uuid, free, total = find(name).info()
        except (ValueError, RuntimeError) as error:
            raise LayoutError(str(error)) from error
        return name_, uuid, free, total

    return await host.in_thread(look)


@HOST.handles("create", user_code=True)
async def _create(
    host: ShardHost,
    *,
    store: str,
    name: str,
    layout: Mapping[str, Any],
    shards: Sequence[int],
    pickled: tuple[bytes, bytes],
    memory: tuple[str, bool, str],
) -> list[tuple[int, str, int, int]]:
    """Make shards of a new store and fill them from their initializers.

    `pickled` are the update rules, and initializers with their seed. Compiles the
    update loops, so that the first push finds them ready. Returns shard, name, bytes
    and nonce of the memory that other processes may map: processes of the cluster that
    `memory` names. `memory` also says whether a checkpoint will fill the shards; a
    thread meanwhile takes the memory that the checkpoint does not fill. Last it says
    what device the arrays are on.
    """
    made = layout_of(layout)
    if not all(0 <= shard < made.n_shards for shard in shards):
        raise ProtocolError(f"shards {shards!r:.60} of the {made.n_shards} of a store")
    where = host.worker.address
    check = partial(_check_wanted, host, store, name, min(shards, default=0))
    check()
    (rules, fills), (cluster, is_filled, device) = pickled, memory

    def build() -> list[HostedShard]:
        members = None if device else host.members(cluster)
        began = time.perf_counter()
        payloads = [_payload(host, device) for _ in shards]
        every = _rules(made, rules, payloads, durable=members is not None)
        if (seconds := time.perf_counter() - began) > SLOW_COMPILE_SECONDS:
            logger.info(
                "%s compiled the optimizer of store %r in %.1f s; the cache directory "
                "keeps the result for other processes and later stores",
                where,
                name,
                seconds,
            )
        ask = Budget(host).ask
        of = name, shards, every, payloads
        hosted_shards = make_shards(members, *of, ask=ask, is_filled=is_filled)
        try:
            initializers, seed = loads(fills)
            for hosted in hosted_shards:
                _fill(hosted.shard.segment, initializers, seed)
                hosted.shard.segment.payload.wait()
        except BaseException:
            for hosted in hosted_shards:
                hosted.close()
            raise
        return hosted_shards

    built = await host.in_thread(build)
    try:
        check()
    except DaskPSError:
        for hosted in built:
            hosted.close()
        raise
    for hosted in built:
        host.shards.setdefault((store, hosted.index), hosted)
    _begin_taking(built)
    nbytes = sum(hosted.nbytes for hosted in built)
    logger.info(
        "%s made %s of store %r, %d bytes",
        where,
        counted(len(built), "shard"),
        name,
        nbytes,
    )
    return [(s.index, *s.block.address) for s in built if s.block is not None]


def _payload(host: ShardHost, name: str) -> Payload:
    """Return the functions of new memory for a shard."""
    if not name:
        return NUMPY
    device = find(name)
    device.watchers[host.worker.address] = WeakMethod(host.memory_lost)
    return DeviceMemory(device).payload()


def _rules(
    layout: Layout, pickled: bytes, payloads: Sequence[Payload], *, durable: bool
) -> list[Rules]:
    """Return the rules of each shard, compiled: all share them in host memory."""
    made = {p.launcher: Rules(layout, pickled, p.launcher) for p in payloads}
    for rules in made.values():
        rules.warm(durable=durable)
    return [made[p.launcher] for p in payloads]


def _check_wanted(host: ShardHost, store: str, name: str, shard: int) -> None:
    where = host.worker.address
    if host.leaves():
        raise ShardLostError(name, shard, where, "closes")
    if store in host.dropped:
        raise StoreClosedError(
            f"store {name!r} was undone or freed while worker {where} made its shards"
        )


def make_shards(  # noqa: PLR0917 - what each shard has, one beside the other
    members: Membership | None,
    name: str,
    shards: Sequence[int],
    rules: Sequence[Rules],
    payloads: Sequence[Payload],
    *,
    ask: Callable[[int], None],
    is_filled: bool,
) -> list[HostedShard]:
    """Make shards, in memory that other processes can map if there is such memory."""
    layout, slots = rules[0].layout, rules[0].slots
    blocks: list[Block] = []
    if members is not None:
        sizes = [Segment.extent(layout, s, slots) for s in shards]
        later = [Segment.spare(layout, s, slots) for s in shards] if is_filled else None
        blocks = members.make_all(sizes, later)
    made = []
    every = zip(shards, rules, payloads, strict=True)
    for (shard, bound, payload), block in itertools.zip_longest(every, blocks):
        segment = new_segment((layout, shard, slots), block, ask, payload)
        segment.words[GENERATION] = 1
        segment.words[NONCE] = 0 if block is None else block.nonce
        machine = Shard(segment, bound, cache_dir=bound.cache_dir)
        made.append(HostedShard(name, layout, shard, machine, block=block))
    return made


def _begin_taking(hosted_shards: Sequence[HostedShard]) -> None:
    """Let a thread take the memory that shards still lack, one after the other."""
    loop, pool = asyncio.get_running_loop(), ThreadPoolExecutor(1, "daskps-memory")
    for hosted in hosted_shards:
        if hosted.block is not None and hosted.block.later:
            taken = loop.run_in_executor(pool, hosted.block.take_later)
            # No caller asks about a store that is undone meanwhile.
            taken.add_done_callback(lambda of: of.cancelled() or of.exception())
            hosted.has_memory = taken
    pool.shutdown(wait=False)


def _fill(segment: Segment, initializers: Mapping[int, Any], seed: int) -> None:
    for piece, weights in zip(segment.pieces, segment.weights[0], strict=True):
        if piece.parameter.index not in initializers:
            continue
        for lo in range(0, piece.size, _FILLED):
            with _new(segment, weights[lo : lo + _FILLED]) as part:
                fill(
                    part,
                    initializers[piece.parameter.index],
                    name=piece.parameter.name,
                    shape=piece.parameter.shape,
                    seed=seed,
                    start=piece.start + lo,
                )
    segment.begin_copies()
    for memory in segment.tables:
        rows, table = memory.piece, memory.piece.table
        if not rows.n_rows or table.index not in initializers:
            continue
        step = max(1, _FILLED // max(1, table.dim))
        for lo in range(0, rows.n_rows, step):
            with _new(segment, memory.rows[lo : lo + step]) as part:
                fill_rows(
                    part,
                    initializers[table.index],
                    name=table.name,
                    seed=seed,
                    first=rows.first_row + lo,
                    n=table.rows,
                    cache_dir=segment.cache_dir,
                )


@contextmanager
def _new(segment: Segment, part: Array) -> Iterator[Array]:
    """Give host memory whose values go to a part of a segment, which nobody sees yet."""
    here = part
    if segment.payload.device is not None:
        here = np.empty(part.shape, part.dtype)
    yield here
    if here is not part:
        segment.payload.write(part, here)


@HOST.handles("load")
async def _load(
    host: ShardHost,
    store: str,
    items: Sequence[tuple[int, tuple[str, int, int, int], Any]],
) -> None:
    """Write initial values into shards that no caller sees yet; may be repeated.

    Each item has a shard, the place of the values in it, and these.
    """

    def write() -> None:
        for shard, span, data in items:
            segment = host.get_shard(store, shard).shard.segment
            try:
                like = segment.view(segment.current, Span(*span))
                segment.load(Span(*span), unpack_array(data, like.dtype.name))
            except (LookupError, ValueError) as error:
                raise PushRejectedError(
                    f"{span} of shard {shard} takes no such values: {error}"
                ) from error

    await host.in_thread(write)


@HOST.handles("drop")
async def _drop(host: ShardHost, store: str) -> int:
    """Free the shards of a store and end the calls that wait for them."""
    host.dropped.append(store)
    dropped = [host.shards.pop(key) for key in list(host.shards) if key[0] == store]
    for hosted in dropped:
        if run := hosted.shard.run_state.run:
            gone = StoreClosedError(f"store {hosted.name!r} was closed or deleted")
            host.collectives.end(run, gone)
        host.drop(hosted)
    if host.sockets is not None:
        host.sockets.let_go()
    host.snapshots.drop(store)
    host.drop_view(store)
    free_moving(host.going, host.coming, store)
    if dropped:
        nbytes = sum(hosted.nbytes for hosted in dropped)
        logger.info(
            "%s freed %s of store %r, %d bytes",
            host.worker.address,
            counted(len(dropped), "shard"),
            dropped[0].name,
            nbytes,
        )
    return len(dropped)


@HOST.handles("give_up")
async def _give_up(host: ShardHost, store: str, token: str) -> None:
    """End the wait of a call whose caller has gone."""
    host.give_up(token)


@HOST.handles("versions")
async def _versions(host: ShardHost, store: str) -> list[tuple[int, int]]:
    """Return (shard, version) of the shards held here."""
    return [
        (hosted.index, int(hosted.shard.segment.current.fixed[VERSION]))
        for hosted in host.of(store)
    ]


@HOST.handles("has_step")
async def _has_step(
    host: ShardHost, *, store: str, run: int, owner: int, sequence: int
) -> list[int]:
    """Return the shards held here that have applied a step by now."""

    def has(hosted: HostedShard) -> bool:
        record = hosted.shard.segment.current
        is_there = owner >= 0 or record.fixed[RUN] == run
        return bool(is_there and has_applied(record, owner, sequence))

    hosted_shards = host.of(store)
    found = await host.each(hosted_shards, has)
    return [s.index for s, has_it in zip(hosted_shards, found, strict=True) if has_it]


@HOST.handles("keeps")
async def _keeps(host: ShardHost, store: str, shards: Sequence[int]) -> str:
    """Return the reason in words why calls to some shards wait here; "" for none."""
    for index in shards:
        hosted = host.shards.get((store, index))
        if hosted is not None and (pid := hosted.locked_by()):
            return f"where process {pid} of its machine has locked shard {index}"
    full = host.budget.why_full
    return full and f"where {full}"


@HOST.handles("stats")
async def _stats(host: ShardHost, store: str) -> list[dict[str, Any]]:
    """Return a row of counters per shard held here."""
    n_calls = 0 if host.sockets is None else host.sockets.n_calls
    callers = asdict(counters_of(host.worker.server).total())
    return [
        {
            "shard": hosted.index,
            "worker": host.worker.address,
            "generation": hosted.shard.generation,
            "version": hosted.shard.segment.current.version,
            "epoch": epochs_of(hosted.shard.segment.current).ended,
            "epochs": tuple(epochs_of(hosted.shard.segment.current)),
            "nbytes": _values_nbytes(hosted),
            "device": hosted.shard.segment.payload.device or "",
            "device_nbytes": hosted.shard.segment.device_nbytes,
            "device_work": _device_work(hosted),
            "segment_nbytes": hosted.nbytes,
            "tables": _counted_tables(hosted),
            "locked_reads": hosted.locks_reads,
            "pushes": hosted.shard.segment.header[N_APPLIED],
            "dropped": hosted.shard.segment.header[N_DROPPED],
            "delays": [*delays_of(hosted.shard.segment.header).items()],
            "duplicates": hosted.shard.segment.header[N_DUPLICATES],
            "parked": len(hosted.shard.waiting),
            "copy": getattr(hosted.backing, "worker", ""),
            "behind": hosted.behind,
            "copy_nbytes": hosted.nbytes if hosted.backing else 0,
            "calls": host.n_calls,
            "socket_calls": n_calls,
            "callers": callers,
            # Its old name stays for one release: Python code makes all reads now.
            "plain_reads": 0,
        }
        for hosted in host.of(store)
    ]


def _device_work(hosted: HostedShard) -> dict[str, int]:
    """Return how much a shard's device has copied, launched and waited for."""
    launcher = hosted.shard.segment.payload.launcher
    return launcher.work() if isinstance(launcher, DeviceMemory) else {}


def _values_nbytes(hosted: HostedShard) -> int:
    """Return the bytes of one copy of a shard's values, with unbounded rows."""
    pieces = [(m.piece.table, m.n_rows) for m in hosted.shard.segment.tables]
    rows = sum(t.row_nbytes * n for t, n in pieces if not t.is_bounded)
    return hosted.layout.shard_nbytes(hosted.index) + rows


def _counted_tables(hosted: HostedShard) -> dict[str, dict[str, int]]:
    """Return for each table the rows in a shard, and the steps, equal in all shards.

    For an unbounded table also the numbers of rows that have come and gone.
    """
    segment = hosted.shard.segment
    steps = segment.current.steps[len(segment.pieces) :].tolist()
    found: dict[str, dict[str, int]] = {}
    for memory, n in zip(segment.tables, steps, strict=True):
        told = {"rows": memory.n_rows, "steps": n}
        if memory.unbounded is not None:
            told |= memory.unbounded.counts(memory.since(segment.current))
        found[memory.piece.table.name] = told
    return found
