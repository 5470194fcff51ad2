"""What the directory and clients ask of a host besides pulls and pushes."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import config
from daskps.cluster import cutting, keeping
from daskps.cluster.messages import (
    Call,
    identity,
    pack_array,
    unpack_array,
    unpack_reply,
)
from daskps.cluster.slot import Slot
from daskps.cluster.upstream import loads
from daskps.consistency import ASP, BSP, SSP, Policy
from daskps.errors import StoreClosedError
from daskps.init import fill
from daskps.layout import Layout, compute_dtype
from daskps.optim import Rule, bind
from daskps.reduction import Node, leaf, reduce_all
from daskps.shards.base import NOTHING
from daskps.shards.dense import Shard
from daskps.shards.segment import MAX_PRODUCERS, N_PRODUCERS, VERSION, Segment

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from daskps.cluster.host import ShardHost

logger = logging.getLogger(__name__)
#: A compilation that takes longer is worth a line in the log.
SLOW_COMPILE_SECONDS = 1.0


async def hello(host: ShardHost) -> dict[str, Any]:
    """Say which protocol this host speaks."""
    return identity()


async def create(
    host: ShardHost,
    *,
    store: str,
    name: str,
    layout: Mapping[str, Any],
    shards: Sequence[int],
    rules: bytes,
    fills: bytes,
) -> int:
    """Make shards of a new store and fill them from their initializers.

    Compiles the update loops, so that the first push finds them ready.
    """
    made = Layout.from_wire(layout)
    cache = str(config.load().cache)

    def build() -> list[tuple[tuple[str, int], Slot]]:
        bindings, slots = {}, {}
        began = time.perf_counter()
        for index, rule in loads(rules).items():
            dtype = made.parameters[index].dtype
            bindings[index] = bind(rule, dtype, cache_dir=cache)
            bindings[index].kernel.warm()
            slots[index] = initial_slots(rule)
        _log_compile(host, name, time.perf_counter() - began)
        initializers, seed = loads(fills)
        slots_made = []
        for i in shards:
            segment = Segment(made, i, slots)
            for piece, weights in zip(segment.pieces, segment.weights[0], strict=True):
                if piece.parameter.index in initializers:
                    fill(
                        weights,
                        initializers[piece.parameter.index],
                        name=piece.parameter.name,
                        shape=piece.parameter.shape,
                        seed=seed,
                        start=piece.start,
                    )
            slots_made.append(
                ((store, i), Slot(name, made, i, Shard(segment, bindings)))
            )
        return slots_made

    built = await host.in_thread(build)
    if store in host.dropped:
        raise StoreClosedError(
            f"store {name!r} was undone or freed while worker "
            f"{host.worker.address} made its shards"
        )
    for key, slot in built:
        host.slots.setdefault(key, slot)
    nbytes = sum(slot.nbytes for _, slot in built)
    where = host.worker.address
    logger.info(
        "%s made %d shards of store %r, %d bytes", where, len(built), name, nbytes
    )
    return len(shards)


def _log_compile(host: ShardHost, name: str, seconds: float) -> None:
    if seconds > SLOW_COMPILE_SECONDS:
        logger.info(
            "%s compiled the optimizer of store %r in %.1f s; the cache directory "
            "keeps the result for other processes and later stores",
            host.worker.address,
            name,
            seconds,
        )


async def load(host: ShardHost, store: str, items: Sequence[Any]) -> None:
    """Write initial values into shards nobody can see yet; repeating it is harmless."""

    def write() -> None:
        for shard, position, start, data in items:
            slot = host.slots[store, shard]
            weights = slot.shard.segment.weights[0][position]
            array = unpack_array(data, weights.dtype.name)
            weights[start : start + len(array)] = array

    await host.in_thread(write)


async def drop(host: ShardHost, store: str) -> int:
    """Free the shards of a store and end the calls that wait for them."""
    host.dropped.append(store)
    dropped = [host.slots.pop(key) for key in list(host.slots) if key[0] == store]
    for slot in dropped:
        host.drop(slot)
    host.snapshots.drop(store)
    if dropped:
        nbytes = sum(slot.nbytes for slot in dropped)
        logger.info(
            "%s freed %d shards of store %r, %d bytes",
            host.worker.address,
            len(dropped),
            dropped[0].name,
            nbytes,
        )
    return len(dropped)


def initial_slots(rule: Rule) -> tuple[float, ...]:
    """Return the initial value of each optimizer slot of a rule."""
    return tuple(rule.slot_init.get(name, 0.0) for name in rule.slots)


def policy_of(code: Sequence[Any]) -> Policy:
    """Rebuild a policy from (name, staleness)."""
    name, staleness = code
    if name == "ssp":
        return SSP(staleness)
    return BSP() if name == "bsp" else ASP()


async def begin_run(
    host: ShardHost,
    *,
    store: str,
    run: int,
    policy: Sequence[Any],
    n_ranks: int,
    reduce: bytes,
    reset: bool,
) -> None:
    """Start a run on every shard of a store held here."""
    rule, function = policy_of(policy), loads(reduce)
    for slot in host.of(store):
        await host.under(
            slot,
            lambda shard: shard.begin_run(run, rule, n_ranks, function, reset=reset),
        )
    logger.info(
        "%s begins run %d of store %r: %r, %d trainers",
        host.worker.address,
        run,
        slot.name,
        rule,
        n_ranks,
    )


async def end_run(host: ShardHost, store: str, run: int, reason: str) -> None:
    """End a run on every shard of a store held here."""
    for slot in host.of(store):
        await host.under(slot, lambda shard: shard.end_run(run, reason))
    logger.info(
        "%s ends run %d of store %r: %s", host.worker.address, run, slot.name, reason
    )


async def finish(host: ShardHost, store: str, run: int, rank: int) -> None:
    """Wait for a trainer no longer."""
    for slot in host.of(store):
        await host.under(slot, lambda shard: shard.finish(run, rank))


async def resume(
    host: ShardHost, store: str, run: int, rank: int
) -> list[tuple[int, int]]:
    """Return where a trainer that starts again stands, per shard held here."""
    return [
        await host.under(slot, lambda shard: shard.resume(run, rank))
        for slot in host.of(store)
    ]


async def hold(host: ShardHost, store: str, run: int, limit: int | None) -> None:
    """Complete no round of a run from `limit` on, by default the open one."""
    for slot in host.of(store):
        await host.under(slot, lambda shard: shard.hold(run, limit))


async def rounds(host: ShardHost, store: str, run: int) -> list[int]:
    """Return the rounds completed in a run, per shard held here."""
    return [
        await host.under(slot, lambda shard: shard.rounds_of(run))
        for slot in host.of(store)
    ]


async def give_up(host: ShardHost, store: str, token: str) -> None:
    """Let a call go that waits for nobody any more."""
    host.give_up(token)


async def aggregate(
    host: ShardHost,
    store: str,
    contributions: Sequence[Sequence[Any]],
    reduce: bytes,
) -> list[tuple[int, int, Any]]:
    """Reduce contributions to the shards held here; the shards stay as they are.

    Each contribution is a list of (shard, position, data); so is the result.
    """
    function = loads(reduce)
    layout = host.of(store)[0].layout

    def work() -> list[tuple[int, int, Any]]:
        keys = sorted({(s, p) for rows in contributions for s, p, _ in rows})
        nodes: dict[int, Node] = {}
        for rank, rows in enumerate(contributions):
            arrays = []
            for shard, position, data in rows:
                dtype = compute_dtype(layout.pieces[shard][position].parameter.dtype)
                # Copied: a sum is made in place, and the caller may be this process.
                array = np.array(unpack_array(data, dtype))
                arrays.append((keys.index((shard, position)), array))
            nodes[rank] = leaf(arrays, 1.0, function)
        reduced = reduce_all(nodes, len(contributions), function)
        return [(*keys[key], pack_array(array)) for key, array in reduced.items()]

    found: list[tuple[int, int, Any]] = await host.in_thread(work)
    return found


async def versions(host: ShardHost, store: str) -> list[tuple[int, int]]:
    """Return (shard, version) of the shards held here."""
    return [
        (slot.index, int(slot.shard.segment.current.fixed[VERSION]))
        for slot in host.of(store)
    ]


async def stats(host: ShardHost, store: str) -> list[dict[str, Any]]:
    """Return a row of counters per shard held here."""
    return [
        {
            "shard": slot.index,
            "worker": host.worker.address,
            "generation": slot.shard.generation,
            "version": slot.shard.segment.current.version,
            "nbytes": slot.nbytes,
            "pushes": slot.shard.n_pushes,
            "duplicates": slot.shard.n_duplicates,
            "parked": len(slot.shard.waiting),
            "calls": host.n_calls,
        }
        for slot in host.of(store)
    ]


def is_crowded(host: ShardHost, call: Call) -> bool:
    """Return whether a shard may have no room for the producer of a call."""
    if call.kind == NOTHING or call.run:
        return False
    slots = (host.slots.get((call.store, part.shard)) for part in call.parts)
    return any(slot and slot.shard.needs_room(call.producer) for slot in slots)


async def make_room(host: ShardHost, call: Call) -> None:
    """Ask the directory which producers ended, where a shard has no room for one."""
    if call.kind == NOTHING or call.run:
        return
    for part in call.parts:
        slot = host.slots.get((call.store, part.shard))
        if slot is None:
            continue
        record = slot.shard.segment.current
        if record.fixed[N_PRODUCERS] < MAX_PRODUCERS:
            continue
        open_ids = await host.under(
            slot,
            lambda shard: (
                shard.open_producers() if shard.needs_room(call.producer) else []
            ),
        )
        if open_ids:
            reply = await host.worker.scheduler.daskps_directory(
                method="ended", producers=open_ids
            )
            ended = unpack_reply(reply, "the scheduler")["value"]
            await host.under(slot, partial(Shard.close_producers, ids=ended))


METHODS: dict[str, Callable[..., Awaitable[Any]]] = {
    f.__name__: f
    for f in (
        hello,
        create,
        load,
        drop,
        begin_run,
        end_run,
        finish,
        resume,
        hold,
        rounds,
        give_up,
        aggregate,
        versions,
        stats,
        *cutting.METHODS,
        *keeping.METHODS,
    )
}
