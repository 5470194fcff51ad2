"""Handlers of all-reduces: trainers bring arrays, and get the reduced ones."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.host.collectives import Offered, PartPlace
from daskps.cluster.wire.handlers import HOST
from daskps.cluster.wire.packing import pack_array, unpack_array
from daskps.cluster.wire.wellformed import check
from daskps.errors import ClockError, ProtocolError, RunCancelledError
from daskps.layout.arrays import DTYPES, FLOATS
from daskps.limits import MOST_PARAMETERS
from daskps.reduction import OPERATIONS
from daskps.shards.memory.format import LIVE, N_RANKS, RUN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.host.collectives import Collectives, Gathering
    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.host.hosted import HostedShard
    from daskps.typing import Array

#: All-reduces may take at most this share of the memory that the shards leave.
SHARE = 0.5


def shard_of(part: int, parts: int, n_shards: int) -> int:
    """Return the shard whose host reduces a part."""
    return part * n_shards // parts


def brought_of(op: str, arrays: Sequence[Sequence[Any]], clock: int) -> Offered:
    """Return the arrays that a rank announces in a message, or refuse the message.

    Raises
    ------
    ProtocolError
        If no trainer sends such a message.
    """
    if op not in OPERATIONS or not 1 <= len(arrays) <= MOST_PARAMETERS:
        raise ProtocolError(f"an allreduce {op!r:.60} of {len(arrays)} arrays")
    for name, shape, dtype in arrays:
        is_known = dtype in (FLOATS if op == "mean" else DTYPES)
        if not is_known or any(not 0 <= n < 2**47 for n in shape):
            raise ProtocolError(
                f"an allreduce of {name!r:.60}, {list(shape)!r:.60}, {dtype!r:.60}"
            )
    about = tuple((name, tuple(shape), dtype) for name, shape, dtype in arrays)
    return Offered(op, about, clock)


@dataclass(frozen=True)
class AskedWire:
    """Fields of a trainer's message about its all-reduce."""

    number: int
    floor: int
    operation: str
    brought: Sequence[tuple[str, Sequence[int], str]]
    #: The trainer's clock, or -1 if ranks may be at several clocks.
    clock: int
    parts: int


@HOST.handles("allreduce", user_code=True)
async def allreduce(
    host: ShardHost,
    *,
    store: str,
    run: int,
    rank: int,
    asked: dict[str, Any],
    given: Sequence[tuple[int, Sequence[Any] | None]],
    wait_seconds: float,
) -> tuple[int, list[tuple[int, str, Sequence[int], Sequence[Any]]]]:
    """Take a rank's arrays into an all-reduce; return the state of each part.

    `asked` has the fields of :class:`AskedWire`; `given` are the rank's arrays, by
    part, or None for those that it has sent before. Returns the first number that any
    rank may still ask for; and for each part "done" with the ranks that are not in it
    and the arrays, "waits", or "send" if the rank must send its arrays again.
    """
    check(AskedWire, asked, "an allreduce")
    about = brought_of(asked["operation"], asked["brought"], asked["clock"])
    parts = asked["parts"]
    shards = [_hosted(host, store, part, parts) for part, _ in given]
    if not shards or len({part for part, _ in given}) < len(given):
        raise ProtocolError(f"an allreduce of parts {[p for p, _ in given]!r:.60}")
    [live] = await host.each(shards[:1], partial(_live_ranks, run=run, rank=rank))
    number, floor = asked["number"], asked["floor"]
    if not 0 <= floor <= number:
        raise ProtocolError(f"allreduce {number}, and none below {floor}")
    held, room = host.collectives, room_at(host)
    least = held.told(
        run, rank, floor, [r for r, is_live in enumerate(live) if is_live]
    )
    found: list[tuple[int, Gathering]] = []
    for part, packed in given:
        place = PartPlace(run, number, part, parts)
        gathering = held.join(place, rank, about, live=live, room=room)
        found.append((part, gathering))
        if packed is None:
            continue
        arrays = _unpacked(about, place, packed)
        take = partial(held.take, gathering, rank, arrays)
        if gathering.nbytes <= host.inline_nbytes:
            take()
        else:
            await host.in_thread(take)
            # Else the host would keep the message as long as this waits.
            wait_seconds = 0.0
    # Not if the rank must send arrays first: nobody would wait for the rest.
    if wait_seconds and all(rank in g.present or g.done for _, g in found):
        await _wait([gathering for _, gathering in found], held, wait_seconds)
    return least, [_answer(part, rank, gathering) for part, gathering in found]


