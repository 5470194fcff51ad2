"""Moves of shards from host to host, where the memory cannot be taken over.

The worker that a shard moves to has a copy of it made: the parts of the shard as they
are read while it goes on, then *states*, all that has changed since, until little is
missing. Then the owner stops: the last state goes with the deliveries of an open round,
and the new owner has all. Until the directory names that one the former owner can take
the shard back.

In a run in rounds the last state is one round, so that the new owner can go back by
one, as the former one could.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.host.adoption import row_of
from daskps.cluster.host.growth import Budget
from daskps.cluster.host.rules import Rules
from daskps.cluster.host.store_messages import make_shards
from daskps.cluster.machine.blocks import HEAD_NBYTES
from daskps.cluster.protocol import encoding
from daskps.cluster.protocol.handlers import HOST
from daskps.cluster.protocol.packing import bytes_of, pack_array, unpack_array
from daskps.cluster.protocol.states import pack_state, unpack_state
from daskps.cluster.protocol.wellformed import layout_of
from daskps.cluster.upstream import loads
from daskps.epochs import Epochs
from daskps.errors import (
    ConsistencyError,
    DaskPSError,
    ProtocolError,
    StaleGenerationError,
    StoreClosedError,
)
from daskps.layout.chunks import WHOLE
from daskps.layout.spans import CANDIDATES, COUNTS, IDS, Span
from daskps.shards import run_record, states
from daskps.shards.arrays.payload import NUMPY
from daskps.shards.frozen import LiveShard, spans_of
from daskps.shards.installation import Counted, Installation
from daskps.shards.memory.format import GENERATION
from daskps.shards.states import Mark, State

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.host.hosted import HostedShard
    from daskps.shards.shard import Shard
    from daskps.shards.steps import Ticket
    from daskps.typing import Array

logger = logging.getLogger(__name__)
#: Bytes of a part that is read at a time, and parts of a message.
_PART_NBYTES, _PARTS = 2**22, 8
#: States before the last one: until so few bytes have changed, or so many were sent.
_LITTLE_NBYTES, _MOST_STATES = 2**20, 4
#: How long an owner waits for the round that is its last, before it says that it waits.
_WAIT_SECONDS, _PAUSE_SECONDS = 1.0, 0.002
#: How long rounds are held for a directory that never comes back to it.
_HOLD_SECONDS = 5.0


# -- the owner -------------------------------------------------------------------------


@dataclass(eq=False)
class Going:
    """A shard that moves away: the parts of it that are read, and its owner."""

    move: str
    hosted: HostedShard
    live: LiveShard
    #: Lets rounds go on where nobody asks for the last one.
    lease: asyncio.TimerHandle | None = None
    #: Whether it waits for nothing but its next owner; else others may adopt it.
    is_handed_over: bool = False

    def hold(self, loop: asyncio.AbstractEventLoop, host: ShardHost) -> None:
        """Hold rounds for a while from now on, if any are held."""
        self.end_hold()
        self.lease = loop.call_later(_HOLD_SECONDS, self._expire, host)

    def _expire(self, host: ShardHost) -> None:
        if not self.hosted.is_released:
            self.hosted.enqueue(lambda owner: owner.hold_rounds(None))
            host.keep_looking()

    def end_hold(self) -> None:
        """Stop the timer."""
        if self.lease is not None:
            self.lease.cancel()
            self.lease = None


def _going(host: ShardHost, store: str, shard: int, move: str) -> Going:
    going: Going | None = host.going.get((store, shard))
    if going is None or going.move != move:
        raise ConsistencyError(
            f"shard {shard} of store {store} does not move away from worker "
            f"{host.worker.address}"
        )
    return going


def _check_open(host: ShardHost, name: str, store: str, move: str) -> None:
    """Refuse what was sent before a store was freed or a move was given up."""
    if store in host.dropped:
        raise StoreClosedError(f"store {name!r} was freed while it moved")
    if move in host.dropped:
        raise ConsistencyError(
            f"a shard of store {name!r} does not move here after all"
        )


@HOST.handles("move_begin")
async def _begin(
    host: ShardHost, *, store: str, shard: int, move: str
) -> dict[str, Any]:
    """Let another host read a shard; return the moment from which on it needs states.

    Also how many rows and candidates each unbounded table has, and how many ids have
    come and gone.
    """
    hosted = host.get_shard(store, shard)
    if hosted.shard.segment.payload.device is not None:
        raise ProtocolError(f"shard {shard} of store {hosted.name!r} is on a device")

    def begin(_: Shard) -> tuple[Mark, LiveShard, Counted]:
        segment = hosted.shard.segment
        mark = states.follow(segment)
        return mark, LiveShard(segment), Counted.of(segment, segment.flip)

    mark, live, counted = await host.under(hosted, begin)
    _check_open(host, hosted.name, store, move)
    host.going[store, shard] = Going(move, hosted, live)
    rows = [*zip(live.n_rows, live.n_candidates, strict=True)]
    return {"mark": tuple(mark), "rows": rows, "came": counted.came}


@HOST.handles("move_read")
async def _read(
    host: ShardHost,
    *,
    store: str,
    shard: int,
    move: str,
    spans: Sequence[Sequence[Any]],
) -> list[Any]:
    """Return parts of a shard that moves away, each as it is now."""
    going = _going(host, store, shard, move)

    def read(_: Shard) -> list[Array]:
        try:
            return [going.live.get(Span(*span)) for span in spans]
        except (LookupError, TypeError) as error:
            raise ProtocolError(f"shard {shard} has no such part: {error}") from error

    return [pack_array(array) for array in await host.under(going.hosted, read)]


@HOST.handles("move_state")
async def _state(
    host: ShardHost, *, store: str, shard: int, move: str, since: Sequence[int]
) -> dict[str, Any]:
    """Return all that has changed since a moment."""
    going = _going(host, store, shard, move)
    take = partial(_taken, since=Mark(*since))
    return pack_state(await host.under(going.hosted, take))


def _taken(shard: Shard, since: Mark, *, last: bool = False) -> State:
    state = states.take(shard.segment, since, last=last)
    if state is None:
        raise ConsistencyError(
            "more rows have changed than the feed of their table keeps, or all of their "
            "slots; the move begins again"
        )
    return state


@HOST.handles("move_last")
async def _last(
    host: ShardHost,
    *,
    store: str,
    shard: int,
    move: str,
    since: Sequence[int],
    generation: int,
) -> dict[str, Any]:
    """Return a state, and whether the other host has now what it needs to own the shard.

    With a generation it owns it from then on, and gets the deliveries of an open round;
    with 0 this host only says that the next state may be the last one. In a run in
    rounds the last one is one round: no further one is applied meanwhile. There is no
    state where no round came for a while.
    """
    going, mark = _going(host, store, shard, move), Mark(*since)
    hosted, found = going.hosted, list[State]()
    error = StaleGenerationError(
        f"worker {host.worker.address} has handed over shard {shard} of store "
        f"{hosted.name!r}; ask the directory where it lives"
    )
    is_ready = False

    def attempt(owner: Shard) -> list[Ticket]:
        nonlocal is_ready
        if host.going.get((store, shard)) is not going:
            # It was taken back while this call waited for a round.
            raise ConsistencyError(f"shard {shard} of store {store} moves no more")
        flip = owner.segment.flip
        is_ready = not owner.run_state.is_bsp or flip == mark.flip + 1
        if is_ready and generation:
            found.append(_taken(owner, mark, last=True))
            going.is_handed_over = True
            return hosted.hand_over(error, generation)
        if flip > mark.flip + 1:
            found.append(_taken(owner, mark))
        if not owner.run_state.is_bsp:
            return []
        return owner.hold_rounds(flip + (not is_ready))

    loop = asyncio.get_running_loop()
    end = loop.time() + _WAIT_SECONDS
    going.hold(loop, host)
    await host.under(hosted, attempt)
    while not (found or is_ready) and loop.time() < end:
        await asyncio.sleep(_PAUSE_SECONDS)
        await host.under(hosted, attempt)
    answer: dict[str, Any] = {"is_ready": is_ready, "mailbox": None}
    answer["state"] = pack_state(found[0]) if found else None
    if going.is_handed_over:
        host.shards.pop((store, shard), None)
        going.end_hold()
        box = hosted.shard.run_state.attached
        if box is not None and box.is_current:
            answer["mailbox"] = pack_array(np.array(box.mailbox.memory))
    return answer


@HOST.handles("move_back")
async def _back(
    host: ShardHost, *, store: str, shard: int, move: str, generation: int
) -> dict[str, Any] | None:
    """Own a shard again that was to move; it may never have been handed over.

    Returns its row, None where it is here no more.
    """
    host.dropped.append(move)
    going = host.going.get((store, shard))
    if going is not None and going.move == move:
        hosted = going.hosted
        if going.is_handed_over and host.leaves():
            # As it has let go of all others: somebody of its machine adopts it.
            hosted.leave()
        elif going.is_handed_over:
            hosted.resume(generation)
            host.shards[store, shard] = hosted
        elif not hosted.is_released:
            # Behind a last state that is on its way: this fails then, and comes again.
            await host.under(hosted, lambda owner: owner.hold_rounds(None))
        going.end_hold()
        host.going.pop((store, shard), None)
    # Also where it has heard this before, and its answer was lost.
    here = host.shards.get((store, shard))
    return None if here is None else row_of(here)


@HOST.handles("move_done")
async def _done(host: ShardHost, *, store: str, shard: int, move: str) -> None:
    """Free a shard that has another owner now."""
    going = host.going.get((store, shard))
    if going is not None and going.move == move:
        del host.going[store, shard]
        going.hosted.close()
    if host.sockets is not None:
        host.sockets.let_go()


# -- the new owner ---------------------------------------------------------------------


@dataclass(eq=False)
class Coming:
    """A shard that moves here: its copy, and the moment that it has."""

    move: str
    hosted: HostedShard
    source: str
    mark: Mark


@HOST.handles("move_fill")
async def _fill(
    host: ShardHost,
    *,
    store: str,
    about: Mapping[str, Any],
    shard: int,
    move: str,
    source: str,
) -> None:
    """Have a copy of a shard made here, and bring it near.

    `about` is the store: its name, layout, rules and cluster.
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
        _drop(host, store, shard)
    try:
        _check_open(host, about["name"], store, move)
    except DaskPSError:
        coming.hosted.close()
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
    await _near(host, coming, store, generation=0)
    _check_open(host, about["name"], store, move)


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

    rows = iter(begun["rows"])
    for position, table in enumerate(segment.tables, len(segment.pieces)):
        if table.unbounded is None:
            continue
        n, k = next(rows)
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
    shard, state = coming.hosted.shard, unpack_state(packed)

    def install() -> None:
        if state.since != coming.mark:
            raise ProtocolError(f"a state since {state.since}, not {coming.mark}")
        states.install(shard.segment, state)
        if shard.run_state.is_bsp:
            # Its round may have to be taken back.
            shard.segment.double_slots()

    await host.in_thread(install)
    coming.mark = state.now
    return state


