"""One shard on its host: the mutex around the state machine, and calls that wait.

A thread that brings a ticket puts it into the inbox. If no other thread has the mutex,
it takes the mutex and serves the whole inbox; otherwise the holder serves it. So no
thread that brings a ticket blocks on the mutex, only a reader in its
:meth:`HostedShard.turn`; and one pass over memory applies all pushes in the queue.

If the shard's memory is shared with other processes, the thread with the mutex also
takes the lock between processes. It may have to wait for that: with no time to wait
it leaves the inbox, and the host calls :meth:`HostedShard.look` until it is served.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from daskps import config
from daskps.errors import ShardBusyError, StaleGenerationError
from daskps.shards.deputy import CLOSED, RELEASED, set_gate
from daskps.shards.memory.format import GENERATION
from daskps.shards.shard import Shard
from daskps.shards.steps import ASK, Ready, Ticket
from daskps.usercode import holding_interrupts

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator, Sequence

    from daskps.cluster.machine.blocks import Block
    from daskps.layout.arrays import Layout
    from daskps.reduction import Empty
    from daskps.shards.steps import Step
    from daskps.typing import Array

T = TypeVar("T")


@dataclass(eq=False)
class Backing:
    """The second copy of a shard, on another worker, as the owner knows it."""

    move: str
    #: The flip up to which it has the shard, and the worker that it is on.
    flip: int = -1
    worker: str = ""
    #: Tickets that wait for it, each with the flip that it has to have.
    waiting: list[tuple[int, Ticket]] = field(default_factory=list)
    #: Its question for what it lacks, a `NextState`; used under the shard's mutex.
    asked: Any = None
    #: Why nobody is answered any more.
    error: Exception | None = None
    #: Sees whether it is silent: how often in a row it has not asked since.
    watching: asyncio.Future[None] | None = None
    n_silent: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def park(self, flip: int, ticket: Ticket) -> None:
        """End a ticket once it has a flip."""
        with self.lock:
            if flip > self.flip and self.error is None:
                self.waiting.append((flip, ticket))
                return
        ticket.outcome = self.error or _BACKED

    def reach(self, flip: int) -> list[Ticket]:
        """Hear that it has a flip; end the tickets that wait for no later one."""
        with self.lock:
            # A late message says less than one that came before it.
            self.flip = flip = max(self.flip, flip)
            done = [ticket for least, ticket in self.waiting if least <= flip]
            self.waiting = [one for one in self.waiting if one[0] > flip]
        for ticket in done:
            ticket.outcome = _BACKED
        return done

    def send(self, owner: Shard) -> list[Ticket]:
        """Answer its question, if it has one."""
        asked, self.asked = self.asked, None
        return asked.take(owner) if asked else []

    def ended(self, error: Exception | None = None) -> list[Ticket]:
        """Wait for it no more; return the answers that waited, refused by an error."""
        with self.lock:
            self.error, done = error, [ticket for _, ticket in self.waiting]
            self.waiting, self.flip = [], self.flip if error else sys.maxsize
        for ticket in done:
            ticket.outcome = error or _BACKED
        # No cycle keeps the shard's memory until the garbage collector runs.
        asked, self.asked = self.asked, None
        if asked is not None:
            done += asked.refuse("the copy counts no more")
        return done

    def end(self, error: Exception) -> None:
        """Do the same, for a shard that has another owner; any thread may call this."""
        for ticket in self.ended(error):
            ticket.owner.one_done()


#: The outcome of tickets that waited for a copy.
_BACKED = Ready(0, 0)
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
        #: Run and memory of the mailboxes that trainers on this machine fill themselves.
        self.mailbox: tuple[int, Block] | None = None
        #: Done when the shard has all of its memory.
        self.has_memory: asyncio.Future[None] | None = None
        #: The run that has last begun here, and its first flip.
        self.began = (0, 0)
        #: The move that has brought it here from another machine, "" for none.
        self.came_by = ""
        #: Its second copy: answers wait until that has what they tell.
        self.backing: Backing | None = None
        #: The last change of copies that it has heard of, see `StoreEntry.n_changed`.
        self.told_copies = 0
        self.is_shared = block is not None
        #: Bytes of the shard that the host has last told the directory.
        self.told_nbytes = shard.segment.held_nbytes
        #: Its pushes when its host has last told them with a heartbeat.
        self.told_pushes: int | None = None
        #: Whether readers take the lock too, as on processors that reorder stores.
        self.locks_reads = self.is_shared and config.load().locked_reads
        self._lock = None if block is None else block.lock()
        self._mutex = threading.Lock()
        self._inbox: deque[Ticket | Callable[[], Sequence[Ticket]]] = deque()
        #: The error of all calls after the release of the shard.
        self._released: Exception | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its memory now; with unbounded tables it grows."""
        return self.shard.segment.held_nbytes

    def put(self, ticket: Ticket) -> None:
        """Queue a ticket; :meth:`serve` does the work."""
        self._inbox.append(ticket)

    def withdraw(self, ticket: Ticket) -> bool:
        """Take back a ticket; return False if a thread has taken it out already."""
        try:
            self._inbox.remove(ticket)
        except ValueError:
            return False
        return True

    def enqueue(self, function: Callable[[Shard], T]) -> Future[T]:
        """Queue a function of the shard that runs under its mutex, at the next `serve`."""
        future: Future[T] = Future()

        def call() -> Sequence[Ticket]:
            try:
                if self._released is not None:
                    # Another process may own the shard by now.
                    raise self._released
                result = function(self.shard)
            except Exception as error:  # noqa: BLE001 - the future raises it to its caller
                future.set_exception(error)
                return ()
            future.set_result(result)
            done = result if isinstance(result, list) else []
            return [t for t in done if isinstance(t, Ticket)]

        self._inbox.append(call)
        return future

    @property
    def waits(self) -> bool:
        """Whether any ticket waits here."""
        return bool(self._inbox) or bool(self.shard.waiting)

    def locked_by(self) -> int:
        """Return the process that uses the shard now, 0 if none does."""
        # First: the thread with the mutex may itself wait for another process.
        if self._lock is not None and (pid := self._lock.held_by()):
            return pid
        return os.getpid() if self._mutex.locked() else 0

    def release(self, error: Exception) -> Future[list[Ticket]]:
        """Let go of a shared shard under its lock: a host that adopts it owns it then.

        All calls that wait here, and all later ones, get `error`.
        """

        def let_go(shard: Shard) -> list[Ticket]:
            done, self._released = shard.abandon(error), error
            # Else another host took the owner for dead, and has adopted the shard.
            if shard.segment.words[GENERATION] == shard.generation:
                self.leave()
            return done

        return self.enqueue(let_go)

    def leave(self) -> None:
        """Leave the memory of a shared shard to a host that adopts it."""
        if self.block is not None:
            self.block.release()
            if self.mailbox is not None:
                self.mailbox[1].release()
            set_gate(self.shard.segment, RELEASED)

    def hand_over(self, generation: int) -> list[Ticket]:
        """Stop changes and reads, in all processes, for a new owner elsewhere.

        Under the lock, as a function of :meth:`enqueue`. The memory stays as it is until
        :meth:`resume` or :meth:`close`.
        """
        self._released = error = self.gone()
        # Other processes find another incarnation, and ask the directory.
        self.shard.segment.header[GENERATION] = generation
        return self.shard.abandon(error)

    def resume(self, generation: int) -> None:
        """Own the shard again: it did not come to have another owner."""
        self.shard.resume(generation)
        self._released = None

    @property
    def behind(self) -> int:
        """Updates that its second copy has yet to get, 0 where there is none."""
        backing = self.backing
        return 0 if backing is None else self.shard.segment.flip - max(0, backing.flip)

    def back(self, ticket: Ticket) -> None:
        """End a ticket once the second copy, if any, has what the shard has now.

        With an error where the shard has another owner meanwhile. Any thread calls this
        after it has made what it answers.
        """
        backing = self.backing
        if backing is None:
            ticket.outcome = _BACKED
            return
        backing.park(self.shard.segment.flip, ticket)
        if ticket.outcome is None:
            self.send_on()

    def send_on(self) -> None:
        """Have a copy that asks sent what it lacks; any thread may call this."""
        if (backing := self.backing) is not None and backing.asked is not None:
            self.enqueue(backing.send)
            self.serve()

    def gone(self) -> StaleGenerationError:
        """Return what callers get of a shard that has, or will have, another owner."""
        return StaleGenerationError(
            f"shard {self.index} of store {self.name!r} is here no more; ask the "
            f"directory where it lives"
        )

    @property
    def is_released(self) -> bool:
        """Whether another process may own the shard by now."""
        return self._released is not None

    def close(self) -> None:
        """Tell processes that map the shard's memory that it is gone, and free it."""
        if self.backing is not None:
            self.backing.end(self.gone())
        set_gate(self.shard.segment, CLOSED)
        self.free_mailbox()
        if self.block is not None:
            self.block.free()

    def mailboxes_of(self, run: int) -> Array | None:
        """Return the memory for a run's mailboxes, behind the block's own header."""
        if self.mailbox is None or self.mailbox[0] != run:
            return None
        return self.mailbox[1].body

    def free_mailbox(self) -> None:
        """Free the memory of mailboxes; processes that map it keep it a while."""
        if self.mailbox is not None:
            self.mailbox[1].free()
            self.mailbox = None

    @property
    def needs_look(self) -> bool:
        """Whether a ticket waits here that another process may have made possible."""
        return bool(self._inbox) or self.shard.parked.is_stale

    def look(self) -> None:
        """Serve tickets that another process's lock or publications kept waiting."""
        if self.shard.parked.is_stale and not self._inbox:
            self._inbox.append(lambda: self.shard.submit(()))
        self.serve()

    def serve(self, seconds: float = 0.0) -> None:
        """Serve the inbox, unless another thread serves it already.

        Parameters
        ----------
        seconds : float
            How long to wait for another process to release the lock; with 0 the thread
            takes only a free lock.
        """
        # The event loop may run in the main thread, which gets the interrupts.
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

    def try_step(self, step: Step, seconds: float) -> int:
        """Have the shard take a step at once; see :meth:`Shard.step`.

        Runs in the thread that calls: a trainer's (`SplitRoute.try_step`), in any process
        that maps the shard, or one of sockets (`HostTemplate`), in that of the host.

        Returns
        -------
        int
            The version of the shard; or ASK, also if another thread has the mutex.

        Raises
        ------
        ShardBusyError
            If another process kept the lock for so many seconds. Nothing was changed.
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
                version = shard.step(step, alone=False)
                if version != ASK and shard.parked.tickets:
                    done = shard.submit(())  # waiting tickets may need this step
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
        """Serve a step now if the mutex is free; else its holder serves it.

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
        """Withdraw a ticket that is not done.

        A thread may read the ticket's arrays until the returned future, if any, is
        done. This method waits for that, for `seconds` at most.
        """
        if ticket.outcome is not None or self.withdraw(ticket):
            return None
        gone = self.enqueue(partial(Shard.cancel, tickets=[ticket]))
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
        tickets: list[Ticket] = []
        done: list[Ticket] = []
        while self._inbox:
            entry = self._inbox.popleft()
            if isinstance(entry, Ticket):
                tickets.append(entry)
            else:
                # Tickets before a control call are applied before it.
                done += self._submit(tickets)
                tickets = []
                done += entry()
        return done + self._submit(tickets)

    def _submit(self, tickets: list[Ticket]) -> list[Ticket]:
        try:
            return self.shard.submit(tickets)
        except Exception as error:  # noqa: BLE001 - each ticket raises it to its caller
            for ticket in tickets:
                ticket.outcome = error
            return tickets

    @contextlib.contextmanager
    def turn(self, seconds: float) -> Iterator[None]:
        """Keep all other threads and processes away from the shard, for a reader.

        Raises
        ------
        ShardBusyError
            If the turn did not come in time.
        """
        busy = ShardBusyError(
            f"a read of shard {self.index} of store {self.name!r} waited for its turn "
            f"among the updates, which did not come within {seconds:g} s; read again, "
            f"with a longer timeout="
        )
        # With no time to wait, it fails at once, unless readers always take the lock.
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
            # A thread that came meanwhile found the mutex taken and left its ticket.
            self.serve()


