"""Handlers of runs: the directory and trainers begin, inspect and end them here."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from daskps.cluster.machine.blocks import HEAD_NBYTES
from daskps.cluster.protocol import encoding
from daskps.cluster.protocol.handlers import HOST
from daskps.cluster.protocol.run_start import check_begin
from daskps.cluster.upstream import loads
from daskps.consistency import BSP, decoded
from daskps.epochs import Epochs
from daskps.errors import (
    IllegalStateError,
    LayoutError,
    ProtocolError,
    RunCancelledError,
)
from daskps.shards import run_record
from daskps.shards.installation import indices_of
from daskps.shards.run_record import MOST_ATTEMPTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.host.hosted import HostedShard
    from daskps.reduction import Reducer
    from daskps.shards.steps import Ticket

logger = logging.getLogger(__name__)


@HOST.handles("begin_run")
async def _begin_run(
    host: ShardHost,
    *,
    store: str,
    run: int,
    begin: Mapping[str, Any],
    resident: bool,
) -> list[tuple[int, str, int, int]]:
    """Start a run on every shard of a store held here.

    `begin` has policy, n_ranks, reduce, reset, codec and epochs. Returns shard, name,
    bytes and nonce of the mailboxes that trainers in other processes of the machine may
    fill themselves; a graph run has none.
    """
    check_begin(begin)
    await host.in_thread(partial(encoding.learn, *begin["codec"]))
    rule, function = decoded(begin["policy"]), loads(begin["reduce"])
    n_ranks: int = begin["n_ranks"]
    epochs = begin["epochs"] and Epochs(*begin["epochs"])
    hosted_shards = host.of(store)
    if isinstance(rule, BSP):
        of = n_ranks, function, resident
        await host.in_thread(partial(_take_mailboxes, host, hosted_shards, run, of))

    def start(hosted: HostedShard) -> list[Ticket]:
        _refuse_old(hosted, run)
        done = hosted.shard.begin_run(
            run,
            rule,
            n_ranks,
            reduce=function,
            reset=begin["reset"],
            memory=hosted.mailboxes_of(run),
            epochs=epochs,
        )
        hosted.began = run, hosted.shard.segment.flip
        return done

    await host.each(hosted_shards, start)
    logger.info(
        "%s begins run %d of store %r: %r, %d trainers",
        host.worker.address,
        run,
        hosted_shards[0].name,
        rule,
        n_ranks,
    )
    boxes = [(hosted.index, hosted.mailbox) for hosted in hosted_shards]
    return [(index, *box[1].address) for index, box in boxes if box is not None]


def _refuse_old(hosted: HostedShard, run: int) -> None:
    """Refuse a run older than the one here: a stopped host hears of it late.

    Raises
    ------
    RunCancelledError
        The message names both; the run that is here goes on.
    """
    newest = hosted.shard.run_state.run
    if hosted.mailbox is not None:
        newest = max(newest, hosted.mailbox[0])
    if newest > run:
        raise RunCancelledError(
            f"run {run} of store {hosted.name!r} was to begin after run {newest}, which "
            f"began later; the run is over, start it again"
        )


def _take_mailboxes(
    host: ShardHost,
    hosted_shards: Sequence[HostedShard],
    run: int,
    of: tuple[int, str | Reducer, bool],
) -> None:
    """Take the memory of a run's mailboxes, shared memory if the shards have that."""
    n_ranks, reduce, resident = of
    if all(s.mailboxes_of(run) is not None for s in hosted_shards):
        return
    for hosted in hosted_shards:
        _refuse_old(hosted, run)
    shards = [hosted.shard for hosted in hosted_shards]
    sizes = [one.run_state.mailbox_nbytes(n_ranks, reduce) for one in shards]
    more = sum(one.segment.more_nbytes for one in shards)
    _check_room(host, hosted_shards[0].name, sum(sizes) + more)
    for hosted in hosted_shards:
        hosted.free_mailbox()
    if not resident or not all(hosted.is_shared for hosted in hosted_shards):
        return
    blocks = host.shared_blocks([HEAD_NBYTES + nbytes for nbytes in sizes])
    for hosted, block in zip(hosted_shards, blocks, strict=False):
        block.stamp()
        hosted.mailbox = run, block


def _check_room(host: ShardHost, name: str, nbytes: int) -> None:
    """Refuse a run whose mailboxes do not fit beside the shards.

    Raises
    ------
    LayoutError
        The message names the worker, the need, and the limit.
    """
    # Above this share Dask pauses the worker, and no trainer starts there.
    limit, share = host.worker.memory_limit or 0, host.worker.pause_share
    held = host.held_nbytes
    if limit and held + nbytes > share * limit:
        raise LayoutError(
            f"a BSP run on store {name!r} needs up to {nbytes:,} bytes for gradients "
            f"on worker {host.worker.address}, whose shards take {held:,}: together "
            f"above {share:.0%} of its memory limit of {limit:,}, where Dask pauses or "
            f"ends it; train with fewer trainers, on more workers, or with sync='asp'"
        )


