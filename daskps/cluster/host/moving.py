"""The owner of a shard of which there is a copy on another host: it moves, or stays.

A shard *moves* where its memory cannot be taken over. The worker that it moves to has a
copy of it made: the parts of the shard as they are read while it goes on, then
*states*, all that has changed since, until little is missing. Then the owner stops: the
last state goes with the deliveries of an open round, and the new owner has all. Until
the directory names that one the former owner can take the shard back.

A *second copy* is filled in the same way, and asks for states for as long as it lives.
To ask for the next one says that it has the one before. An answer of the owner leaves
when the copy has all that it tells
(:meth:`~daskps.cluster.host.hosted.HostedShard.backed`), or when the directory has
struck the copy off.

In a run in rounds the last state is one round, so that the new owner can go back by
one, as the former one could; and no round is applied before the copy has the last one.
The other end is :mod:`daskps.cluster.host.copies`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import config
from daskps.cluster.host.adoption import row_of
from daskps.cluster.host.calls import CallTickets, Parked
from daskps.cluster.host.hosted import Backing
from daskps.cluster.keys import saved_key
from daskps.cluster.protocol.handlers import FETCHES, HOST
from daskps.cluster.protocol.packing import pack_array
from daskps.cluster.protocol.states import pack_arrays, pack_state
from daskps.cluster.sockets.connection import SMALL_NBYTES
from daskps.cluster.sockets.fetches import pack_fetched
from daskps.cluster.sockets.frames import held_back, pack_refusal
from daskps.errors import (
    ConsistencyError,
    DaskPSError,
    ProtocolError,
    ShardBusyError,
    StaleGenerationError,
    StoreClosedError,
)
from daskps.layout.spans import Span
from daskps.shards import states
from daskps.shards.frozen import HeldShard, LiveShard
from daskps.shards.installation import Counted
from daskps.shards.states import Mark, State
from daskps.shards.steps import Ready

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.host.hosted import HostedShard
    from daskps.cluster.sockets.frames import Head
    from daskps.reduction import Empty
    from daskps.shards.shard import Shard
    from daskps.shards.steps import Ticket
    from daskps.typing import Array

logger = logging.getLogger(__name__)
#: How long an owner waits for the round that is its last, before it says that it waits.
_WAIT_SECONDS, _PAUSE_SECONDS = 1.0, 0.002
#: How long rounds are held for a directory that never comes back to it.
_HOLD_SECONDS = 5.0
#: Bytes of a state that may take until the next look.
_LOOK_NBYTES = 10**7
#: How often the two hear from each other within the time that one may be silent before
#: the other one tells the directory.
LOOKS = 5


# -- a shard that moves ----------------------------------------------------------------


@dataclass(eq=False)
class Going:
    """A shard that moves away: its owner, and the parts of it that are read, if any."""

    move: str
    hosted: HostedShard
    live: HeldShard | None = None
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
            self.hosted.enqueue(lambda owner: owner.hold_updates(None))
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


def check_open(host: ShardHost, name: str, store: str, move: str) -> None:
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
    check_open(host, hosted.name, store, move)
    host.going[store, shard] = Going(move, hosted, live)
    return {"mark": tuple(mark), "rows": live.counts, "came": counted.came}


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
    live = going.live
    assert live is not None

    def read(_: Shard) -> list[Array]:
        try:
            return [live.get(Span(*span)) for span in spans]
        except (LookupError, TypeError) as error:
            raise ProtocolError(f"shard {shard} has no such part: {error}") from error

    return [pack_array(array) for array in await host.under(going.hosted, read)]


@HOST.handles("move_state")
async def _state(
    host: ShardHost, *, store: str, shard: int, move: str, since: Sequence[int]
) -> dict[str, Any]:
    """Return all that has changed since a moment."""
    going = _going(host, store, shard, move)
    take = partial(taken, since=Mark(*since))
    return pack_state(await host.under(going.hosted, take))


def taken(
    shard: Shard, since: Mark, own: Callable[[Array], Array] | None = None
) -> State:
    """Return all that has changed since a moment, or refuse; see :func:`states.take`."""
    state = states.take(shard.segment, since, own)
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
    is_ready = False

    def attempt(owner: Shard) -> list[Ticket]:
        nonlocal is_ready
        if host.going.get((store, shard)) is not going or move in host.dropped:
            # It was taken back while this call waited for a round.
            raise ConsistencyError(f"shard {shard} of store {store} moves no more")
        flip = owner.segment.flip
        is_ready = not owner.run_state.is_bsp or flip == mark.flip + 1
        if is_ready and generation:
            found.append(taken(owner, mark, np.asarray))
            going.is_handed_over = True
            return hosted.hand_over(generation)
        if flip > mark.flip + 1:
            found.append(taken(owner, mark))
        if not owner.run_state.is_bsp:
            return []
        return owner.hold_updates(flip + (not is_ready))

    loop = asyncio.get_running_loop()
    end = loop.time() + _WAIT_SECONDS
    going.hold(loop, host)
    await host.under(hosted, attempt)
    while not (found or is_ready) and loop.time() < end:
        await asyncio.sleep(_PAUSE_SECONDS)
        await host.under(hosted, attempt)
    answer: dict[str, Any] = {"is_ready": is_ready, "mailbox": None}
    answer["state"] = pack_state(found[0]) if found else None
    # It may have been taken back before this call went on, and be here again.
    if going.is_handed_over and _going(host, store, shard, move).is_handed_over:
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
        if going.is_handed_over and host.lets_go:
            # As it has let go of all others: somebody of its machine adopts it.
            hosted.leave()
        elif going.is_handed_over:
            hosted.resume(generation)
            host.shards[store, shard] = hosted
        elif not hosted.is_released:
            # Behind a last state that is on its way: this fails then, and comes again.
            await host.under(hosted, lambda owner: owner.hold_updates(None))
        going.end_hold()
        host.going.pop((store, shard), None)
    # Also where it has heard this before, and its answer was lost.
    here = host.shards.get((store, shard))
    if here is not None and here.is_released:
        # A thread has stopped it, and `_stop` has yet to go on: this comes again.
        raise ShardBusyError(f"shard {shard} of store {here.name!r} stops just now")
    return None if here is None else row_of(here)


@HOST.handles("relay_end")
async def _relay(
    host: ShardHost,
    *,
    store: str,
    cut: str,
    shards: Sequence[tuple[int, int, int]],
) -> None:
    """Stop shards that a cut holds, and of which others have all as they are.

    `shards` are their numbers, versions in the cut, and generations from then on. By
    `move_back` each goes on.

    Raises
    ------
    ConsistencyError
        If the cut holds one no more.
    """
    for shard, version, generation in shards:
        held = host.snapshots.find(saved_key(cut, shard, version))
        if not isinstance(held, HeldShard):
            raise ConsistencyError(f"cut {cut} holds shard {shard} no more")
        going = Going(cut, host.get_shard(store, shard), held)
        await _stop(host, store, going, generation)


async def _stop(host: ShardHost, store: str, going: Going, generation: int) -> None:
    """Stop a shard for its next owner, as it is held; by `move_back` it goes on."""
    key = store, going.hosted.index

    def stop(_: Shard) -> list[Ticket]:
        check_open(host, going.hosted.name, store, going.move)
        if going.live is not None:
            going.live.check()
        return going.hosted.hand_over(generation)

    with contextlib.suppress(StaleGenerationError):  # two of these at once
        await host.under(going.hosted, stop)
    if host.shards.pop(key, None) is None:
        raise going.hosted.gone()
    going.is_handed_over = True
    host.going[key] = going


# -- a shard with a second copy --------------------------------------------------------


@HOST.handles("copy_on")
async def _on(
    host: ShardHost, *, store: str, shard: int, move: str, order: int
) -> None:
    """Have answers wait for a copy from now on; for none with "".

    Of messages that overtake each other the one of the highest `order` counts.
    """
    hosted, host.has_copies = host.get_shard(store, shard), True

    def change(owner: Shard) -> list[Ticket]:
        if order < hosted.told_copies:
            raise ConsistencyError(f"copies of shard {shard} have changed since")
        before, hosted.told_copies = hosted.backing, order
        if (before.move if before else "") == move:
            return []
        hosted.backing = Backing(move) if move else None
        # Here: where the lock is taken this call fails, and the change comes later.
        done = before.ended() if before else []
        return done + owner.hold_updates(0 if move else None)

    await host.under(hosted, change)
    # Also where it has heard this before: `move_begin` may have been on its way then.
    going = host.going.get((store, shard))
    if going is not None and going.move == move:
        del host.going[store, shard]
    backing = hosted.backing
    if backing is not None and backing.watching is None:
        backing.watching = asyncio.ensure_future(_watch(host, store, hosted, backing))


async def _watch(
    host: ShardHost, store: str, hosted: HostedShard, backing: Backing
) -> None:
    """Tell the directory of a second copy that is silent, as long as it counts."""
    about = {"store": store, "shard": hosted.index, "move": backing.move}
    while hosted.backing is backing and backing.error is None:
        backing.n_silent += 1
        await asyncio.sleep(config.load().suspect_after_seconds / LOOKS)
        await host.run_for(hosted, hosted.send_on)
        host.keep_looking()
        times, rest = divmod(backing.n_silent, LOOKS)
        if times > 0 and not rest:
            with contextlib.suppress(OSError, DaskPSError):
                await host.worker.directory("copy-silent", **about, times=times)


@dataclass(eq=False)
class _NextState:
    """A question of a copy, on worker `by`: it wants all changes since its moment."""

    hosted: HostedShard
    move: str
    since: Mark
    by: str
    empty: Empty
    #: Done once the state is taken: when an answer waits for it, or after a while.
    ticket: Ticket
    state: State | None = None
    #: Whether large arrays may be sent from the shard, and whether some are: nothing is
    #: written there meanwhile.
    lends: bool = False
    has_lent: bool = False

    def ask(self) -> None:
        """Tell the shard how far the copy is; any thread may call this."""
        self.hosted.enqueue(self._hear).add_done_callback(self._end)
        self.hosted.serve()

    def _end(self, heard: Future[list[Ticket]]) -> None:
        """Answer with an error where the shard is here no more."""
        if isinstance(error := heard.exception(), Exception):
            self.ticket.outcome = error
            self.ticket.owner.one_done()

    def _hear(self, owner: Shard) -> list[Ticket]:
        backing, flip = self.hosted.backing, self.since.flip
        if backing is None or backing.move != self.move:
            return self.refuse("there is no such copy", ConsistencyError)
        if backing.error is not None:
            # It was freed after this question came to it: nobody would answer.
            return self.refuse("it is here no more")
        is_first, backing.n_silent, backing.worker = backing.flip < 0, 0, self.by
        done = backing.reach(flip)
        last_flip = backing.flip + 1 if owner.run_state.is_bsp else None
        done += owner.hold_updates(last_flip)
        if is_first or owner.segment.flip > flip:
            return done + self.take(owner)
        before, backing.asked = backing.asked, self
        return done + before.refuse("its copy has asked again") if before else done

    def refuse(
        self, why: str, kind: type[Exception] = StaleGenerationError
    ) -> list[Ticket]:
        """Answer with an error; return the ticket."""
        of = self.hosted
        self.ticket.outcome = kind(f"shard {of.index} of store {of.name!r}: {why}")
        return [self.ticket]

    def take(self, owner: Shard) -> list[Ticket]:
        """Take the state, under the shard's mutex; return the ticket."""
        try:
            self.state = taken(owner, self.since, self._own)
        except Exception as error:  # noqa: BLE001 - as where there is no memory for it
            return self.refuse(str(error) or repr(error), ConsistencyError)
        self.ticket.outcome = Ready(0, 0)
        if (backing := self.hosted.backing) is not None:
            backing.n_silent = -(self.state.nbytes // _LOOK_NBYTES)
        done, last_flip = [self.ticket], self.state.now.flip
        if self.has_lent:
            done += owner.hold_updates(last_flip, pushes=True)
        return done

    def _own(self, array: Array) -> Array:
        if self.lends and array.nbytes > SMALL_NBYTES:
            self.has_lent = True
            return array
        out = self.empty(array.size, array.dtype).reshape(array.shape)
        out[...] = array
        return out


@HOST.handles("copy_next")
async def _next(
    host: ShardHost, *, store: str, shard: int, move: str, since: Sequence[int], by: str
) -> dict[str, Any]:
    """Hear how far a copy is, and return the next state; see :class:`_NextState`."""
    hosted, tickets = host.get_shard(store, shard), CallTickets()
    of = hosted, move, Mark(*since), by, host.empty
    asked = _NextState(*of, tickets.add(hosted))
    try:
        await host.run_for(hosted, asked.ask)
        await tickets.wait()
        assert asked.state is not None
        return pack_state(asked.state)
    finally:
        # Its ticket has the error, and that refers to this frame.
        del asked


@FETCHES.handles("copy_next")
def _next_here(
    host: ShardHost, *, store: str, shard: int, move: str, by: str
) -> Callable[[Head], list[Any] | Parked]:
    """Do the same by a socket; the moment is in the head."""

    def begin(head: Head) -> list[Any] | Parked:
        def answer(*_: Any) -> list[Any]:
            # No cycle keeps its arrays, whose memory the next one takes.
            state, asked.state = asked.state, None
            if state is None:
                return pack_refusal(StaleGenerationError("a message says why"), number)
            frame = pack_fetched(*pack_arrays(state), number)
            if not asked.has_lent:
                return frame
            segment, flip = hosted.shard.segment, state.now.flip
            return held_back(frame, lambda: segment.writing <= flip)

        hosted, number = host.get_shard(store, shard), head.number
        parked, since = Parked(math.inf, answer), Mark(head.clock, head.floor)
        of = hosted, move, since, by, host.empty, parked.add(hosted)
        asked = _NextState(*of, lends=True)
        asked.ask()
        return parked.finish(0.0) if parked.done else parked

    return begin


@HOST.handles("move_deposed")
async def _deposed(
    host: ShardHost,
    *,
    store: str,
    shard: int,
    generation: int,
    move: str = "",
    keeps: bool = False,
) -> None:
    """Hear that another host becomes the owner of a shard that is here, or is it.

    With `keeps` it may have to own the shard again, as `move_back` says; else its
    memory is freed.
    """
    key = store, shard
    hosted = host.shards.get(key)
    if hosted is not None and hosted.shard.generation < generation:
        try:
            await _stop(host, store, Going(move, hosted), generation)
        except ShardBusyError:
            raise  # It stops later, and is told again.
        except ConsistencyError:
            pass  # It was taken back, or it has stopped meanwhile.
    ended = host.going.get(key)
    if not keeps and ended is not None and ended.move == move:
        del host.going[key]
        ended.hosted.close()
        if host.sockets is not None:
            host.sockets.let_go()
