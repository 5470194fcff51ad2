"""One call to shards from a thread, over carriers.

Steps of a trainer that ticks come here only where `Session._step_local` or the one frame
of a socket was not enough. The whole path of a push is in :mod:`daskps.cluster`.

The life of a call, step by step, all of it in the thread that makes the call:

1. A carrier begins: sockets get frames, local shards get tickets. The thread waits for
   no part before all have begun: under BSP another trainer may wait for this one on the
   next shard.
2. The thread takes what has arrived, and waits for the rest.
3. A carrier leaves to the next one the parts it cannot finish, under the same sequence
   number. Local shards leave to sockets those that only their owners serve. Sockets
   leave to messages those that are late, refused, cut off half way, or must wait. The
   loop (`remote`) finds out where shards have moved, and sends their messages again.
4. The thread joins all answers. After an error it leaves no part under way.
"""

from __future__ import annotations

import concurrent.futures
from typing import TYPE_CHECKING, Protocol, TypeAlias

from daskps.cluster.caller.interrupts import shielded
from daskps.cluster.caller.routes import Reply, joined

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.cluster.caller.link import CallFuture
    from daskps.cluster.caller.routes import Request
    from daskps.cluster.protocol.deadline import Deadline

    #: Requests, and the shards of each that have not answered.
    Left: TypeAlias = list[tuple[Request, Sequence[int]]]
    BeginNext: TypeAlias = Callable[
        [Request, Sequence[int], Deadline], "ThreadCall | CallFuture[Reply]"
    ]

#: How long to wait for messages that were called off.
_STOP_SECONDS = 5.0


class Carrier(Protocol):
    """Carries the parts of one call; only `stop` is for other threads."""

    #: Shards that have answered, with their versions, and the clocks by which the
    #: slowest live trainer was behind.
    versions: list[tuple[int, int]]
    lag: int
    #: Parts that it leaves to the next carrier.
    left: Left

    @property
    def is_under_way(self) -> bool:
        """Whether a shard has its part and has not answered."""

    def begin(self) -> None:
        """Give shards their parts, without a wait for other callers."""

    def take(self) -> None:
        """Take answers until all have come, or something is left."""

    def stop(self) -> None:
        """Make `take` end soon."""

    def cancel(self) -> None:
        """Take back what is under way."""


class ThreadCall:
    """One call, which goes on wherever its carrier leaves something.

    Parameters
    ----------
    carrier : Carrier
        The first carrier.
    deadline : Deadline
        The end of the call.
    begin_next : callable
        Has the next carrier begin a request at some shards, until the deadline.
    """

    def __init__(
        self, carrier: Carrier, deadline: Deadline, begin_next: BeginNext
    ) -> None:
        self._carrier, self._deadline = carrier, deadline
        self._begin_next = begin_next
        self._sent: list[ThreadCall | CallFuture[Reply]] = []
        self._is_stopped = False

    def begin(self) -> None:
        """Have all carriers begin."""
        try:
            self._send_left()
            self._carrier.begin()
            self._send_left()
        except BaseException:
            self.call_off()
            raise

    def result(self) -> Reply:
        """Return the answers of all shards, once they have come."""
        carrier = self._carrier
        try:
            self._send_left()
            while carrier.is_under_way:
                carrier.take()
                self._send_left()
            replies = [sent.result() for sent in self._sent]
            return joined([Reply(carrier.versions, carrier.lag), *replies])
        except BaseException:
            self.call_off()
            raise

    def run(self) -> Reply:
        """Make it, and return the answers of all shards, whatever Ctrl-C interrupts."""
        return shielded(self._run, self.stop)

    def _run(self) -> Reply:
        self.begin()
        return self.result()

    def _send_left(self) -> None:
        left = self._carrier.left
        while left and not self._is_stopped:
            self._sent.append(self._begin_next(*left.pop(0), self._deadline))
        if self._is_stopped:
            raise concurrent.futures.CancelledError

    def stop(self) -> None:
        """Make it end soon, from any thread; the calling thread itself ends it."""
        self._is_stopped = True
        self._carrier.stop()
        for sent in [*self._sent]:
            sent.stop()

    def call_off(self) -> None:
        """Leave nothing of it under way."""
        self._carrier.cancel()
        for sent in self._sent:
            sent.stop()
        # Until they end the loop may read or fill the caller's arrays.
        for sent in self._sent:
            if isinstance(sent, ThreadCall):
                sent.call_off()
            else:
                concurrent.futures.wait([sent], _STOP_SECONDS)