def _hosted(host: ShardHost, store: str, part: int, parts: int) -> HostedShard:
    n_shards = host.of(store)[0].layout.n_shards
    if not 0 <= part < parts <= n_shards:
        raise ProtocolError(
            f"part {part} of {parts} of an allreduce by {n_shards} shards"
        )
    return host.get_shard(store, shard_of(part, parts, n_shards))


def _live_ranks(hosted: HostedShard, *, run: int, rank: int) -> list[bool]:
    """Return for each rank of a run whether the others wait for it."""
    state, record = hosted.shard.run_state, hosted.shard.segment.current
    if record.plain[RUN] != run:
        raise state.why_over(run)
    state.check_goes_on(run)
    live: list[bool] = (record.ranks[: record.plain[N_RANKS], LIVE] == 1).tolist()
    if not 0 <= rank < len(live):
        raise ProtocolError(f"trainer {rank} of the {len(live)} of run {run}")
    if not live[rank]:
        raise ClockError(f"trainer {rank} has finished and takes part in no allreduce")
    return live


def room_at(host: ShardHost) -> int | None:
    """Return how many bytes all-reduces may take here, None if there is no limit."""
    limit = host.worker.memory_limit
    if not limit:
        return None
    shards = sum(hosted.nbytes for hosted in host.shards.values())
    return max(0, int(SHARE * (host.worker.pause_share * limit - shards)))


def _unpacked(about: Offered, place: PartPlace, packed: Sequence[Any]) -> list[Array]:
    """Return a rank's arrays of a part, in memory of their own."""
    if len(packed) != len(about.arrays):
        raise ProtocolError(f"{len(packed)} arrays for {len(about.arrays)}")
    arrays = []
    for index, (name, _, dtype) in enumerate(about.arrays):
        start, stop = about.extent(index, place.part, place.parts)
        array = unpack_array(packed[index], dtype)
        if array.shape != (stop - start,):
            raise ProtocolError(
                f"{array.shape} elements of {name!r:.60} for the {stop - start} of a part"
            )
        # Copied: sums are made in place, and the caller may be in this process.
        arrays.append(np.array(array))
    return arrays


async def _wait(of: Sequence[Gathering], held: Collectives, seconds: float) -> None:
    """Wait until all parts are done, or one has failed."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        loop.call_soon_threadsafe(event.set)

    for gathering in of:
        held.wait(gathering, wake)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not all(g.done for g in of) and not any(g.error for g in of):
                await event.wait()
                event.clear()
    held.wait_no_more(of, wake)


def _answer(
    part: int, rank: int, gathering: Gathering
) -> tuple[int, str, Sequence[int], Sequence[Any]]:
    if gathering.error is not None:
        raise gathering.error
    if gathering.result is not None:
        arrays = [pack_array(array) for array in gathering.result]
        return part, "done", sorted(gathering.absent), arrays
    return part, "waits" if rank in gathering.present else "send", (), ()


@HOST.handles("reduced")
async def reduced(
    host: ShardHost,
    *,
    store: str,
    run: int,
    number: int,
    operation: str,
    brought: Sequence[tuple[str, Sequence[int], str]],
    clock: int,
) -> list[Any] | None:
    """Return the result of an all-reduce if a rank here has got it."""
    whole = host.collectives.find(run, number)
    if whole is None or whole.brought != brought_of(operation, brought, clock):
        return None
    return [pack_array(flat) for flat in whole.flats]


@HOST.handles("end_collectives")
async def end_collectives(host: ShardHost, run: int) -> None:
    """Drop all all-reduces of a run."""
    host.collectives.end(run, RunCancelledError(f"run {run} is over"))
