"""The part of daskps inside a worker: its shards, and the calls that reach them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from daskps import config
from daskps.cluster.host.calls import CallTickets, Templates, all_backed, answers_of
from daskps.cluster.host.collectives import Collectives
from daskps.cluster.host.contributions import Contributions
from daskps.cluster.host.copy_budget import SMALL_NBYTES, CopyBudget
from daskps.cluster.host.hosted import LOCK_SECONDS, ReachableShards, free_moving
from daskps.cluster.host.snapshot_copies import Copies
from daskps.cluster.machine.leases import BufferPool, limit_of
from daskps.cluster.machine.membership import HERE, Machine
from daskps.cluster.machine.views import View, ViewFiles
from daskps.cluster.protocol.encoding import widened
from daskps.cluster.protocol.messages import (
    Answer,
    Call,
    check_protocol,
    in_words,
    pack_answers,
)
from daskps.cluster.protocol.packing import UNKNOWN, bytes_of, refusal
from daskps.cluster.protocol.wellformed import refused
from daskps.cluster.sockets.frames import unpack_head
from daskps.errors import (
    DaskPSError,
    ProtocolError,
    ShardBusyError,
    ShardLostError,
    StaleGenerationError,
    StoreClosedError,
)
from daskps.shards import producers
from daskps.shards.memory.format import MAX_PRODUCERS, N_PRODUCERS
from daskps.shards.shard import Shard
from daskps.shards.steps import Ready

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from daskps.cluster.host.calls import Started
    from daskps.cluster.host.hosted import HostedShard
    from daskps.cluster.host.node import OpenSockets, WorkerNode
    from daskps.cluster.machine.blocks import Block
    from daskps.cluster.machine.membership import Membership
    from daskps.cluster.protocol.handlers import Handlers
    from daskps.layout.arrays import Layout
    from daskps.reduction import Empty

T = TypeVar("T")
#: The shards that the control message under way is about, None for all.
_meant: ContextVar[Sequence[int] | None] = ContextVar("meant", default=None)

logger = logging.getLogger(__name__)
#: Messages answered before a copy has what they change: it waits for them, or has gone.
#: A save writes nothing that it lacks: the cut has waited for that.
_AT_ONCE = "move_", "copy_", "adopt", "end_run", "let_go", "relay_end", "drop", "write_"
#: Shards up to this many times `daskps.inline-nbytes` are served on the event loop.
SMALL = 16
#: How long a call from a thread of this process waits before it asks again.
WAIT_SECONDS = 20.0
#: Least seconds that a read tries to get at a shard, even if its caller's time is up.
_MIN_SECONDS = 0.1
#: How often the host looks at shards that other processes may have changed.
LOOK_SECONDS = 0.0005


class ShardHost(ReachableShards):
    """Shards of one worker.

    Threads: those that may wait (tasks, trainers) call the shards directly; the event
    loop uses `call`. Both end in :class:`HostedShard`.

    Parameters
    ----------
    worker : WorkerNode
        The worker of this host.
    handlers : Handlers
        The functions that handle its messages.
    machine : Machine
        The machine on which it shares memory with other processes.
    """

    is_own = True

    def __init__(
        self, worker: WorkerNode, handlers: Handlers, machine: Machine = HERE
    ) -> None:
        settings = config.load()
        self.worker, self.machine, self._handlers = worker, machine, handlers
        self.pool = BufferPool(limit_of(worker.memory_limit))
        super().__init__(self.pool.empty, WAIT_SECONDS)
        self.budget = CopyBudget(worker, self.pool)
        #: Stores freed recently: a create that was cut short may still be at work.
        self.dropped: deque[str] = deque(maxlen=1000)
        self.contributions = Contributions(worker.address, self.pool.empty)
        self.collectives = Collectives()
        #: The templates of calls that callers have told; shards may keep arrays that come,
        #: unless callers are in this process.
        self.templates = Templates(
            self._layout_of, owned=not worker.address.startswith("inproc")
        )
        #: Views that tasks of this worker share, by uid of the store.
        self.views: dict[str, View] = {}
        #: Copies of snapshots that Dask has not taken over yet.
        self.snapshots = Copies()
        #: Shards that move away from here, and copies of those that move here.
        self.going, self.coming = dict[Any, Any](), dict[Any, Any]()
        #: Futures that wake waiting calls of other processes, by their tokens.
        self.waiting: dict[str, asyncio.Future[Any]] = {}
        self.inline_nbytes, self.n_calls = settings.inline_nbytes, 0
        self._members: Membership | None = None
        self._has_joined, self._opening = False, threading.Lock()
        self._looking: asyncio.Future[None] | None = None
        #: Whether unbounded tables may have grown since the host told the directory,
        #: and the task that tells it.
        self.may_have_grown = False
        self.telling: asyncio.Future[None] | None = None
        #: Shards that were dropped while another thread used them.
        self._leaving: list[HostedShard] = []
        #: Sockets given to callers, if callers may have any.
        self.sockets: OpenSockets | None = None
        #: Whether a shard here has, or had, a second copy: its answers wait for that.
        self.has_copies = self._is_closed = False
        self.is_leaving = self.lets_go = False
        self._loop_thread = threading.get_ident()
        self._executor = ThreadPoolExecutor(
            settings.threads, thread_name_prefix="daskps-host"
        )
        worker.serve("daskps_call", self.handle_call)
        worker.serve("daskps_control", self.handle_control)

    # -- calls from the event loop -------------------------------------------

    async def handle_call(self, protocol: int, **message: Any) -> dict[str, Any]:
        """Serve one message of another process."""
        try:
            check_protocol(protocol)
            call = self._call_in(**message)
        except Exception as error:  # noqa: BLE001 - its sender gets a refusal
            return refusal(refused(error, "a call"))
        if call is None:
            return {"status": UNKNOWN}
        try:
            return pack_answers(await self.call(call))
        except (DaskPSError, ValueError, TypeError) as error:
            return refusal(error)

    def _call_in(
        self,
        *,
        template: bytes,
        text: bytes | None,
        head: bytes,
        body: Sequence[Any],
        given_up: Sequence[int],
        token: str,
    ) -> Call | None:
        """Return the call in a message; None where the host lacks its template."""
        if type(token) is not str:
            raise ProtocolError(f"a call named {token!r:.60}")
        learn, find = self.templates.learn, self.templates.find
        known = find(template) if text is None else learn(text)
        if known is None:
            return None
        arrays = [bytes_of(array) for array in body]
        return known.call_in(unpack_head(head), arrays, given_up=given_up, token=token)

    def _layout_of(self, store: str, shard: int) -> Layout:
        return self.get_shard(store, shard).layout

    async def call(self, call: Call) -> list[Answer]:
        """Serve a call from the event loop; waits without blocking it."""
        self.n_calls += 1
        tickets = CallTickets(self.look_soon)
        found = [self.shards.get((call.store, part.shard)) for part in call.parts]
        try:
            answers = await self._serve(call, tickets)
        finally:
            tickets.forget()
        if self.has_copies:
            await all_backed(found, self.run_for)
        return answers

    async def _serve(self, call: Call, tickets: CallTickets) -> list[Answer]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        producer = call.step.producer
        for part in call.parts if producer else ():
            await self._make_room(self.get_shard(call.store, part.shard), producer)
        small = call.nbytes <= self.inline_nbytes
        if call.codec:
            layout = self.get_shard(call.store, call.parts[0].shard).layout
            work = partial(widened, call, layout, self.empty)
            call = work() if small else await self.in_thread(work)
        # After that wait: it may last until a shard has gone.
        hosted_shards = [self.get_shard(call.store, part.shard) for part in call.parts]
        for hosted, part in zip(hosted_shards, call.parts, strict=True):
            hosted.put(tickets.add(hosted, part))
        small = small and all(map(self.is_small, hosted_shards))

        def serve(seconds: float) -> list[Answer] | None:
            for hosted in hosted_shards:
                hosted.serve(seconds)
            if not seconds or not tickets.done:
                return None
            empty, seconds = self.budget.answer(call.read_nbytes), call.wait_seconds
            return empty and _answers(call, tickets.started, empty, seconds)

        at_length = partial(serve, LOCK_SECONDS)
        try:
            served = serve(0) if small else await self.in_thread(at_length)
            if served is not None:
                return served
            if not tickets.done:
                # A timer, not `wait_for`: that would cost a task per message.
                self.waiting[call.token] = woken = loop.create_future()
                timer = loop.call_later(call.wait_seconds, _wake, woken)
                tickets.then(self._waker(loop, woken))
                await woken
                timer.cancel()
        finally:
            self.waiting.pop(call.token, None)
            if not tickets.done and (gone := tickets.take_back()):
                # Another thread may be reading the caller's arrays right now.
                futures = map(asyncio.wrap_future, gone)
                await asyncio.shield(asyncio.gather(*futures))
        left = max(_MIN_SECONDS, call.wait_seconds - (loop.time() - began))
        return await self._read(call, tickets.started, left, small=small)

    async def _read(
        self, call: Call, started: Sequence[Started], seconds: float, *, small: bool
    ) -> list[Answer]:
        """Return the answers of finished shards, once there is room for values."""
        empty: Empty | None = self.empty
        is_ready = any(isinstance(ticket.outcome, Ready) for _, _, ticket in started)
        if is_ready and call.read_nbytes > SMALL_NBYTES:
            empty = self.budget.answer(call.read_nbytes)
            empty = empty or await self._wait_for_room(call, seconds)
        # Refusals need no copy, and so no thread: a host that closes has none.
        if small or not is_ready or not empty:
            with contextlib.suppress(ShardBusyError):
                return _answers(call, started, empty, 0)
        return await self.in_thread(partial(_answers, call, started, empty, seconds))

    async def _wait_for_room(self, call: Call, seconds: float) -> Empty | None:
        """Wait for room for an answer; None if the caller gives up or time is up."""
        self.waiting[call.token] = turn = self.budget.wait(call.read_nbytes)
        timer = asyncio.get_running_loop().call_later(seconds, _wake, turn)
        try:
            found: Empty | None = await turn
        finally:
            timer.cancel()
            self.waiting.pop(call.token, None)
        return found

    def is_small(self, hosted: HostedShard) -> bool:
        """Return whether shard and updates are small enough for the event loop."""
        # Updates on a device are waited for, which no event loop may do.
        is_here = hosted.shard.segment.payload.device is None
        small = is_here and hosted.nbytes <= SMALL * self.inline_nbytes
        return small and not hosted.shard.calls_functions

    def _waker(
        self, loop: asyncio.AbstractEventLoop, woken: asyncio.Future[None]
    ) -> Callable[[], None]:
        def callback() -> None:
            if threading.get_ident() == self._loop_thread:
                _wake(woken)
            else:
                loop.call_soon_threadsafe(_wake, woken)

        return callback

    # -- calls from threads of this process ----------------------------------

    def make_room(self, hosted: HostedShard, producer: int, seconds: float) -> None:
        """Make room at a shard for the pushes of a producer, if it needs any."""
        if not producers.lacks_room(hosted.shard.segment.current, producer):
            return
        room = self._make_room(hosted, producer)
        made = asyncio.run_coroutine_threadsafe(room, self.worker.loop.asyncio_loop)
        try:
            made.result(seconds)
        except TimeoutError:
            # A call by message waits for that as long as its caller does.
            raise ShardBusyError(
                f"the directory took longer than {seconds:g} s to say which producers "
                f"have ended"
            ) from None

    async def _make_room(self, hosted: HostedShard, producer: int) -> None:
        """If a shard has no room for a producer, ask the directory which ones ended."""
        if hosted.shard.segment.current.fixed[N_PRODUCERS] < MAX_PRODUCERS:
            return

        def list_open(shard: Shard) -> list[int]:
            record = shard.segment.current
            is_full = producers.lacks_room(record, producer)
            return producers.list_open(record) if is_full else []

        if open_ids := await self.under(hosted, list_open):
            ended = await self.worker.directory("ended", producers=open_ids)
            await self.under(
                hosted, lambda shard: producers.close_producers(shard.segment, ended)
            )

    def get_shard(self, store: str, shard: int) -> HostedShard:
        """Return a shard, or refuse."""
        try:
            return self.shards[store, shard]
        except KeyError:
            raise self._not_here(store, shard) from None

    def _not_here(self, store: str, shard: int) -> StaleGenerationError:
        return StaleGenerationError(
            f"worker {self.worker.address} holds no shard {shard} of store {store}; ask "
            f"the directory where it lives"
        )

    def is_live(self) -> bool:
        """Return True: this process owns the shards."""
        return True

    # -- control -------------------------------------------------------------

    def members(self, cluster: str) -> Membership | None:
        """Return this process among those that share memory on this machine.

        None if memory is not shared: the machine or the configuration, here or where
        the store was created, does not allow it, or workers are threads.
        """
        inside = self.worker.address.startswith("inproc")
        if not cluster or inside or not config.load().machine_carrier:
            return None
        with self._opening:
            if not self._has_joined:
                self._members = self.machine.join(cluster)
                self._has_joined = True
            return self._members

    def drop_view(self, store: str) -> None:
        """Free the view of a store that is gone, on this machine."""
        self.views.pop(store, None)
        ViewFiles(store, self._members).drop()

    def shared_blocks(self, sizes: Sequence[int]) -> list[Block]:
        """Return memory that other processes can map; none if there is not enough."""
        return [] if self._members is None else self._members.make_all(sizes)

    async def handle_control(
        self, method: str, holds: Sequence[int] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Serve a control message: create, drop, runs, versions, statistics.

        With `holds` it is about these shards of its store, and refused unless they are
        here: others may have come just now, for which another host answers.
        """
        store = str(kwargs.get("store"))
        for shard in (meant := holds if isinstance(holds, (list, tuple)) else ()):
            if type(shard) is int and (store, shard) not in self.shards:
                return refusal(self._not_here(store, shard))
        mine = [h for k, h in self.shards.items() if k[0] == store]  # one may leave
        token = _meant.set(None if holds is None else meant)
        try:
            reply = await self._handlers.serve(str(method), kwargs, lambda _: self)
            if not str(method).startswith(_AT_ONCE):
                mine += [h for k, h in self.shards.items() if k[0] == store]
                await all_backed(dict.fromkeys(mine), self.run_for)
            return reply
        except StaleGenerationError as error:
            return refusal(error)
        finally:
            _meant.reset(token)

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Run `function` on the host's own executor, unless the host has closed."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        try:
            return await loop.run_in_executor(self._executor, function)
        except (RuntimeError, asyncio.CancelledError) as error:
            if not self._is_closed or (task and task.cancelling()):
                raise
            raise StaleGenerationError(
                f"worker {self.worker.address} closes and has no shard any more; ask "
                f"the directory where they live"
            ) from error

    async def run_for(self, hosted: HostedShard, function: Callable[[], T]) -> T:
        """Run `function`, on the event loop if its shard is small."""
        return function() if self.is_small(hosted) else await self.in_thread(function)

    def of(self, store: str) -> list[HostedShard]:
        """Return the shards of a store held here that a message is about, or refuse."""
        meant, mine = _meant.get(), [key for key in self.shards if key[0] == store]
        found = [self.shards[k] for k in mine if meant is None or k[1] in meant]
        if not found:
            raise StaleGenerationError(
                f"worker {self.worker.address} holds no shard of store {store}"
            )
        return found

    async def under(self, hosted: HostedShard, function: Callable[[Shard], T]) -> T:
        """Run a function of a shard under its mutex without blocking the loop."""
        future = hosted.enqueue(function)
        if self.is_small(hosted):
            hosted.serve()
        if not future.done():
            await self.in_thread(partial(hosted.serve, LOCK_SECONDS))
        if not future.done():
            # The thread with the mutex may have passed the turn on to another process.
            self.keep_looking()
        return await asyncio.wrap_future(future)

    async def each(
        self, shards: Iterable[HostedShard], function: Callable[[HostedShard], T]
    ) -> list[T]:
        """Run a function of several shards, of each under its mutex."""

        def work(hosted: HostedShard) -> Awaitable[T]:
            return self.under(hosted, lambda _: function(hosted))

        return await asyncio.gather(*map(work, shards))

    def drop(self, hosted: HostedShard) -> None:
        """End the calls that wait for a shard that was deleted."""
        error = StoreClosedError(
            f"store {hosted.name!r} was closed or deleted while a call waited for it"
        )
        hosted.enqueue(lambda shard: shard.abandon(error))
        hosted.serve()
        hosted.close()
        if hosted.is_shared and hosted.waits:
            self._leaving.append(hosted)
        self.keep_looking()

    def keep_looking(self) -> None:
        """Check shards regularly while calls wait there for other processes."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._look())

    def look_soon(self) -> None:
        """Have the event loop do that; any thread may call this."""
        self.worker.loop.add_callback(self.keep_looking)

    async def _look(self) -> None:
        while waiting := self._waiting():
            for hosted in waiting:
                if hosted.needs_look:
                    await self.run_for(hosted, hosted.look)
            await asyncio.sleep(LOOK_SECONDS)

    def _waiting(self) -> list[HostedShard]:
        self._leaving = [hosted for hosted in self._leaving if hosted.waits]
        shared = [hosted for hosted in self.shards.values() if hosted.is_shared]
        return [hosted for hosted in shared if hosted.waits] + self._leaving

    def close(self, reason: str, *, keeps: bool = False) -> list[str]:
        """End every waiting call with ShardLostError and free the shards.

        Returns the names of blocks that this worker removed as the last of its machine.
        With `keeps` it leaves the blocks of dead workers.
        """
        self._is_closed = True
        if self.sockets is not None:
            self.sockets.close()  # else they would go on answering
        for key in list(self.shards):
            self._lose(key, reason)
        free_moving(self.going, self.coming)
        members, self._members = self._members, None
        removed = [] if members is None else members.leave(keeps=keeps)
        self.snapshots.clear()
        self.views.clear()
        self._executor.shutdown(wait=False, cancel_futures=True)
        return removed

    def _lose(self, key: tuple[str, int], reason: str) -> None:
        """End the calls that wait for a shard, which is lost but for a copy; free it."""
        hosted = self.shards.pop(key)
        lost = ShardLostError(hosted.name, key[1], self.worker.address, reason)
        error = hosted.gone() if hosted.backing else lost
        hosted.enqueue(partial(Shard.abandon, error=error))
        hosted.serve()
        hosted.close()

    def memory_lost(self, what: object, why: str) -> None:
        """Have shards on a device given up, in any thread; see `Device.lose`."""
        self.worker.loop.add_callback(self._lose_memory, what, why)

    async def _lose_memory(self, what: object, why: str) -> None:
        of = {key: hosted.shard.segment.payload for key, hosted in self.shards.items()}
        gone = [key for key, p in of.items() if what in (p.device, p.launcher)]
        about = {"worker": self.worker.address, "shards": gone, "reason": why}
        # First: callers whose calls end may have the store restored at once.
        try:
            await self.worker.directory("memory-lost", **about)
        except (OSError, DaskPSError) as error:
            logger.info("could not tell the scheduler: a worker %s: %r", why, error)
        for key in self.shards.keys() & gone:
            self._lose(key, why)

    @property
    def held_nbytes(self) -> int:
        """Bytes of the shards here, and of copies of others."""
        coming = [one.hosted for one in list(self.coming.values())]
        return sum(hosted.nbytes for hosted in [*self.shards.values(), *coming])

    def totals(self) -> dict[str, int]:
        """Return the numbers that the worker shows of this host."""
        kept = self.contributions
        sockets = 0 if self.sockets is None else len(self.sockets)
        return {
            "shards": len(self.shards),
            "nbytes": self.held_nbytes + kept.nbytes + self.collectives.nbytes,
            "contributions": kept.n,
            "snapshots": self.snapshots.nbytes,
            "answers": self.budget.nbytes,
            "sockets": sockets,
            "lanes": sockets,  # its old name, for one release
        }

    def leaves(self) -> bool:
        """Return whether the worker closes: then it takes no more shards."""
        return self.is_leaving

    def give_up(self, token: str) -> None:
        """End the wait of a call whose caller has gone."""
        if woken := self.waiting.get(token):
            _wake(woken)


def _answers(
    call: Call, started: Sequence[Started], empty: Empty | None, seconds: float
) -> list[Answer]:
    """Return the shards' answers; encode values as words if the caller wants that."""
    found = answers_of(started, empty, seconds=seconds)
    return in_words(found, call.parts, empty) if empty and call.read_codec else found


def _wake(woken: asyncio.Future[Any]) -> None:
    if not woken.done():
        woken.set_result(None)
