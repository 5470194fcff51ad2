"""Calls to shards from threads of this process, whoever owns the shards.

The host of a worker serves its own shards this way, and mapped shards are those of
another worker of the machine. Both end in :meth:`HostedShard.serve` and differ in
nothing else.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from daskps.cluster.host.hosted import LOCK_SECONDS, Countdown, HostedShard
from daskps.cluster.machine.pauses import Pause
from daskps.cluster.wire.encoding import widened
from daskps.cluster.wire.messages import Answer, Call, Part
from daskps.errors import ConsistencyError, ShardBusyError
from daskps.shards.deputy import NotHereError
from daskps.shards.shard import Shard
from daskps.shards.steps import NO_WAIT, READ, Ready, Step, Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from daskps.typing import Array

#: How long a call looks at shared shards without sleeping in between.
SPIN_SECONDS = 0.0005
#: What a read gets to wait for its turn, however late it is.
MIN_SECONDS = 0.01
#: How long a call that was given up tries to take its tickets back.
STOP_SECONDS = 1.0

Started = tuple[HostedShard, Part, Ticket]


class MakeRoom(Protocol):
    """Makes an array like ``np.empty(n, dtype)``."""

    def __call__(self, n: int, dtype: Any, /) -> Array:
        """Return an array whose content is undefined."""


class Exchange:
    """One call under way in the thread that began it.

    Parameters
    ----------
    serving : NearShards
        Whose shards are called.
    call : Call
        What is said to them.
    """

    def __init__(self, serving: NearShards, call: Call) -> None:
        self.call = call
        self._serving = serving
        self._woken = threading.Event()
        self._is_stopped = False
        # `call` stays as it is: what is handed back goes by message.
        given = serving.widened(call)
        self._pending, self._tickets = serving.start(
            given, given.given, self._woken.set
        )

    def serve(self, seconds: float) -> None:
        """Have the shards look at the call; those that must wait keep it."""
        try:
            for slot, _, _ in self._tickets:
                slot.serve(seconds)
        except BaseException:
            self.abandon()
            raise

    def handed_back(self) -> set[int]:
        """Return the shards that leave the call to their owner."""
        return {
            part.shard
            for _, part, ticket in self._tickets
            if isinstance(ticket.outcome, NotHereError)
        }

    def finish(
        self, outs: Mapping[int, Sequence[Array]], seconds: float
    ) -> list[Answer]:
        """Wait for the answers as long as that makes sense here; read into `outs`."""
        end = time.monotonic() + seconds
        try:
            if not self._pending.done:
                self._wait(min(seconds, self._serving.patience))
        finally:
            if not self._pending.done:
                self.abandon()
        left = max(MIN_SECONDS, min(end - time.monotonic(), LOCK_SECONDS))
        return self._serving.answers(self._tickets, outs, seconds=left)

    def abandon(self) -> None:
        """Stop waiting; afterwards nobody reads the caller's arrays."""
        for given_up in self._serving.abandon(self._tickets, STOP_SECONDS):
            with contextlib.suppress(TimeoutError):
                given_up.result(STOP_SECONDS)

    def stop(self) -> None:
        """End the wait of another thread."""
        self._is_stopped = True
        self._woken.set()

    def _wait(self, seconds: float) -> None:
        shared = [slot for slot, _, _ in self._tickets if slot.is_shared]
        if not shared:
            self._woken.wait(seconds)
            return
        # Who publishes in another process wakes nobody here.
        pause = Pause(SPIN_SECONDS)
        while True:
            for slot in shared:
                slot.look()
            is_over = self._pending.done or self._is_stopped
            if is_over or pause.seconds >= seconds:
                return
            pause()


