"""A host's part in a cut: it holds its shards, copies them, and releases them.

It also tells the shards of a cut which steps were given up.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from daskps.cluster.keys import copy_key, saved_key
from daskps.cluster.protocol.handlers import HOST
from daskps.cluster.protocol.reports import OrderWire, pack_report
from daskps.cluster.protocol.wellformed import check
from daskps.errors import LayoutError
from daskps.layout.chunks import WHOLE, shards_of
from daskps.shards import cut_requests
from daskps.shards.cuts.cut import Order, broken
from daskps.shards.frozen import BegunCopy, FrozenShard, HeldShard, needed_nbytes
from daskps.shards.steps import Ready, Step, Ticket

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.host.hosted import HostedShard
    from daskps.shards.shard import Shard

logger = logging.getLogger(__name__)


def _concerned(host: ShardHost, store: str, index: int | None) -> list[HostedShard]:
    """Return the shards of a store that a cut copies anything of."""
    hosted_shards = host.of(store)
    wanted = {*shards_of(hosted_shards[0].layout, index)}
    return [hosted for hosted in hosted_shards if hosted.index in wanted]


@HOST.handles("prepare_cut")
async def prepare_cut(
    host: ShardHost, *, store: str, cut: str, index: int | None, hold: bool = False
) -> None:
    """Take the memory for the copies, before any push has to wait for it.

    If there is not enough, a save holds the shards until they are written; so does a
    reshard, by `hold`, and needs none.

    Raises
    ------
    LayoutError
        If a snapshot has no memory: its copies would stay as long as the user's object.
    """
    hosted_shards = _concerned(host, store, index)
    claim = host.snapshots.claim(store, cut)
    one = host.of(store)[0]
    host.snapshots.stores[store] = one.name, one.layout
    claim.holds |= hold
    claim.asked |= hold
    if claim.holds:
        return
    missing = {
        hosted.index: hosted.shard.segment
        for hosted in hosted_shards
        if hosted.index not in claim.begun
    }
    need = sum(needed_nbytes(segment, index) for segment in missing.values())

    def allocate() -> None:
        for shard, segment in missing.items():
            claim.begun[shard] = BegunCopy.of(segment, index)

    with host.budget.copying(need) as lack:
        if not lack:
            await host.in_thread(allocate)
        elif index == WHOLE:
            claim.holds = True
        else:
            raise LayoutError(
                f"a snapshot of store {hosted_shards[0].name!r} needs {need:,} bytes for "
                f"copies on worker {host.worker.address}, of whose memory {lack}; nothing "
                f"was copied. Write the store to files with save(url), which needs no "
                f"such room, let go of earlier snapshots, take one of a single parameter "
                f"with to_dask_array(), or give the worker more memory"
            )


@HOST.handles("begin_cut")
async def begin_cut(
    host: ShardHost,
    *,
    store: str,
    cut: str,
    attempt: int,
    index: int | None,
    lease_seconds: float,
) -> list[list[Any]]:
    """Hold new steps on the shards concerned; report the steps they have applied."""
    hosted_shards = _concerned(host, store, index)
    claim = host.snapshots.claim(store, cut)
    if attempt < claim.attempt:
        raise broken("it has begun again since")
    claim.attempt = attempt
    claim.end_lease()
    loop = asyncio.get_running_loop()

    def expire() -> None:
        logger.warning("daskps: a cut of store %s was left to itself", store)
        released = drop_cut(host, store, cut, attempt)
        claim.expired = asyncio.ensure_future(released)

    claim.lease = loop.call_later(lease_seconds, expire)
    name = cut, attempt  # a message may be late

    def begin(hosted: HostedShard) -> list[Any]:
        # The directory ended an earlier cut without a message.
        released = _release(hosted)
        return [*released, cut_requests.begin_cut(hosted.shard, name, hosted.index)]

    begun = await host.each(hosted_shards, begin)
    if host.snapshots.is_over(cut):
        # The cut was given up meanwhile: only this call can release these shards.
        await drop_cut(host, store, cut)
        raise broken("it was given up")
    return [pack_report(report) for *_, report in begun]


@HOST.handles("fill_cut")
async def fill_cut(
    host: ShardHost,
    *,
    store: str,
    cut: str,
    attempt: int,
    index: int | None,
    order: Mapping[str, Any],
) -> list[tuple[int, ...]]:
    """Wait until each shard has reached the cut, copy it and release it.

    Returns shard, version and bytes of each, and the number of rows of its
    unbounded tables; for a copy of everything also the number of candidates.
    """
    check(OrderWire, order, "the order of a cut")
    hosted_shards = _concerned(host, store, index)
    claim = host.snapshots.claim(store, cut)
    begun = claim.begun.keys()
    if not claim.holds and not begun >= {hosted.index for hosted in hosted_shards}:
        raise broken("no memory was taken for it")
    lacks: dict[int, list[tuple[int, int]]] = {}
    for shard, owner, sequence in order["missing"]:
        lacks.setdefault(shard, []).append((owner, sequence))

    async def copy(hosted: HostedShard) -> tuple[int, ...]:
        name, lacking = (cut, attempt), tuple(lacks.get(hosted.index, ()))
        what = Order(lacking, order["run"], order["rounds"])
        ready = await _reached(host, hosted, name, what)
        # Taken out: if the cut begins again meanwhile, it reads into other memory.
        room = None if claim.holds else claim.begun.pop(hosted.index)
        made = await _freeze(host, hosted, name, room=room, flip=ready.flip)
        if claim.holds and not claim.asked:
            logger.warning(
                "daskps: worker %s has no room for a copy of shard %d of store %r, %d "
                "bytes; pushes to it wait until it is saved",
                *(host.worker.address, hosted.index, hosted.name, made.nbytes),
            )
        key = copy_key(store, index, hosted.index, ready.version)
        if index == WHOLE:
            key = saved_key(cut, hosted.index, ready.version)
        claim.copies[key] = made
        return hosted.index, ready.version, made.nbytes, *made.counts

    found = await asyncio.gather(*map(copy, hosted_shards), return_exceptions=True)
    versions = []
    for answer in found:
        if isinstance(answer, BaseException):
            raise answer
        versions.append(answer)
    claim.end_lease()
    return versions


async def _freeze(
    host: ShardHost,
    hosted: HostedShard,
    name: tuple[str, int],
    *,
    room: BegunCopy | None,
    flip: int,
) -> FrozenShard:
    """Copy a shard that has reached a cut, and release it.

    Where there is no room a save reads the shard in place; pushes wait until the cut
    ends.
    """
    segment = hosted.shard.segment

    def read() -> FrozenShard | None:
        # Without the mutex: pulls go on, and pushes cannot overwrite the flip that is
        # read.
        if room is not None:
            return room.read(segment, flip)
        return HeldShard(segment, flip, needed_nbytes(segment, WHOLE))

    made = await host.run_for(hosted, read)

    def end(shard: Shard) -> list[Any]:
        is_held = cut_requests.holds_steps(shard, name)
        return [is_held, *(() if room is None else cut_requests.end_cut(shard, name))]

    is_held, *_ = await host.under(hosted, end)
    if made is None or not is_held:
        raise broken("updates ran into the copy")
    return made


class _Reached(Future[None]):
    """Done with its ticket."""

    def one_done(self) -> None:
        """Hear of that, in the thread that has served the shard."""
        self.set_result(None)


async def _reached(
    host: ShardHost, hosted: HostedShard, name: tuple[str, int], order: Order
) -> Ready:
    """Wait until a shard has reached the cut."""
    reached = _Reached()
    ticket = Ticket(Step(), owner=reached)
    take = partial(cut_requests.follow_order, name=name, order=order, ticket=ticket)
    await host.under(hosted, take)
    # This ends at the latest with the cut: by its release, its lease, or the store.
    await asyncio.shield(asyncio.wrap_future(reached))
    if isinstance(ticket.outcome, Ready):
        return ticket.outcome
    raise ticket.outcome or broken("it ended without a word")


@HOST.handles("drop_cut")
async def drop_cut(
    host: ShardHost, store: str, cut: str, attempt: int | None = None
) -> None:
    """Release the shards and free the copies, and the memory for them.

    With an `attempt`, only that attempt and earlier ones: the message may be late,
    after the next attempt has begun or has copied. The memory then stays for that one.
    """
    if attempt is None:
        host.snapshots.drop(store, cut)
    else:
        claim = host.snapshots.claim(store, cut)
        if attempt >= claim.attempt:
            claim.copies.clear()
            claim.end_lease()
    # Also for an unknown cut: its beginning may still be in the inbox.
    release = partial(_release, cut=cut, attempt=attempt)
    await host.each([s for (uid, _), s in host.shards.items() if uid == store], release)


def _release(
    hosted: HostedShard, cut: str | None = None, attempt: int | None = None
) -> list[Ticket]:
    """End a cut, by default any that holds the shard, unless it has begun again."""
    held: Any = hosted.shard.cut
    if held is None:
        return []
    name, number = held.name
    if cut not in (None, name) or (attempt is not None and number > attempt):
        return []
    return cut_requests.end_cut(hosted.shard, held.name)


@HOST.handles("mark_lost")
async def _excuse(
    host: ShardHost, *, store: str, cut: str, attempt: int, producers: Sequence[int]
) -> None:
    """Stop waiting for the steps of producers that have ended."""
    await host.each(
        host.of(store),
        lambda s: cut_requests.mark_owners_lost(s.shard, (cut, attempt), producers),
    )


@HOST.handles("acknowledge")
async def _settle(
    host: ShardHost, *, store: str, run: int, owner: int, floor: int
) -> None:
    """Hear which steps of an owner are no longer under way."""
    await host.each(
        host.of(store),
        lambda s: cut_requests.acknowledge_steps(s.shard, run, owner, floor),
    )
