"""One call to several hosts from a thread: what goes without messages, and the rest.

All shards get their part before the thread waits for any of them. Under BSP another
trainer may wait for this one on the next shard.
"""

from __future__ import annotations

import concurrent.futures
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, Self

from daskps.cluster.caller.answers import again, raise_first
from daskps.cluster.caller.interrupts import shielded
from daskps.errors import ShardBusyError, StaleGenerationError
from daskps.shards.deputy import NotHereError
from daskps.usercode import is_main

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.caller.link import CallFuture, Link
    from daskps.cluster.host.exchange import Exchange, NearShards
    from daskps.cluster.wire.deadline import Deadline
    from daskps.cluster.wire.messages import Answer, Call
    from daskps.typing import Array

    Outs = Mapping[int, Sequence[Array]]

#: How long to wait for the lock of a shard before its owner is asked.
PATIENCE_SECONDS = 1.0
#: How long to wait for a message that was called off.
STOP_SECONDS = 5.0


@dataclass(slots=True)
class Counters:
    """What a handle has done: messages, calls without one, their bytes, retries."""

    messages: int = 0
    local_calls: int = 0
    nbytes: int = 0
    retries: int = 0


class Sender(Protocol):
    """What sends the messages of a call: the shard client that made it."""

    link: Link
    counters: Counters

    async def call_async(
        self, calls: Mapping[str, Call], outs: Outs, deadline: Deadline
    ) -> dict[int, Answer]:
        """Send a call to each host from the event loop."""

    async def late(self, deadline: Deadline, worker: str, call: Call) -> TimeoutError:
        """Return the error that says what a call has waited for, and who keeps it."""


class NearCall:
    """One call from a thread of this process; at its end nothing of it is left.

    Parameters
    ----------
    shards : Sender
        Sends the messages.
    outs : mapping of int to sequence of ndarray
        For each shard where its ranges go.
    deadline : Deadline
        Its end.
    """

    def __init__(self, shards: Sender, outs: Outs, deadline: Deadline) -> None:
        self._shards, self._outs, self._deadline = shards, outs, deadline
        self._sent: list[CallFuture[dict[int, Answer]]] = []
        self._begun: dict[str, Exchange] = {}
        self._answers: dict[int, Answer] = {}
        self._is_stopped = False

    def call(
        self, near: Mapping[str, tuple[NearShards, Call]], far: Mapping[str, Call]
    ) -> dict[int, Answer]:
        """Call shards that this process can reach, and send calls of the others."""
        # A change of threads costs more than most reads.
        if is_main() and not far and (found := self._glance(near)) is not None:
            return found
        return shielded(partial(self._call, near, far), self.stop)

    def _call(
        self, near: Mapping[str, tuple[NearShards, Call]], far: Mapping[str, Call]
    ) -> dict[int, Answer]:
        with self:
            self.send(far)
            for worker, (serving, call) in near.items():
                self.begin(worker, serving, call)
            return self.answers()

    def _glance(
        self, near: Mapping[str, tuple[NearShards, Call]]
    ) -> dict[int, Answer] | None:
        """Read without a lock, if that is all there is to do."""
        found: dict[int, Answer] = {}
        for serving, call in near.values():
            answers = serving.glance(call, self._outs)
            if answers is None:
                return None
            found |= {answer.shard: answer for answer in answers}
        self._shards.counters.local_calls += len(near)
        return found

    def stop(self) -> None:
        """Make the thread that is at it end soon, with an error."""
        self._is_stopped = True
        for exchange in [*self._begun.values()]:
            exchange.stop()
        for sent in [*self._sent]:
            sent.stop()

    def send(self, calls: Mapping[str, Call]) -> None:
        """Send calls as messages."""
        for worker, call in calls.items():
            self._left(worker, call)
        if calls:
            shards = self._shards
            work = partial(shards.call_async, calls, self._outs, self._deadline)
            self._sent.append(shards.link.start(work))
            if self._is_stopped:
                self._sent[-1].stop()

    def begin(self, worker: str, serving: NearShards, call: Call) -> None:
        """Call shards that this process can reach; what it cannot do is sent."""
        self._shards.counters.local_calls += 1
        try:
            left = min(self._left(worker, call), PATIENCE_SECONDS)
            exchange = serving.begin_now(call, left)
        except (NotHereError, StaleGenerationError, ShardBusyError):
            # Its owner is gone, has dropped the shard, or cannot get at it either:
            # the loop finds out why, and hears of what happens meanwhile.
            self.send({worker: call})
            return
        self._begun[worker] = exchange
        if self._is_stopped:
            exchange.stop()
        if back := exchange.handed_back():
            self.send({worker: _parts_of(call, back)})

    def answers(self) -> dict[int, Answer]:
        """Wait for all answers, and return them by shard."""
        while self._begun:
            worker = next(iter(self._begun))
            self._finish(worker, self._begun[worker])
            del self._begun[worker]
        for sent in self._sent:
            self._answers.update(sent.result())
        return self._answers

    def _finish(self, worker: str, exchange: Exchange) -> None:
        sent = exchange.handed_back()
        found = exchange.finish(self._outs, self._left(worker, exchange.call))
        back, waiting = [], []
        for answer in found:
            if answer.shard in sent:
                continue
            if isinstance(answer.error, (NotHereError, StaleGenerationError)):
                back.append(answer)
            elif answer.parked:
                waiting.append(answer)
            else:
                raise_first([answer])
                self._answers[answer.shard] = answer
        call = exchange.call
        if back:
            self.send({worker: _parts_of(call, {a.shard for a in back})})
        if waiting:
            # The owner waits as well, and says why where it is in vain.
            self.send(
                {worker: again(_parts_of(call, {a.shard for a in waiting}), waiting)}
            )

    def _left(self, worker: str, call: Call) -> float:
        """Return the seconds left for a call, or say which shards were too late."""
        try:
            return self._deadline.left()
        except TimeoutError:
            shards, deadline = self._shards, self._deadline
            error = shards.link.run(lambda: shards.late(deadline, worker, call))
            raise error from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            return
        for exchange in self._begun.values():
            exchange.abandon()
        for sent in self._sent:
            sent.stop()
        # Until then the loop may read or fill the caller's arrays.
        concurrent.futures.wait(self._sent, STOP_SECONDS)


def _parts_of(call: Call, shards: set[int]) -> Call:
    return call._replace(parts=tuple(p for p in call.parts if p.shard in shards))
