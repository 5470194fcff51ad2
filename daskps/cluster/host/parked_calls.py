"""Parked calls of sockets: their tickets wait at their shards, and no thread waits."""

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
    from daskps.cluster.protocol.messages import Part

    #: Returns the frame that answers the tickets; gets the seconds that a read may wait
    #: for its turn.
    Finish = Callable[[Sequence[Started], float], list[Any]]


class Parked:
    """A call with tickets at their shards; it owns the tickets.

    The thread that takes the call either finishes or cancels it, once.

    Parameters
    ----------
    host : ShardHost
        The host of the shards.
    end : float
        The latest time to finish it, by `time.monotonic`.
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
            The shard's part of the call; only its reads if its step was taken before.
        version : int
            Version after that step; ASK if it was not taken.
        seconds : float
            How long to wait for the lock. With 0 and a taken lock the ticket stays in
            the inbox, and the host serves it later.

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
        """Have the host check shards: other processes wake no thread here."""
        host = self._host
        if True in [hosted.is_shared for hosted, _, _ in self._started]:
            host.worker.loop.add_callback(host.keep_looking)

    @property
    def done(self) -> bool:
        """Whether none of its tickets waits any more."""
        return None not in [ticket.outcome for _, _, ticket in self._started]

    def one_done(self) -> None:
        """Hear that a ticket is done, in the thread that has served its shard."""
        if self._callback is not None and self.done:
            with self._lock:
                callback, self._callback = self._callback, None
            if callback is not None:
                callback()

    def then(self, callback: Callable[[], None]) -> None:
        """Call a function once it is done, in the thread that serves the last shard.

        If it is done already, this thread calls the function.
        """
        self._callback = callback
        self.one_done()
        if self._callback is not None:
            self._keep_looking()

    def finish(self, seconds: float) -> list[Any]:
        """Return the frame that answers it; it reports unfinished tickets as parked.

        Parameters
        ----------
        seconds : float
            How long a read may wait for its turn, if updates have spoiled it.

        Raises
        ------
        ShardBusyError
            If it would have to wait and may not. The caller may ask again.
        """
        self._take_back()
        frame = self._answer(self._started, seconds)
        self._forget()
        return frame

    def cancel(self) -> None:
        """Take back unfinished tickets: the caller is gone, or will wait elsewhere.

        Another thread may read the arrays a moment longer; they belong to this call.
        """
        self._take_back()
        self._forget()

    def _take_back(self) -> None:
        for hosted, _, ticket in self._started:
            gone = hosted.take_back(ticket)
            if gone is not None and not gone.done():
                self._keep_looking()

    def _forget(self) -> None:
        """Let go of its tickets, which refer to it as their owner.

        Such a cycle would keep their arrays, and the mapped memory of shards, until the
        garbage collector runs.
        """
        self._callback = None
        self._started = []