@HOST.handles("move_own")
async def _own(
    host: ShardHost,
    *,
    store: str,
    shard: int,
    move: str,
    generation: int,
    rounds: Mapping[str, Any] | None,
    codecs: Sequence[tuple[str, bytes]],
) -> dict[str, Any]:
    """Take a shard over from its owner, of which there is a copy here; return its row.

    `rounds` is the run in rounds to continue, `codecs` those of all runs, as of
    `adopt`.
    """
    coming: Coming | None = host.coming.get((store, shard))
    if coming is None or coming.move != move:
        raise ConsistencyError(
            f"worker {host.worker.address} has no copy of shard {shard} of {store}"
        )
    for codec in codecs:
        await host.in_thread(partial(encoding.learn, *codec))
    box = await _near(host, coming, store, generation=generation)
    hosted = coming.hosted
    mine = hosted.shard
    mine.generation = mine.segment.header[GENERATION] = generation
    await host.in_thread(partial(_open_round, host, hosted, rounds, box))
    mine.take_over()
    _check_open(host, hosted.name, store, move)
    is_whole = host.coming.pop((store, shard), None) is coming
    if host.leaves():
        if is_whole:
            hosted.close()
        raise ConsistencyError(f"worker {host.worker.address} is leaving too")
    hosted.came_by = move
    host.shards[store, shard] = hosted
    where, name = host.worker.address, hosted.name
    logger.info(
        "%s has shard %d of store %r from %s", where, shard, name, coming.source
    )
    return row_of(hosted)


