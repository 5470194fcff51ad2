"""The position of a store in its epochs: pure arithmetic over counted rounds."""

from __future__ import annotations

from typing import NamedTuple


class Epochs(NamedTuple):
    """Where a store is, counted in rounds from the beginning of one of its epochs.

    Parameters
    ----------
    first : int
        The epoch that is counted from: that in which the run in progress has begun, or
        the last run.
    per_epoch : int
        Rounds of an epoch, those of the rank with the most; 0 where there are none.
    clock : int
        Rounds since the beginning of `first`. Without rounds, under SSP and ASP, the
        clock of the trainer that is furthest behind.
    """

    first: int = 0
    per_epoch: int = 0
    clock: int = 0

    @property
    def ended(self) -> int:
        """How many epochs have ended; the number of that under way."""
        return self.first + (self.clock // self.per_epoch if self.per_epoch else 0)

    @property
    def within(self) -> int:
        """Rounds of the epoch under way that there were."""
        return self.clock % self.per_epoch if self.per_epoch else 0

    @property
    def rounds(self) -> int:
        """How many rounds there were since epoch 0, if all epochs had as many."""
        return self.first * self.per_epoch + self.clock

    @property
    def following(self) -> int:
        """The epoch that nothing was done of yet, with which the next call begins."""
        return self.ended + (self.within > 0)

    @property
    def place(self) -> tuple[int, int]:
        """The epoch under way and its rounds, to be compared with another."""
        return self.ended, self.within