@HOST.handles("end_run")
async def _end_run(
    host: ShardHost,
    *,
    store: str,
    run: int,
    reason: str,
    rounds: int | None = None,
    version: int = 0,
) -> list[tuple[int]]:
    """End a run on every shard of a store held here; return these shards.

    A run in rounds ends after `rounds`, if given, and at least at `version`.
    """
    hosted_shards = host.of(store)

    def end(hosted: HostedShard) -> list[Ticket]:
        shard = hosted.shard
        try:
            return shard.end_run(run, reason, rounds=rounds, version=version)
        except IllegalStateError as error:
            # An unusable store would be worse: the shard ends the run as it is.
            logger.error("shard %d of store %r: %s", hosted.index, hosted.name, error)
            return shard.end_run(run, reason)

    await host.each(hosted_shards, end)
    host.collectives.end(run, RunCancelledError(f"run {run} is over: {reason}"))
    for hosted in hosted_shards:
        if hosted.mailboxes_of(run) is not None:
            hosted.free_mailbox()
    logger.info(
        "%s ends run %d of store %r: %s",
        host.worker.address,
        run,
        hosted_shards[0].name,
        reason,
    )
    return [(hosted.index,) for hosted in hosted_shards]


@HOST.handles("finish", user_code=True)
async def _finish(host: ShardHost, store: str, run: int, rank: int) -> None:
    """Stop waiting for a trainer."""

    def end(hosted: HostedShard) -> list[Ticket]:
        _check_rank(hosted, run, rank)
        return hosted.shard.finish_rank(run, rank)

    await host.each(host.of(store), end)
    host.collectives.leave_out(run, rank)


@HOST.handles("heard")
async def _heard(host: ShardHost, store: str, run: int, n_ranks: int) -> None:
    """Go on without trainers that have ended, as all shards have heard."""
    await host.each(host.of(store), lambda s: s.shard.hear_finished(run, n_ranks))


@HOST.handles("resume", user_code=True)
async def _resume(
    host: ShardHost, *, store: str, run: int, rank: int, attempt: int = 0
) -> list[tuple[int, int]]:
    """Return the position of a rank, per shard held here.

    `attempt` numbers the trainer that replaces the rank's earlier one, 0 for a caller
    that only asks.
    """
    if not 0 <= attempt < MOST_ATTEMPTS:
        raise ProtocolError(f"trainer {rank} of run {run} starts for time {attempt}")

    def find(hosted: HostedShard) -> tuple[int, int]:
        _check_rank(hosted, run, rank)
        return hosted.shard.run_state.resume_rank(run, rank, attempt)

    return await host.each(host.of(store), find)


def _check_rank(hosted: HostedShard, run: int, rank: int) -> None:
    """Refuse an unknown rank of a run: a negative one would index from the end."""
    state = hosted.shard.run_state
    if state.run == run and not 0 <= rank < state.n_ranks:
        raise ProtocolError(f"trainer {rank} of the {state.n_ranks} of run {run}")


@HOST.handles("hold")
async def _hold(
    host: ShardHost,
    *,
    store: str,
    run: int,
    limit: int | None = None,
    finished: Sequence[int] = (),
    reason: str = "",
) -> list[tuple[Any, ...]]:
    """Complete no round of a run from `limit` on, by default the open one.

    `finished` are trainers that have ended, as other shards have heard. With a `reason`
    the shards take no more steps of the run. Returns shard and standing of each shard
    held here.
    """
    error = RunCancelledError(f"run {run} is over: {reason}") if reason else None

    def work(hosted: HostedShard) -> list[Ticket]:
        shard, done = hosted.shard, []
        for rank in finished:
            _check_rank(hosted, run, rank)
        if shard.run_state.why_stopped is None:
            done = [t for rank in finished for t in shard.finish_rank(run, rank)]
        return done + shard.hold_run(run, limit, error)

    def found(hosted: HostedShard) -> tuple[Any, ...]:
        return hosted.index, *hosted.shard.run_state.find_position(run)

    hosted_shards = host.of(store)
    await host.each(hosted_shards, work)
    if error is not None:
        host.collectives.end(run, error)
    return await host.each(hosted_shards, found)


@HOST.handles("goes_on", user_code=True)
async def _goes_on(host: ShardHost, store: str, run: int) -> None:
    """Raise an error if a run cannot go on here."""
    await host.each(host.of(store), lambda s: s.shard.run_state.check_goes_on(run))


@HOST.handles("rounds")
async def _rounds(host: ShardHost, store: str, run: int) -> list[int]:
    """Return the rounds completed in a run, per shard held here."""
    return await host.each(host.of(store), lambda s: s.shard.rounds_of(run))


@HOST.handles("epochs")
async def _epochs(host: ShardHost, store: str) -> list[Epochs]:
    """Return the position of each shard held here in its epochs."""
    return await host.each(
        host.of(store), lambda s: run_record.epochs_of(s.shard.segment.current)
    )


@HOST.handles("changed")
async def _changed(host: ShardHost, store: str, run: int) -> list[list[int] | None]:
    """Return the parameters and tables that a run has changed, per shard held here.

    None for a shard that came here after the run began.
    """

    def find(hosted: HostedShard) -> list[int] | None:
        began, flip = hosted.began
        if began != run:
            return None
        segment = hosted.shard.segment
        changes = zip(indices_of(segment), segment.current.changed, strict=True)
        return sorted({index for index, last in changes if last > flip})

    return await host.each(host.of(store), find)
