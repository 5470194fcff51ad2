"""What the directory and trainers ask of a host about runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from daskps import codecs
from daskps.cluster.upstream import loads
from daskps.cluster.wire import encoding
from daskps.cluster.wire.begin import check_begin
from daskps.cluster.wire.handlers import HOST
from daskps.consistency import ASP, BSP, SSP, Policy
from daskps.errors import (
    IllegalStateError,
    LayoutError,
    ProtocolError,
    RunCancelledError,
)
from daskps.shards.memory.areas import PAGE_NBYTES
from daskps.shards.memory.format import N_RANKS, RUN
from daskps.shards.rounds.mailbox import Mailbox
from daskps.shards.run_record import MOST_ATTEMPTS
from daskps.shards.shard import Shard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.host.hosted import HostedShard
    from daskps.reduction import Reducer
    from daskps.shards.steps import Ticket

logger = logging.getLogger(__name__)
#: Ends a run on a shard.
End = Callable[[Shard], "list[Ticket]"]


def policy_of(code: Sequence[Any]) -> Policy:
    """Rebuild a policy from (name, staleness)."""
    name, staleness = code
    if name == "ssp":
        return SSP(staleness)
    return BSP() if name == "bsp" else ASP()


@HOST.handles("begin_run", checks={"begin": check_begin})
async def begin_run(
    host: ShardHost,
    *,
    store: str,
    run: int,
    begin: Mapping[str, Any],
    resident: bool,
) -> list[tuple[int, str, int, int]]:
    """Start a run on every shard of a store held here.

    `begin` says policy, n_ranks, reduce, reset and codec. Returns shard, name, bytes
    and nonce of the mailboxes that trainers in other processes of the machine may fill
    themselves; those of a graph run are nobody's.
    """
    if begin["codec"]:
        await host.in_thread(partial(encoding.warm, codecs.named(begin["codec"])))
    rule, function = policy_of(begin["policy"]), loads(begin["reduce"])
    n_ranks: int = begin["n_ranks"]
    slots = host.of(store)
    if isinstance(rule, BSP):
        take = partial(_take_mailboxes, host, slots, run, (n_ranks, function, resident))
        await host.in_thread(take)
    for slot in slots:
        start = partial(
            _begin,
            slot,
            run,
            policy=rule,
            n_ranks=n_ranks,
            reduce=function,
            reset=begin["reset"],
            memory=slot.mailboxes_of(run),
        )
        await host.under(slot, start)
    logger.info(
        "%s begins run %d of store %r: %r, %d trainers",
        host.worker.address,
        run,
        slot.name,
        rule,
        n_ranks,
    )
    return [
        (slot.index, box.name, box.nbytes, box.nonce)
        for slot in slots
        if slot.mailbox is not None and (box := slot.mailbox[1]).is_shared
    ]


def _begin(slot: HostedShard, run: int, shard: Shard, **how: Any) -> list[Ticket]:
    """Begin a run on a shard, under its mutex."""
    _refuse_old(slot, run)
    done = shard.begin_run(run=run, **how)
    slot.began = run, shard.segment.flip
    return done


def _refuse_old(slot: HostedShard, run: int) -> None:
    """Refuse a run older than the one there: a host that was stopped hears of it late.

    Raises
    ------
    RunCancelledError
        Naming both; what is there goes on.
    """
    newest = int(slot.shard.segment.current.fixed[RUN])
    if slot.mailbox is not None:
        newest = max(newest, slot.mailbox[0])
    if newest > run:
        raise RunCancelledError(
            f"run {run} of store {slot.name!r} was to begin after run {newest}, which "
            f"began later; the run is over, start it again"
        )


def _take_mailboxes(
    host: ShardHost,
    slots: Sequence[HostedShard],
    run: int,
    of: tuple[int, str | Reducer, bool],
) -> None:
    """Take the memory of a run's mailboxes, shared where the shards are."""
    n_ranks, reduce, resident = of
    if all(slot.mailbox is not None and slot.mailbox[0] == run for slot in slots):
        return
    for slot in slots:
        _refuse_old(slot, run)
    sizes = [Mailbox.nbytes_of(s.shard.segment.pieces, n_ranks, reduce) for s in slots]
    more = sum(slot.shard.segment.more_nbytes for slot in slots)
    _check_room(host, slots[0].name, sum(sizes) + more)
    for slot in slots:
        slot.free_mailbox()
    if not resident or not all(slot.is_shared for slot in slots):
        return
    blocks = host.shared_blocks([PAGE_NBYTES + nbytes for nbytes in sizes])
    for slot, block in zip(slots, blocks, strict=False):
        block.stamp()
        slot.mailbox = run, block


def _check_room(host: ShardHost, name: str, nbytes: int) -> None:
    """Refuse a run whose mailboxes do not fit beside the shards.

    Raises
    ------
    LayoutError
        Naming the worker, what is needed, and the limit.
    """
    # Above its share Dask pauses the worker, and no trainer starts there.
    limit, share = host.worker.memory_limit or 0, host.worker.pause_share
    held = sum(slot.nbytes for slot in host.slots.values())
    if limit and held + nbytes > share * limit:
        raise LayoutError(
            f"a BSP run on store {name!r} needs up to {nbytes:,} bytes for gradients "
            f"on worker {host.worker.address}, whose shards take {held:,}: together "
            f"above {share:.0%} of its memory limit of {limit:,}, where Dask pauses or "
            f"ends it; train with fewer trainers, on more workers, or with sync='asp'"
        )


