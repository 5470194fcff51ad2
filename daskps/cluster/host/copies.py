"""Copies of shards of other hosts: those that move here, and those that stay copies.

A copy is filled with the parts of its shard as they are read, and with *states*. One
that moves here has the last one when its owner stops. A *second copy* follows: it asks
for one state after the other, and becomes the owner where its owner's worker has gone.
The other end is :mod:`daskps.cluster.host.moving`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import config
from daskps.cluster.host.adoption import row_of
from daskps.cluster.host.coming import Asking, Coming
from daskps.cluster.host.growth import Budget
from daskps.cluster.host.moving import check_open
from daskps.cluster.host.rules import Rules
from daskps.cluster.host.store_messages import make_shards
from daskps.cluster.machine.blocks import HEAD_NBYTES
from daskps.cluster.protocol import encoding
from daskps.cluster.protocol.handlers import HOST
from daskps.cluster.protocol.packing import bytes_of, unpack_array
from daskps.cluster.protocol.states import unpack_state
from daskps.cluster.protocol.wellformed import layout_of
from daskps.cluster.upstream import loads
from daskps.epochs import Epochs
from daskps.errors import (
    ConsistencyError,
    DaskPSError,
    StaleGenerationError,
)
from daskps.layout.chunks import WHOLE
from daskps.layout.spans import CANDIDATES, COUNTS, IDS, Span
from daskps.shards import run_record
from daskps.shards.arrays.payload import NUMPY
from daskps.shards.frozen import spans_of, unbounded_of
from daskps.shards.installation import Counted, Installation
from daskps.shards.memory.format import GENERATION
from daskps.shards.states import Mark, State

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping, Sequence

    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.host.hosted import HostedShard
    from daskps.typing import Array

logger = logging.getLogger(__name__)
#: Bytes of a part that is read at a time, and parts of a message.
_PART_NBYTES, _PARTS = 2**22, 8
#: States before the last one: until so few bytes have changed, or so many were sent.
_LITTLE_NBYTES, _MOST_STATES = 2**20, 4
#: How soon a second copy asks its owner again that could not answer.
_PAUSE_SECONDS = 0.05
#: How soon it asks for another socket.
_SOCKET_SECONDS = 10.0


@HOST.handles("move_fill")
async def _fill(
    host: ShardHost,
    *,
    store: str,
    about: Mapping[str, Any],
    shard: int,
    move: str,
    source: str,
    stays: bool = False,
) -> None:
    """Have a copy of a shard made here, and bring it near.

    `about` is the store: its name, layout, rules and cluster. One that `stays` a copy
    need not be near its last state.
    """
    layout, where = layout_of(about["layout"]), host.worker.address
    if host.leaves():
        raise ConsistencyError(f"worker {where} is leaving too")
    rules = Rules(layout, about["rules"])

    def build() -> HostedShard:
        members = host.members(about["cluster"])
        rules.warm(durable=members is not None)
        of = about["name"], [shard], [rules], [NUMPY]
        (made,) = make_shards(members, *of, ask=Budget(host).ask, is_filled=False)
        return made

    coming = Coming(move, await host.in_thread(build), source, Mark(0, 0))
    if (store, shard) in host.coming:
        host.coming.pop((store, shard)).close()
    try:
        check_open(host, about["name"], store, move)
    except DaskPSError:
        coming.close()
        raise
    host.coming[store, shard] = coming
    begun = await _ask(host, coming, "move_begin", store)
    await _copied(host, coming, store, begun)
    coming.mark = Mark(*begun["mark"])
    before = coming.hosted.nbytes
    for _ in range(_MOST_STATES):
        packed = await _ask(host, coming, "move_state", store, since=coming.mark)
        nbytes = (await _install(host, coming, packed)).nbytes
        # Pushes wait while a state is copied: no more of them where they stay as large.
        if nbytes <= _LITTLE_NBYTES or nbytes > before // 2:
            break
        before = nbytes
    if not stays:
        await _near(host, coming, store, generation=0)
    check_open(host, about["name"], store, move)


async def _near(host: ShardHost, coming: Coming, store: str, *, generation: int) -> Any:
    """Install states until the next one may be the last, or with a generation that too.

    Returns the deliveries of an open round, if any.
    """
    is_ready, box = False, None
    while not is_ready:
        about = {"since": coming.mark, "generation": generation}
        answer = await _ask(host, coming, "move_last", store, **about)
        is_ready, box = answer["is_ready"], answer["mailbox"]
        if answer["state"] is not None:
            await _install(host, coming, answer["state"])
        elif generation and not is_ready:
            # The run may be at its end, which waits for this shard.
            raise ConsistencyError("no round came that could be the last one")
    return box


async def _ask(
    host: ShardHost, coming: Coming, method: str, store: str, **more: Any
) -> Any:
    of = {"store": store, "shard": coming.hosted.index, "move": coming.move}
    try:
        return await host.worker.ask(coming.source, method, **of, **more)
    except OSError as error:
        raise ConsistencyError(
            f"worker {coming.source} cannot be reached any more: {error}"
        ) from error


async def _copied(
    host: ShardHost, coming: Coming, store: str, begun: Mapping[str, Any]
) -> None:
    """Fill a copy with the parts of its shard as they are read."""
    segment = coming.hosted.shard.segment
    into, spans = Installation(segment), spans_of(segment, WHOLE)

    async def read(some: Sequence[tuple[Span, str]]) -> list[Array]:
        asked = [tuple(span) for span, _ in some]
        packed = await _ask(host, coming, "move_read", store, spans=asked)
        return [unpack_array(p, d) for p, (_, d) in zip(packed, some, strict=True)]

    counts = np.reshape(begun["rows"], (2, -1)).T.tolist()
    for (position, table), (n, k) in zip(unbounded_of(segment), counts, strict=True):
        wanted = [(IDS, n), (CANDIDATES, k), (COUNTS, k)]
        which = [(Span(area, position, 0, m), "int64") for area, m in wanted]
        ids, *counted = await read(which)
        begin = partial(into.begin_table, position, ids, np.array(counted))
        await host.in_thread(begin)
        for area, array in table.by_area.items():
            if area != IDS:
                span = Span(area, position, 0, n * array.shape[1])
                spans.append((span, array.dtype.name))
    clocks = [0] * len(segment.tables)
    Counted(0, {}, clocks, begun["came"], Epochs()).put(segment)
    parts = [*_parts(spans)]
    for at in range(0, len(parts), _PARTS):
        some = parts[at : at + _PARTS]
        values = await read(some)
        for (span, _), array in zip(some, values, strict=True):
            await host.in_thread(partial(into.put, span, array.reshape(-1)))


def _parts(spans: Sequence[tuple[Span, str]]) -> Iterator[tuple[Span, str]]:
    """Give spans in parts of a few MB."""
    for span, dtype in spans:
        n = max(1, _PART_NBYTES // np.dtype(dtype).itemsize)
        for start in range(span.start, span.stop, n):
            stop = min(start + n, span.stop)
            yield span._replace(start=start, stop=stop), dtype


async def _install(host: ShardHost, coming: Coming, packed: Any) -> State:
    """Bring a copy to a state."""
    state = unpack_state(packed)
    turn = coming.turn
    await host.in_thread(lambda: coming.install(state, coming.begin(turn)))
    return state


@HOST.handles("move_own")
async def _own(
    host: ShardHost,
    *,
    store: str,
    shard: int,
    move: str,
    generation: int,
    runs: Mapping[str, Any],
    alone: bool = False,
) -> dict[str, Any]:
    """Take a shard over from its owner, of which there is a copy here; return its row.

    `runs` has the run in rounds to continue, and the codecs of all runs, as of `adopt`.
    With `alone` its owner has gone, and has waited for the copy.
    """
    coming = host.coming.get((store, shard))
    # It is asked again where this takes long, as where a codec of the user's imports much.
    async with contextlib.nullcontext() if coming is None else coming.owning:
        here = host.shards.get((store, shard))
        if here is not None and here.came_by == move:
            return row_of(here)  # its answer was lost
        of = host, _copy_of(host, store, shard, move), store
        return await _take_over(*of, generation=generation, runs=runs, alone=alone)


async def _take_over(
    host: ShardHost,
    coming: Coming,
    store: str,
    *,
    generation: int,
    runs: Mapping[str, Any],
    alone: bool,
) -> dict[str, Any]:
    """Become the owner of a shard; return its row."""
    shard, move, box = coming.hosted.index, coming.move, None
    for codec in runs["codecs"]:
        await host.in_thread(partial(encoding.learn, *codec))
    if not alone:
        box = await _near(host, coming, store, generation=generation)
    elif coming.counts.is_set():
        await coming.stop()
    else:
        raise ConsistencyError(f"the copy of shard {shard} of {store} is not complete")
    hosted = coming.hosted
    mine = hosted.shard
    mine.generation = mine.segment.header[GENERATION] = generation
    await host.in_thread(partial(_open_round, host, hosted, runs["rounds"], box))
    mine.take_over()
    check_open(host, hosted.name, store, move)
    is_whole = host.coming.pop((store, shard), None) is coming
    # One that leaves sends on what it has, until it lets go of all.
    leaves = host.lets_go if alone else host.leaves()
    if leaves or (store, shard) in host.shards:
        if is_whole:
            coming.close()
        why = "is leaving too" if leaves else "has adopted it by now"
        raise ConsistencyError(f"worker {host.worker.address} {why}")
    hosted.came_by = move
    host.shards[store, shard] = hosted
    where, name = host.worker.address, hosted.name
    logger.info(
        "%s has shard %d of store %r from %s", where, shard, name, coming.source
    )
    return row_of(hosted)


def _copy_of(host: ShardHost, store: str, shard: int, move: str) -> Coming:
    """Return a copy that is here, or refuse."""
    coming: Coming | None = host.coming.get((store, shard))
    if coming is None or coming.move != move:
        raise ConsistencyError(
            f"worker {host.worker.address} has no copy of shard {shard} of {store}"
        )
    return coming


def _open_round(
    host: ShardHost,
    hosted: HostedShard,
    rounds: Mapping[str, Any] | None,
    packed: Any,
) -> None:
    """Go on with the deliveries of an open round, or with none; else hold the run.

    Without any the trainers of the run send theirs again. The directory says which of
    these have ended, or begun anew: else the mailboxes alone know.
    """
    state = hosted.shard.run_state
    if not state.is_bsp:
        return
    run, is_new = state.run, packed is None
    goes_on = rounds if rounds and rounds["run"] == run else None
    if goes_on is None or (is_new and not goes_on["is_sent_again"]):
        state.stop(run, run_record.ended(run, "its open round did not move along"))
        return
    reduce, memory = loads(goes_on["reduce"]), None
    # The task graph sends its round again, and keeps nothing here.
    if not goes_on["graph"]:
        box = bytes_of(b"" if is_new else packed)
        nbytes = state.mailbox_nbytes(state.n_ranks, reduce) if is_new else box.nbytes
        blocks = host.shared_blocks([HEAD_NBYTES + nbytes]) if hosted.block else []
        memory = None if is_new else np.array(box)
        for block in blocks:
            block.stamp()
            block.body[: box.nbytes] = box
            hosted.mailbox, memory = (run, block), block.body
    state.attach_rounds(run, state.n_ranks, reduce, memory, empty=is_new)
    if is_new:
        # So far other shards have come without it; its trainers send it again.
        for rank, attempt in goes_on["attempts"].items():
            state.resume_rank(run, rank, attempt)
        for rank in goes_on["finishing"]:
            state.finish_rank(rank, may_apply=False)
        state.hear_finished(goes_on["n_finished"])


@HOST.handles("copy_follow")
async def _follow(
    host: ShardHost, *, store: str, shard: int, move: str, source: str
) -> None:
    """Have a copy follow a shard, whose owner is `source`; return once it counts."""
    coming = _copy_of(host, store, shard, move)
    await coming.stop()
    coming.source = source
    following = asyncio.ensure_future(_ask_on(host, coming, store))
    coming.following = following
    counts = asyncio.ensure_future(coming.counts.wait())
    await asyncio.wait({counts, following}, return_when=asyncio.FIRST_COMPLETED)
    counts.cancel()
    if not coming.counts.is_set():
        raise ConsistencyError(f"the copy of shard {shard} of {store} lost its owner")


async def _answer(
    host: ShardHost, ask: Coroutine[Any, Any, Any], of: Mapping[str, Any]
) -> Any:
    """Wait for a state, which takes its time; meanwhile the directory looks who lives."""
    asked, seconds = asyncio.ensure_future(ask), config.load().suspect_after_seconds
    try:
        # Not `wait_for`, which forgets a cancellation that comes with an answer.
        while not (await asyncio.wait({asked}, timeout=seconds))[0]:
            await _say_silent(host, of)
        return asked.result()
    finally:
        asked.cancel()


async def _say_silent(host: ShardHost, of: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError, DaskPSError):
        await host.worker.directory("copy-silent", **of)


async def _ask_on(host: ShardHost, coming: Coming, store: str) -> None:
    """Install one state after the other; end where the copy has to be made anew."""
    of = {"store": store, "shard": coming.hosted.index, "move": coming.move}
    asks = {**of, "by": host.worker.address}
    asking, not_before = Asking(host, coming, asks), 0.0
    loop = asyncio.get_running_loop()
    while True:
        try:
            about = {**asks, "since": tuple(coming.mark)}
            ask = host.worker.ask(coming.source, "copy_next", **about)
            await _install(host, coming, await _answer(host, ask, of))
            state = coming.hosted.shard.run_state
            at = state.find_position(state.run)
            # A fence may have it take a round back: it needs the one before.
            if not state.is_bsp or not at.rounds or at.has_last:
                coming.counts.set()
            sockets = host.sockets if coming.counts.is_set() else None
            if sockets is not None and loop.time() >= not_before:
                not_before = loop.time() + _SOCKET_SECONDS
                await asking.go_on(sockets)
        except (OSError, StaleGenerationError) as error:
            # The owner has gone: the directory says which one is the next.
            if isinstance(error, TimeoutError):
                await _say_silent(host, of)
            await asyncio.sleep(_PAUSE_SECONDS)
        except Exception as error:  # noqa: BLE001 - as no memory, or this worker closes
            logger.info("a copy on %s ends: %r", host.worker.address, error)
            with contextlib.suppress(OSError, DaskPSError, RuntimeError):
                await host.worker.directory("copy-ended", **of)
            return


# -- the end ---------------------------------------------------------------------------


@HOST.handles("move_drop")
async def _drop(host: ShardHost, *, store: str, shard: int, move: str) -> None:
    """Free a shard that does not move here after all, also where it has by now."""
    host.dropped.append(move)
    coming = host.coming.get((store, shard))
    if coming is not None and coming.move == move:
        host.coming.pop((store, shard)).close()
    hosted = host.shards.get((store, shard))
    if hosted is not None and hosted.came_by == move:
        del host.shards[store, shard]
        host.drop(hosted)
