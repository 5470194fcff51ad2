"""Rounds of a graph run, and reports of its epochs, made of the rounds' receipts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from daskps.cluster.host.contributions import Receipt

#: Rounds submitted together.
WINDOW = 16
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


@dataclass(frozen=True, slots=True)
class Schedule:
    """The ranks that deliver in each round.

    Parameters
    ----------
    epochs : int
        Number of epochs.
    per_epoch : int
        Rounds of an epoch: those of the rank with the most.
    groups : sequence of int
        For each rank the rounds of an epoch in which it delivers, from the first on.
    gated : bool
        Whether somebody decides after each epoch if there is another.
    start : int
        Rounds of the first epoch that there were before.
    most : int, optional
        After how many rounds the run ends, if before its last epoch.
    """

    epochs: int
    per_epoch: int
    groups: Sequence[int]
    gated: bool
    start: int = 0
    most: int | None = None

    @property
    def n_rounds(self) -> int:
        """Rounds of the whole run."""
        n = self.epochs * self.per_epoch - self.start
        return n if self.most is None else min(n, self.most)

    def place(self, number: int) -> tuple[int, int]:
        """Return the epoch of a round, from 0, and which of its rounds it is."""
        return divmod(self.start + number, self.per_epoch)

    def ranks(self, number: int) -> list[int]:
        """Return the ranks that deliver in a round."""
        _, within = self.place(number)
        return [rank for rank, n in enumerate(self.groups) if within < n]

    def window(self, start: int) -> range:
        """Return the rounds to submit together from `start` on."""
        stop = min(start + WINDOW, self.n_rounds)
        if self.gated:
            _, within = self.place(start)
            stop = min(stop, start - within + self.per_epoch)
        return range(start, stop)


#: Sums over an epoch that a rank reports.
_SUMMED = (
    "rows",
    "sent_nbytes",
    "sent_encoded_nbytes",
    "received_nbytes",
    "received_encoded_nbytes",
    "compute_seconds",
    "delivery_seconds",
)


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
        n, self._n_rounds = len(self._schedule.groups), 0
        #: By rank what `_SUMMED` names; and the losses, None of ranks that told none.
        self._sums: list[Sequence[float]] = [(0,) * len(_SUMMED)] * n
        self._losses: list[float | None] = [None] * n

    def add(self, receipts: Sequence[Receipt]) -> dict[str, Any] | None:
        """Enter the next round; return the epoch it has ended, or the run within it."""
        for receipt in receipts:
            rank, loss = receipt.rank, receipt.loss_sum
            self.moved += receipt.moved
            come = receipt.rows, *receipt.nbytes, *receipt.seconds
            self._sums[rank] = [
                a + b for a, b in zip(self._sums[rank], come, strict=True)
            ]
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
        rows = sum(rows for rows, *_ in self._sums)
        told = [x for x in self._losses if x is not None]
        return sum(told) / rows if rows and told else None

    def end(self, epoch: int) -> dict[str, Any]:
        """Return what the ranks report of an epoch that has ended."""
        now = time.monotonic()
        event = {"epoch": epoch, "reports": [*self._reports(now - self._began)]}
        self._began = now
        self._clear()
        return event

    def _reports(self, seconds: float) -> Iterator[dict[str, Any]]:
        """Give what each rank reports of an epoch of so many seconds."""
        for rank, loss in enumerate(self._losses):
            spent = dict(zip(_SUMMED, self._sums[rank], strict=True))
            busy = spent["compute_seconds"] + spent["delivery_seconds"]
            yield spent | {
                "rank": rank,
                "loss": loss,
                "seconds": seconds,
                "lag": 0,
                "clock": self.round,
                "first": self._first[rank],
                "waiting_seconds": max(0.0, seconds - busy),
                "retries": 0,
                # A round reads exactly the one before.
                "lags": [(0, self._n_rounds)],
            }
