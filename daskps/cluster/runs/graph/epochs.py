"""What the rounds of a graph run say of its epochs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.host.contributions import Receipt
    from daskps.cluster.runs.graph.windows import Schedule


#: Rows whose losses tell what a rank has begun with.
FIRST_ROWS = 64


def first_batches(
    so_far: tuple[float, int], loss_sum: float | None, rows: int
) -> tuple[float, int]:
    """Add a batch to the first ones of a rank, until these have enough rows."""
    total, n = so_far
    if loss_sum is None or n >= FIRST_ROWS:
        return so_far
    return total + loss_sum, n + rows


class EpochLog:
    """Losses and rows of the epoch in progress, by rank, added in order of the rounds.

    Parameters
    ----------
    schedule : Schedule
        The run's rounds.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        #: The round whose receipts are wanted next.
        self.round = 0
        self.moved = 0
        self._began = time.monotonic()
        self._first = [(0.0, 0)] * len(schedule.groups)
        self._clear()

    def _clear(self) -> None:
        n = len(self._schedule.groups)
        self._rows = [0] * n
        #: None of ranks that have told none.
        self._losses: list[float | None] = [None] * n

    def add(self, receipts: Sequence[Receipt]) -> dict[str, Any] | None:
        """Enter the next round; return the epoch it has ended, or the run within it."""
        for receipt in receipts:
            rank, loss = receipt.rank, receipt.loss_sum
            self._rows[rank] += receipt.rows
            self.moved += receipt.moved
            if loss is not None:
                self._losses[rank] = (self._losses[rank] or 0.0) + loss
            self._first[rank] = first_batches(self._first[rank], loss, receipt.rows)
        self.round += 1
        epoch, within = self._schedule.place(self.round)
        if within == 0:
            return self.end(epoch - 1)
        return self.end(epoch) if self.round == self._schedule.n_rounds else None

    @property
    def loss(self) -> float | None:
        """Mean loss over the rows entered of the epoch in progress."""
        rows, told = sum(self._rows), [x for x in self._losses if x is not None]
        return sum(told) / rows if rows and told else None

    def end(self, epoch: int) -> dict[str, Any]:
        """Return what the ranks report of an epoch that has ended."""
        now = time.monotonic()
        event = {
            "epoch": epoch,
            "reports": [
                {
                    "rank": rank,
                    "rows": rows,
                    "loss": loss,
                    "seconds": now - self._began,
                    "lag": 0,
                    "clock": self.round,
                    "first": self._first[rank],
                }
                for rank, (rows, loss) in enumerate(
                    zip(self._rows, self._losses, strict=True)
                )
            ],
        }
        self._began = now
        self._clear()
        return event
