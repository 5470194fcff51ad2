"""When calls that wait are over, whatever comes of them."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from daskps.cluster.lane.calls import Waiting
    from daskps.cluster.lane.connection import Connection

#: Calls that were answered are forgotten where there are more than these besides as many
#: as still waited at the last look.
FEW = 64


class Ends:
    """The ends of calls that wait, soonest first.

    Nearly all calls are answered before, and nobody says so here: what is kept stays in
    proportion to those that do wait.
    """

    def __init__(self) -> None:
        self._ends: list[tuple[float, int, Connection, Waiting]] = []
        self._n = self._n_waiting = 0

    def add(self, connection: Connection, waiting: Waiting) -> None:
        """Note when the call of a connection is over."""
        self._n += 1
        heapq.heappush(self._ends, (waiting.end, self._n, connection, waiting))
        if len(self._ends) > 2 * self._n_waiting + FEW:
            self._ends = [end for end in self._ends if end[2].waiting is end[3]]
            heapq.heapify(self._ends)
            self._n_waiting = len(self._ends)

    @property
    def next(self) -> float | None:
        """When the next one is, by `time.monotonic`."""
        return self._ends[0][0] if self._ends else None

    def take(self, now: float) -> Iterator[tuple[Connection, Waiting]]:
        """Give the calls that still wait and are over by now, and forget them."""
        while self._ends and self._ends[0][0] <= now:
            _, _, connection, waiting = heapq.heappop(self._ends)
            if connection.waiting is waiting:
                yield connection, waiting

    def __len__(self) -> int:
        return len(self._ends)