@HOST.handles("end_run")
async def end_run(
    host: ShardHost,
    *,
    store: str,
    run: int,
    reason: str,
    rounds: int | None = None,
    version: int = 0,
) -> list[tuple[int]]:
    """End a run on every shard of a store held here; return which these are.

    They end after `rounds`, where a run in rounds says so, and at least at `version`.
    """
    slots = host.of(store)
    end = partial(Shard.end_run, run=run, reason=reason)
    last = partial(end, rounds=rounds, version=version)
    await asyncio.gather(*(_end(host, slot, last, end) for slot in slots))
    for slot in slots:
        if slot.mailbox is not None and slot.mailbox[0] == run:
            slot.free_mailbox()
    logger.info(
        "%s ends run %d of store %r: %s",
        host.worker.address,
        run,
        slots[0].name,
        reason,
    )
    return [(slot.index,) for slot in slots]


async def _end(host: ShardHost, slot: HostedShard, last: End, as_it_is: End) -> None:
    """End a run on one shard after the last common round, or where that is gone, now."""
    try:
        await host.under(slot, last)
    except IllegalStateError as error:
        # A store that nobody can use would not be better.
        logger.error("shard %d of store %r: %s", slot.index, slot.name, error)
        await host.under(slot, as_it_is)


@HOST.handles("finish", user_code=True)
async def finish(host: ShardHost, store: str, run: int, rank: int) -> None:
    """Wait for a trainer no longer."""
    for slot in host.of(store):
        _check_rank(slot, run, rank)
        await host.under(slot, lambda shard: shard.finish_rank(run, rank))


@HOST.handles("resume", user_code=True)
async def resume(
    host: ShardHost, *, store: str, run: int, rank: int, attempt: int = 0
) -> list[tuple[int, int]]:
    """Return where a rank stands, per shard held here.

    `attempt` is which of its trainers takes the place of the one before it; 0 is nobody,
    who only asks.
    """
    if not 0 <= attempt < MOST_ATTEMPTS:
        raise ProtocolError(f"trainer {rank} of run {run} starts for time {attempt}")
    for slot in host.of(store):
        _check_rank(slot, run, rank)
    return [
        await host.under(
            slot, lambda shard: shard.run_state.resume_rank(run, rank, attempt)
        )
        for slot in host.of(store)
    ]


def _check_rank(slot: HostedShard, run: int, rank: int) -> None:
    """Refuse a rank that a run has not: a negative one would mean one from the end."""
    fixed = slot.shard.segment.current.fixed
    if fixed[RUN] == run and not 0 <= rank < fixed[N_RANKS]:
        raise ProtocolError(f"trainer {rank} of the {int(fixed[N_RANKS])} of run {run}")


@HOST.handles("hold")
async def hold(
    host: ShardHost,
    *,
    store: str,
    run: int,
    limit: int | None = None,
    finished: Sequence[int] = (),
    reason: str = "",
) -> list[tuple[Any, ...]]:
    """Complete no round of a run from `limit` on, by default the open one.

    `finished` are trainers of which other shards have heard that they ended. With a
    `reason` no step of the run is taken any more. Returns shard and standing of each
    shard held here.
    """
    error = RunCancelledError(f"run {run} is over: {reason}") if reason else None

    def work(shard: Shard) -> list[Ticket]:
        done = []
        if shard.run_state.why_stopped is None:
            done = [t for rank in finished for t in shard.finish_rank(run, rank)]
        return done + shard.hold_run(run, limit, error)

    async def one(slot: HostedShard) -> tuple[Any, ...]:
        for rank in finished:
            _check_rank(slot, run, rank)
        await host.under(slot, work)
        standing = await host.under(
            slot, lambda shard: shard.run_state.find_standing(run)
        )
        return slot.index, *standing.to_wire()

    return await asyncio.gather(*map(one, host.of(store)))


@HOST.handles("goes_on", user_code=True)
async def goes_on(host: ShardHost, store: str, run: int) -> None:
    """Raise why a run cannot go on here, if so."""
    for slot in host.of(store):
        await host.under(slot, lambda shard: shard.run_state.check_goes_on(run))


@HOST.handles("rounds")
async def rounds(host: ShardHost, store: str, run: int) -> list[int]:
    """Return the rounds completed in a run, per shard held here."""
    return [
        await host.under(slot, lambda shard: shard.rounds_of(run))
        for slot in host.of(store)
    ]


@HOST.handles("changed")
async def changed(host: ShardHost, store: str, run: int) -> list[list[int] | None]:
    """Return the parameters that a run has changed, per shard held here.

    None for a shard that has come here since it began.
    """
    return [
        await host.under(slot, partial(_changed, slot, run)) for slot in host.of(store)
    ]


def _changed(slot: HostedShard, run: int, shard: Shard) -> list[int] | None:
    began, flip = slot.began
    if began != run:
        return None
    segment = shard.segment
    changes = zip(segment.pieces, segment.current.changed, strict=True)
    return sorted({p.parameter.index for p, last in changes if last > flip})
