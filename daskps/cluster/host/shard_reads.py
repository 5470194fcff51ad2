"""Lock-free reads of one shard for socket requests, copied into the reply buffer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from daskps.cluster.host.copy_routine import copier
from daskps.shards.memory.format import MIXED
from daskps.shards.memory.sides import runs
from daskps.shards.reads import ASK, LatestReads, TrainerReads

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from daskps.cluster.wire.messages import Range
    from daskps.shards.memory.segment import Segment
    from daskps.shards.steps import Step
    from daskps.typing import Array

#: No flip: used where any flip but the last one seen and its successor is unexpected.
NEVER = -2
#: How long answers copy a shard's weights after an update has overwritten weights while
#: they were sent.
COPY_SECONDS = 10.0
#: Tries of a copy that updates overwrite.
TRIES = 4
#: A slice of the buffer, and the weights to copy there.
_Copy = tuple[slice, "Array"]


class ShardRead:
    """The ranges of one shard that a form reads, and their places in a buffer.

    Parameters
    ----------
    segment : Segment
        The memory of the shard.
    step : Step
        The form's step for this shard; its run and rank decide which reads it makes.
    ranges : sequence of Range
        The ranges to read.
    at : int
        Place of the first in the buffer.
    """

    def __init__(
        self, segment: Segment, step: Step, ranges: Sequence[Range], at: int
    ) -> None:
        self._segment, self._ranges, self._at = segment, ranges, at
        self.looks = (TrainerReads if step.run else LatestReads)(
            segment, step.run, step.rank
        )
        self._whole = [self._copies(side) for side in (0, 1)]
        #: The last flip read: any other one but its successor is unexpected.
        self._seen = NEVER
        self.nbytes = sum(len(source) for _, source in self._whole[0])
        copy = copier(self.nbytes)
        #: None to assign to a slice: a call takes twice as long.
        self._copy = None if copy is np.copyto else copy

    def read(self, bound: int, out: Array) -> int:
        """Copy the ranges into a buffer, if they may be read now.

        Parameters
        ----------
        bound : int
            The clock of the trainer; outside runs the least version.
        out : ndarray, shape (n,), uint8
            The buffer.

        Returns
        -------
        int
            The version that was read; NOT_YET, or ASK where the shard must be asked.
        """
        looks, copy = self.looks, self._copy
        for _ in range(TRIES):
            flip = looks.find_flip(bound)
            if flip < 0:
                return flip
            for where, source in self._sources(flip):
                if copy is None:
                    out[where] = source
                else:
                    copy(out[where], source)
            version = looks.version(flip)
            if looks.is_whole(flip):
                self._seen = flip
                return version
        return ASK

    def look(self, bound: int) -> tuple[int, list[Array]] | None:
        """Return the flip to read at, and the weights themselves, to be sent at once.

        None if updates come so fast that one would overwrite the weights, if one just
        has, and if `read` must decide.
        """
        flip = self.looks.find_flip(bound)
        if flip < 0:
            return None
        seen, self._seen = self._seen, flip
        if flip > seen + 1 or time.monotonic() < self._segment.copied_until:
            return None
        return flip, [source for _, source in self._sources(flip)]

    def is_whole(self, flip: int) -> bool:
        """Return whether values read at a flip are whole; if not, make answers copy.

        Readers of this shard on all lanes copy its weights then, for a while.
        """
        if self.looks.is_whole(flip):
            return True
        self._segment.copied_until = time.monotonic() + COPY_SECONDS
        return False

    def _sources(self, flip: int) -> list[_Copy]:
        side = self.looks.side(flip)
        return self._mixed(flip) if side == MIXED else self._whole[side]

    def _copies(self, side: int) -> list[_Copy]:
        """Return the copies to make if all weights lie in one buffer."""
        vectors = self._segment.vectors[side]
        return self._placed(vectors[d][a:b] for d, a, b in self._ranges)

    def _mixed(self, flip: int) -> list[_Copy]:
        segment = self._segment
        record = segment.record(flip)
        return self._placed(
            w for one in self._ranges for w in runs(segment, record, one)
        )

    def _placed(self, sources: Iterable[Array]) -> list[_Copy]:
        found, at = [], self._at
        for source in sources:
            found.append((slice(at, at + source.nbytes), source.view(np.uint8)))
            at += source.nbytes
        return found