def _open_round(
    host: ShardHost,
    hosted: HostedShard,
    rounds: Mapping[str, Any] | None,
    packed: Any,
) -> None:
    """Go on with the deliveries of an open round; else hold the run."""
    state = hosted.shard.run_state
    if not state.is_bsp:
        return
    run = state.run
    goes_on = rounds if rounds and rounds["run"] == run else None
    if goes_on is None or (packed is None and not goes_on["graph"]):
        state.stop(run, run_record.ended(run, "its open round did not move along"))
        return
    memory = None
    # The task graph sends its round again.
    if not goes_on["graph"]:
        box = bytes_of(packed)
        blocks = host.shared_blocks([HEAD_NBYTES + box.nbytes]) if hosted.block else []
        memory = np.array(box)
        for block in blocks:
            block.stamp()
            block.body[: box.nbytes] = box
            hosted.mailbox, memory = (run, block), block.body
    state.attach_rounds(run, state.n_ranks, loads(goes_on["reduce"]), memory)


@HOST.handles("move_drop")
async def _drop_message(host: ShardHost, *, store: str, shard: int, move: str) -> None:
    """Free a shard that does not move here after all, also where it has by now."""
    host.dropped.append(move)
    coming = host.coming.get((store, shard))
    if coming is not None and coming.move == move:
        _drop(host, store, shard)
    hosted = host.shards.get((store, shard))
    if hosted is not None and hosted.came_by == move:
        del host.shards[store, shard]
        host.drop(hosted)


def _drop(host: ShardHost, store: str, shard: int) -> None:
    host.coming.pop((store, shard)).hosted.close()
