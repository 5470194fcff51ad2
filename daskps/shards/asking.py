"""What a shard can be asked besides to take steps: all of it is in the segment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from daskps.shards import producers
from daskps.shards.memory.format import N_APPLIED, N_DUPLICATES, POLICY, ROUNDS, RUN
from daskps.shards.memory.sides import runs
from daskps.shards.steps import Ready, Ticket
from daskps.shards.waiting import CODES, policy_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from daskps.consistency import Policy
    from daskps.shards.memory.segment import Segment
    from daskps.shards.steps import Step
    from daskps.typing import Array


class Asked(ABC):
    """Answers about one shard.

    Parameters
    ----------
    segment : Segment
        The memory.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment

    def read(
        self,
        ready: Ready,
        parts: Sequence[tuple[str, int, int, Array]],
        copy: Callable[[Array, Array], None] = np.copyto,
    ) -> Ready | None:
        """Copy elements out without the lock.

        Parameters
        ----------
        ready : Ready
            Where to read.
        parts : sequence of (dtype, start, stop, out)
            What to copy, in elements of this shard's vector of that dtype.
        copy : callable
            Copies to the first array what the second one holds.

        Returns
        -------
        Ready or None
            What was read, or None when an update ran into the copy.
        """
        record = self.segment.record(ready.flip)
        for dtype, start, stop, out in parts:
            at = 0
            for weights in runs(self.segment, record, (dtype, start, stop)):
                copy(out[at : at + len(weights)], weights)
                at += len(weights)
        return ready if self.segment.writing <= ready.flip + 1 else None

    def latest(self, step: Step) -> Ready | None:
        """Return where a read outside runs may read; None if it must ask or wait."""
        flip = self.segment.flip
        ready = Ready(flip, self.segment.record(flip).version)
        if self._refused(Ticket(step)) or ready.version < step.at_least:
            return None
        return ready

    @abstractmethod
    def _refused(self, ticket: Ticket) -> bool:
        """Give a ticket that cannot be served its error; return whether that is so."""

    @property
    def policy(self) -> Policy:
        """Policy of the run in progress."""
        return policy_of(self.segment.current)

    @property
    def is_bsp(self) -> bool:
        """Whether the run in progress has rounds."""
        return bool(self.segment.current.fixed[POLICY] == CODES["bsp"])

    def rounds_of(self, run: int) -> int:
        """Return the rounds completed in a run, or -1 once it has ended."""
        fixed = self.segment.current.fixed
        return int(fixed[ROUNDS]) if fixed[RUN] == run else -1

    @property
    def n_pushes(self) -> int:
        """Pushes applied."""
        return int(self.segment.words[N_APPLIED])

    @property
    def n_duplicates(self) -> int:
        """Pushes that were repeats."""
        return int(self.segment.words[N_DUPLICATES])

    def open_producers(self) -> list[int]:
        """Return the producers this shard believes to be open."""
        return producers.known(self.segment.current)

    def needs_room(self, producer: int) -> bool:
        """Return whether a push comes from a producer this shard has no room for."""
        return producers.full(self.segment.current, producer)

    def close_producers(self, ids: Iterable[int]) -> None:
        """Note that producers will not push again.

        Not a publication: that would cost a BSP run the round before the last one.
        """
        producers.close(self.segment.current, ids)
