"""One shard on its host: the mutex around the state machine, and calls that wait.

Whoever brings a ticket puts it into the inbox and, if nobody else is at it, takes the
mutex and serves the whole inbox; otherwise the holder serves it. Nobody ever blocks
on the mutex, and pushes that queue up are applied in one pass over memory.

Where the shard's memory is shared with other processes, the thread with the mutex takes the
lock between the processes too. That one may have to be waited for: with no time to
wait an inbox stays as it is, and :meth:`HostedShard.look` is called until it is served.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from daskps import config
from daskps.errors import ShardBusyError
from daskps.shards.deputy import CLOSED, RELEASED, set_gate
from daskps.shards.memory.areas import PAGE_NBYTES
from daskps.shards.memory.format import GENERATION
from daskps.shards.shard import Shard
from daskps.shards.steps import ASK, Ticket
from daskps.usercode import holding_interrupts

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from daskps.cluster.machine.blocks import Block
    from daskps.layout.arrays import Layout
    from daskps.shards.steps import Item, Tick
    from daskps.typing import Array

T = TypeVar("T")
#: How long a thread waits for another process to release a shard.
LOCK_SECONDS = 20.0


class HostedShard:
    """A shard, its mutex and its inbox.

    Parameters
    ----------
    name : str
        Name of the store.
    layout : Layout
        Its layout.
    index : int
        Number of the shard.
    shard : Shard
        The state machine.
    block : Block, optional
        The shard's memory, where it is shared with other processes.
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        index: int,
        shard: Shard,
        *,
        block: Block | None = None,
    ) -> None:
        self.name, self.layout, self.index, self.shard = name, layout, index, shard
        self.block = block
        #: Run and memory of the mailboxes that trainers here may fill themselves.
        self.mailbox: tuple[int, Block] | None = None
        #: Ends when all of its memory is there.
        self.has_memory: asyncio.Future[None] | None = None
        #: The run that has begun here last, and at which flip.
        self.began = (0, 0)
        self.is_shared = block is not None
        #: How many bytes it takes, as the directory has heard.
        self.told_nbytes = shard.segment.held_nbytes
        #: Whether readers take the lock too, as where processors reorder stores.
        self.locks_reads = self.is_shared and config.load().locked_reads
        self._lock = None if block is None else block.lock()
        self._mutex = threading.Lock()
        self._inbox: deque[Ticket | Callable[[], Sequence[Ticket]]] = deque()
        #: What everybody gets since the shard was released.
        self._released: Exception | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its memory now; with tables of any ids it grows."""
        return self.shard.segment.held_nbytes

    def put(self, ticket: Ticket) -> None:
        """Queue a ticket; :meth:`serve` does the work."""
        self._inbox.append(ticket)

    def withdraw(self, ticket: Ticket) -> bool:
        """Take a ticket back that nobody has looked at; return whether that was so."""
        try:
            self._inbox.remove(ticket)
        except ValueError:
            return False
        return True

    def run(self, function: Callable[[Shard], T]) -> Future[T]:
        """Queue a function of the shard that runs under its mutex."""
        future: Future[T] = Future()

        def call() -> Sequence[Ticket]:
            try:
                if self._released is not None:
                    # Another process may be its owner by now.
                    raise self._released
                result = function(self.shard)
            except Exception as error:  # noqa: BLE001 - the caller's to handle
                future.set_exception(error)
                return ()
            future.set_result(result)
            done = result if isinstance(result, list) else []
            return [t for t in done if isinstance(t, Ticket)]

        self._inbox.append(call)
        return future

    @property
    def waits(self) -> bool:
        """Whether anything waits here at all."""
        return bool(self._inbox) or bool(self.shard.waiting)

    def locked_by(self) -> int:
        """Return the process that is at the shard now, 0 where none is."""
        # First: the thread with the mutex may itself wait for another process.
        if self._lock is not None and (pid := self._lock.held_by()):
            return pid
        return os.getpid() if self._mutex.locked() else 0

    def release(self, error: Exception) -> Future[list[Ticket]]:
        """Let go of a shared shard under its lock: whoever adopts it owns it then.

        All calls that wait here, and all later ones, get `error`.
        """

        def let_go(shard: Shard) -> list[Ticket]:
            done, self._released = shard.abandon(error), error
            segment, block = shard.segment, self.block
            # Else it was taken for dead, and somebody has it already.
            if block is not None and segment.words[GENERATION] == shard.generation:
                block.release()
                if self.mailbox is not None:
                    self.mailbox[1].release()
                set_gate(segment, RELEASED)
            return done

        return self.run(let_go)

    @property
    def is_released(self) -> bool:
        """Whether others may own the shard by now."""
        return self._released is not None

    def close(self) -> None:
        """Tell processes that map the shard's memory that it is gone, and free it."""
        set_gate(self.shard.segment, CLOSED)
        self.free_mailbox()
        if self.block is not None:
            self.block.free()

    def mailboxes_of(self, run: int) -> Array | None:
        """Return the memory for a run's mailboxes, behind the block's own header."""
        if self.mailbox is None or self.mailbox[0] != run:
            return None
        return self.mailbox[1].buffer[PAGE_NBYTES:]

    def free_mailbox(self) -> None:
        """Give back the memory of mailboxes; who maps them keeps them a while."""
        if self.mailbox is not None:
            self.mailbox[1].free()
            self.mailbox = None

    @property
    def needs_look(self) -> bool:
        """Whether something waits here that another process may have made possible."""
        return bool(self._inbox) or self.shard.parked.is_stale

    def look(self) -> None:
        """Serve what another process's lock or publications kept waiting."""
        if self.shard.parked.is_stale and not self._inbox:
            self._inbox.append(lambda: self.shard.submit(()))
        self.serve()

    def serve(self, seconds: float = 0.0) -> None:
        """Serve the inbox, unless somebody is at it already.

        Parameters
        ----------
        seconds : float
            How long to wait for another process to release the lock; 0 takes it
            only where it is free.
        """
        # An event loop may be the main thread's.
        with holding_interrupts():
            while self._inbox and self._mutex.acquire(blocking=False):
                try:
                    if not self._enter(seconds):
                        return
                    try:
                        done = self._serve_once()
                    finally:
                        self._leave()
                finally:
                    self._mutex.release()
                for ticket in done:
                    ticket.owner.one_done()

    def try_step(
        self,
        tick: Tick,
        arrays: Mapping[int, Array],
        seconds: float,
        rows: Sequence[Item] = (),
        *,
        check: bool = False,
    ) -> int:
        """Have the shard take a step that is simple; see :meth:`Shard.try_step`.

        Returns
        -------
        int
            The version of the shard; or ASK, also where somebody is at it.

        Raises
        ------
        ShardBusyError
            Where another process kept the lock for so many seconds. Nothing was changed.
        """
        if self._inbox or not self._mutex.acquire(blocking=False):
            return ASK
        shard, lock = self.shard, self._lock
        done: Sequence[Ticket] = ()
        try:
            if lock is not None:
                if seconds:
                    lock.acquire(seconds)
                elif not lock.try_acquire():
                    return ASK
            try:
                version = shard.try_step(tick, arrays, rows, alone=False, check=check)
                if version != ASK and shard.parked.tickets:
                    done = shard.submit(())  # it may be what they wait for
            finally:
                if lock is not None:
                    lock.release()
        finally:
            self._mutex.release()
        for ticket in done:
            ticket.owner.one_done()
        if self._inbox:
            self.serve()
        return version

    def offer(self, ticket: Ticket, seconds: float) -> None:
        """Have the shard look at a step now, if nobody is at it; else that one does.

        Parameters
        ----------
        ticket : Ticket
            The step.
        seconds : float
            How long the thread waits for another process to release the lock.

        Raises
        ------
        ShardBusyError
            Where another process kept the lock. Nothing was changed.
        """
        if self._inbox or not self._mutex.acquire(blocking=False):
            self._inbox.append(ticket)
            try:
                self.serve(seconds)
            except ShardBusyError:
                if self.withdraw(ticket):
                    raise
            return
        try:
            if self._lock is not None:
                self._lock.acquire(seconds)
            try:
                done = self._submit([ticket])
            finally:
                self._leave()
        finally:
            self._mutex.release()
        for other in done:
            other.owner.one_done()
        if self._inbox:
            self.serve()

    def take_back(self, ticket: Ticket, seconds: float = 0.0) -> Future[None] | None:
        """Have nobody look at a ticket any more, unless it is done.

        Until the future that this may return is done, a thread may read its arrays. So
        long the caller waits for it here.
        """
        if ticket.outcome is not None or self.withdraw(ticket):
            return None
        gone = self.run(partial(Shard.cancel, tickets=[ticket]))
        with contextlib.suppress(ShardBusyError):
            self.serve(seconds)
        wait([gone], seconds)
        return gone

    def _enter(self, seconds: float) -> bool:
        """Take the lock between processes; return whether that was possible."""
        if self._lock is None:
            return True
        if not seconds:
            return self._lock.try_acquire()
        self._lock.acquire(seconds)
        return True

    def _leave(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _serve_once(self) -> list[Ticket]:
        tickets, done = list[Ticket](), list[Ticket]()
        while self._inbox:
            entry = self._inbox.popleft()
            if isinstance(entry, Ticket):
                tickets.append(entry)
            else:
                # What came before a control call is applied before it.
                done += self._submit(tickets)
                tickets = []
                done += entry()
        return done + self._submit(tickets)

    def _submit(self, tickets: list[Ticket]) -> list[Ticket]:
        try:
            return self.shard.submit(tickets)
        except Exception as error:  # noqa: BLE001 - or the callers wait for ever
            for ticket in tickets:
                ticket.outcome = error
            return tickets

    @contextlib.contextmanager
    def turn(self, seconds: float) -> Iterator[None]:
        """Keep everybody else away from the shard, for a reader.

        Raises
        ------
        ShardBusyError
            Where the turn did not come in time.
        """
        busy = ShardBusyError(
            f"a read of shard {self.index} of store {self.name!r} waited for its turn "
            f"among the updates, which did not come within {seconds:g} s; read again, "
            f"with a longer timeout="
        )
        # Where only updates that ran into a copy lead here, an event loop leaves.
        at_all, end = seconds or self.locks_reads, time.monotonic() + seconds
        if not (at_all and self._mutex.acquire(timeout=seconds)):
            raise busy
        try:
            if not self._enter(max(0.0, end - time.monotonic())):
                raise busy
            try:
                yield
            finally:
                self._leave()
        finally:
            self._mutex.release()