def free_moving(
    going: dict[Any, Any], coming: dict[Any, Any], store: str | None = None
) -> None:
    """Free the shards, of one store or all, that move away and that come; and copies."""
    for key in [k for k in going if store in (None, k[0])]:
        of = going.pop(key)
        if of.is_handed_over and store is None:
            of.hosted.leave()  # nobody may have it elsewhere yet
        elif of.is_handed_over:
            of.hosted.close()
    for key in [k for k in coming if store in (None, k[0])]:
        coming.pop(key).close()


class ReachableShards(ABC):
    """Shards of one worker, in its process or mapped into another one.

    Parameters
    ----------
    empty : callable
        Makes arrays for the values that are read and widened here.
    patience : float
        Most seconds that a call waits here.
    """

    #: Whether this process owns the shards.
    is_own = False

    def __init__(self, empty: Empty, patience: float) -> None:
        self.shards: dict[tuple[str, int], HostedShard] = {}
        self.empty, self.patience = empty, patience

    @abstractmethod
    def is_live(self) -> bool:
        """Return whether the owner of the shards is there."""

    @abstractmethod
    def make_room(self, hosted: HostedShard, producer: int, seconds: float) -> None:
        """Make room at a shard for the pushes of a producer, if it needs any.

        Raises
        ------
        ShardBusyError
            If that takes longer than so many seconds.
        """
