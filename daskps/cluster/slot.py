"""One shard on its host: the mutex around the state machine, and who waits for it.

Whoever brings a ticket puts it into the inbox and, if nobody else is at it, takes the
mutex and serves the whole inbox; otherwise the holder serves it. Nobody ever blocks
on the mutex, and pushes that queue up are applied in one pass over memory.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from daskps.shards.base import NO_WAIT, READ, Array, Ready, Step, Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.cluster.messages import Call, Part
    from daskps.layout import Layout
    from daskps.shards.dense import Shard

T = TypeVar("T")


class Pending:
    """Tickets of one call; calls back once all of them are done."""

    def __init__(self, n: int, callback: Callable[[], None]) -> None:
        self._left = n
        self.done = False
        self._lock = threading.Lock()
        self._callback = callback

    def one_done(self) -> None:
        """Count one ticket as done."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self.done = True
            self._callback()


class Slot:
    """A shard, its mutex and its inbox."""

    def __init__(self, name: str, layout: Layout, index: int, shard: Shard) -> None:
        self.name, self.layout = name, layout
        self.index, self.shard = index, shard
        self.nbytes = shard.segment.nbytes
        self._mutex = threading.Lock()
        self._inbox: deque[Ticket | Callable[[], Sequence[Ticket]]] = deque()

    def put(self, ticket: Ticket) -> None:
        """Queue a ticket; :meth:`serve` does the work."""
        self._inbox.append(ticket)

    def run(self, function: Callable[[Shard], T]) -> Future[T]:
        """Queue a function of the shard that runs under its mutex."""
        future: Future[T] = Future()

        def call() -> Sequence[Ticket]:
            try:
                result = function(self.shard)
            except Exception as error:  # noqa: BLE001 - the caller's to handle
                future.set_exception(error)
                return ()
            future.set_result(result)
            done = result if isinstance(result, list) else []
            return [t for t in done if isinstance(t, Ticket)]

        self._inbox.append(call)
        return future

    def serve(self) -> None:
        """Serve the inbox, unless somebody is at it already."""
        while self._inbox and self._mutex.acquire(blocking=False):
            try:
                done = self._serve_once()
            finally:
                self._mutex.release()
            for ticket in done:
                ticket.owner.one_done()

    def _serve_once(self) -> list[Ticket]:
        tickets: list[Ticket] = []
        done: list[Ticket] = []
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

    def read(self, ticket: Ticket, part: Part, outs: Sequence[Array]) -> Ready:
        """Copy the ranges of `part` into `outs`, each whole and all of one version."""
        ready = _ready(ticket)
        parts = [(*r, out) for r, out in zip(part.ranges, outs, strict=True)]
        for _ in range(2):
            if self.shard.read(ready, parts):
                return ready
            if ticket.step.run:
                break
            ready = self._latest(ready)
        with self._mutex:
            if (
                not ticket.step.run
                or ticket.step.rank < 0
                or self.shard.segment.flip > ready.flip + 1
            ):
                ready = self._latest(ready)
            self.shard.read(ready, parts)
        self.serve()
        return ready

    def _latest(self, ready: Ready) -> Ready:
        segment = self.shard.segment
        flip = segment.flip
        version = segment.record(flip).version
        return Ready(flip, version, ready.duplicate, ready.lag)


def _ready(ticket: Ticket) -> Ready:
    if not isinstance(ticket.outcome, Ready):
        raise TypeError(f"nothing to read: {ticket.outcome!r}")
    return ticket.outcome


def step_of(call: Call, part: Part, owned: bool) -> Step:
    """Return what `call` says to the shard of `part`."""
    wait = call.wait
    if wait == NO_WAIT and part.ranges:
        wait = READ
    return Step(
        kind=call.kind,
        items=part.items,
        run=call.run,
        rank=call.rank,
        clock=call.clock,
        tick=call.tick,
        producer=call.producer,
        sequence=call.sequence,
        generation=part.generation,
        weight=call.weight,
        lr=call.lr,
        wait=wait,
        at_least=part.at_least,
        owned=owned,
        floor=call.floor,
        touched=call.touched,
    )
