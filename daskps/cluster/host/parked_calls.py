"""Calls of lanes whose tickets are at their shards: no thread waits with them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from daskps.errors import ShardBusyError
from daskps.shards.steps import ASK, Ready, Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.cluster.host.calls import Started
    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.host.hosted import HostedShard
    from daskps.cluster.wire.messages import Part

    #: Returns the frame that answers tickets, with the seconds that a read may wait
    #: for its turn.
    Finish = Callable[[Sequence[Started], float], list[Any]]


class Parked:
    """A call whose tickets are at their shards; it is their owner.

    Whoever has it either finishes or cancels it, once.

    Parameters
    ----------
    host : ShardHost
        Whose shards they are.
    end : float
        When it is to be finished at the latest, by `time.monotonic`.
    answer : callable
        Returns the frame that answers it.
    """

    __slots__ = ("_answer", "_callback", "_host", "_lock", "_started", "end")

    def __init__(self, host: ShardHost, end: float, answer: Finish) -> None:
        self.end = end
        self._host, self._answer = host, answer
        self._started: list[Started] = []
        self._lock = threading.Lock()
        self._callback: Callable[[], None] | None = None

    def offer(
        self,
        hosted: HostedShard,
        part: Part,
        version: int,
        seconds: float,
    ) -> None:
        """Give a shard its part of the call as a ticket.

        Parameters
        ----------
        hosted : HostedShard
            The shard.
        part : Part
            What is said to it; what is left of that, where its step was taken before.
        version : int
            What that has led to; ASK where it was not taken.
        seconds : float
            How long to wait for the lock. With 0 the ticket stays there where it is
            taken, for the host to look.

        Raises
        ------
        ShardBusyError
            Where another process kept the lock.
        """
        ticket = Ticket(part.step, owner=self)
        self._started.append((hosted, part, ticket))
        if version != ASK:
            ticket.applied, ticket.version = True, version
            if not part.ranges:
                ticket.outcome = Ready(0, version)
                return
        try:
            hosted.offer(ticket, seconds)
        except ShardBusyError:
            if seconds:
                self._started.pop()  # the shard has not seen it
                raise
            hosted.put(ticket)

    def _keep_looking(self) -> None:
        """Have the host look at shards where what others publish wakes nobody."""
        host = self._host
        if True in [hosted.is_shared for hosted, _, _ in self._started]:
            host.worker.loop.add_callback(host.keep_looking)

    @property
    def done(self) -> bool:
        """Whether nothing of it waits any more."""
        return None not in [ticket.outcome for _, _, ticket in self._started]

    def one_done(self) -> None:
        """Hear that a ticket is done, from whoever has served its shard."""
        if self._callback is not None and self.done:
            with self._lock:
                callback, self._callback = self._callback, None
            if callback is not None:
                callback()

    def then(self, callback: Callable[[], None]) -> None:
        """Have a function called once it is done, by whoever serves the shard then.

        That is this thread, where it is done already.
        """
        self._callback = callback
        self.one_done()
        if self._callback is not None:
            self._keep_looking()

    def finish(self, seconds: float) -> list[Any]:
        """Return the frame that answers it; what is not done by now is said to wait.

        Parameters
        ----------
        seconds : float
            How long a read waits for its turn that updates have run into.

        Raises
        ------
        ShardBusyError
            Where it would have to, and may not wait at all. It can be asked again.
        """
        self._take_back()
        frame = self._answer(self._started, seconds)
        self._forget()
        return frame

    def cancel(self) -> None:
        """Take back what is not done: its caller is gone, or is told to wait elsewhere.

        Another thread may look at its arrays a moment longer; they are its own.
        """
        self._take_back()
        self._forget()

    def _take_back(self) -> None:
        for hosted, _, ticket in self._started:
            gone = hosted.take_back(ticket)
            if gone is not None and not gone.done():
                self._keep_looking()

    def _forget(self) -> None:
        """Let go of its tickets, whose owner it is.

        Such a cycle would keep their arrays, and the memory of shards mapped, until it
        is collected.
        """
        self._callback = None
        self._started = []
