"""Reports of epochs, made from the receipts of a graph run's rounds."""

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


def _plus(one: Any, other: Any) -> Any:
    """Return two tuples of numbers added up."""
    return tuple(a + b for a, b in zip(one, other, strict=True))


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
        self._n_rounds = 0
        self._nbytes = [(0, 0, 0, 0)] * n
        self._seconds = [(0.0, 0.0)] * n
        #: None of ranks that have told none.
        self._losses: list[float | None] = [None] * n

    def add(self, receipts: Sequence[Receipt]) -> dict[str, Any] | None:
        """Enter the next round; return the epoch it has ended, or the run within it."""
        for receipt in receipts:
            rank, loss = receipt.rank, receipt.loss_sum
            self._rows[rank] += receipt.rows
            self.moved += receipt.moved
            self._nbytes[rank] = _plus(self._nbytes[rank], receipt.nbytes)
            self._seconds[rank] = _plus(self._seconds[rank], receipt.seconds)
            if loss is not None:
                self._losses[rank] = (self._losses[rank] or 0.0) + loss
            self._first[rank] = first_batches(self._first[rank], loss, receipt.rows)
        self.round += 1
        self._n_rounds += 1
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
                    **self._spent(rank, now - self._began),
                }
                for rank, (rows, loss) in enumerate(
                    zip(self._rows, self._losses, strict=True)
                )
            ],
        }
        self._began = now
        self._clear()
        return event

    def _spent(self, rank: int, seconds: float) -> dict[str, Any]:
        """Return what a rank has sent and read in an epoch of so many seconds."""
        sent, sent_encoded, received, received_encoded = self._nbytes[rank]
        compute, reading = self._seconds[rank]
        return {
            "sent_nbytes": sent,
            "sent_encoded_nbytes": sent_encoded,
            "received_nbytes": received,
            "received_encoded_nbytes": received_encoded,
            "compute_seconds": compute,
            "delivery_seconds": reading,
            "waiting_seconds": max(0.0, seconds - compute - reading),
            "retries": 0,
            # A round reads exactly the one before.
            "lags": [(0, self._n_rounds)],
        }