class NearShards(ABC):
    """Shards that this process can call.

    Parameters
    ----------
    empty : callable
        Makes the arrays of reads that name no place.
    patience : float
        Seconds a call waits here at most.
    """

    def __init__(self, empty: MakeRoom, patience: float) -> None:
        self.slots: dict[tuple[str, int], HostedShard] = {}
        self.patience = patience
        self._empty = empty

    @abstractmethod
    def missing(self, store: str, shard: int) -> Exception:
        """Return what a call of a shard that is not here gets."""

    @abstractmethod
    def is_live(self) -> bool:
        """Return whether who owns the shards is there."""

    def slot(self, store: str, shard: int) -> HostedShard:
        """Return a shard, or refuse."""
        try:
            return self.slots[store, shard]
        except KeyError:
            raise self.missing(store, shard) from None

    def widened(self, call: Call) -> Call:
        """Return a call with the numbers that its words stand for."""
        if not call.codec:
            return call
        layout = self.slot(call.store, call.parts[0].shard).layout
        return widened(call, layout, self._empty)

    def start(
        self, call: Call, owned: bool, callback: Callable[[], None]
    ) -> tuple[Countdown, list[Started]]:
        """Put a call into the inboxes of its shards."""
        slots = [self.slot(call.store, part.shard) for part in call.parts]
        pending = Countdown(len(slots), callback)
        started = [
            (slot, part, Ticket(step_of(call, part, owned), owner=pending))
            for slot, part in zip(slots, call.parts, strict=True)
        ]
        for slot, _, ticket in started:
            slot.put(ticket)
        return pending, started

    def begin_now(self, call: Call, seconds: float) -> Exchange:
        """Begin a call in the caller's thread; :meth:`Exchange.finish` ends it."""
        exchange = Exchange(self, call)
        exchange.serve(seconds)
        return exchange

    def glance(
        self, call: Call, outs: Mapping[int, Sequence[Array]]
    ) -> list[Answer] | None:
        """Read without a lock; None where the shards must be asked."""
        if call.run or call.changes or call.wait != READ or not self.is_live():
            return None
        answers = []
        for part in call.parts:
            slot, out = self.slots.get((call.store, part.shard)), outs.get(part.shard)
            if slot is None or out is None:
                return None
            ready = slot.glance(step_of(call, part, owned=False), part, out)
            if ready is None:
                return None
            answers.append(Answer(part.shard, version=ready.version, arrays=tuple(out)))
        return answers

    def abandon(
        self, tickets: Sequence[Started], seconds: float = 0.0
    ) -> list[Future[None]]:
        """Stop waiting: what is not applied yet never will be under this ticket."""
        given_up = []
        for slot, _, ticket in tickets:
            if ticket.outcome is None and not slot.withdraw(ticket):
                given_up.append(slot.run(partial(Shard.cancel, tickets=[ticket])))
                with contextlib.suppress(ShardBusyError):
                    slot.serve(seconds)
        return given_up

    def answers(
        self,
        tickets: Sequence[Started],
        outs: Mapping[int, Sequence[Array]] | None = None,
        *,
        seconds: float,
    ) -> list[Answer]:
        """Return what the shards say, reading what they may; see :meth:`HostedShard.read`.

        A read whose turn does not come within these seconds, together, waits on. With
        0 it raises ShardBusyError.
        """
        end, found = time.monotonic() + seconds, []
        for started in tickets:
            given = outs.get(started[1].shard) if outs else None
            left = max(MIN_SECONDS, end - time.monotonic()) if seconds else 0.0
            found.append(self._answer(started, given, left))
        return found

    def _answer(
        self, started: Started, outs: Sequence[Array] | None, seconds: float
    ) -> Answer:
        slot, part, ticket = started
        outcome = ticket.outcome
        if isinstance(outcome, Exception):
            return Answer(part.shard, error=outcome, applied=ticket.applied)
        if not isinstance(outcome, Ready):
            return Answer(part.shard, parked=True, applied=ticket.applied)
        if part.ranges:
            if outs is None:
                outs = [
                    self._empty(stop - start, dtype)
                    for dtype, start, stop in part.ranges
                ]
            try:
                outcome = slot.read(ticket, part, outs, seconds)
            except ShardBusyError:
                if not seconds:
                    raise
                return Answer(part.shard, parked=True, applied=ticket.applied)
            except (ConsistencyError, NotHereError) as error:
                return Answer(part.shard, error=error, applied=ticket.applied)
        version = outcome.version if part.ranges else ticket.version or outcome.version
        return Answer(
            part.shard,
            version=version,
            duplicate=outcome.duplicate,
            lag=outcome.lag,
            arrays=tuple(outs or ()),
        )


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
        whole=call.whole,
    )
