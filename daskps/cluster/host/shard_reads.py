"""What frames of a lane read of one shard, without its lock, straight into the answer."""

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

#: No flip: another one than the last that was seen and the next is a surprise.
NEVER = -2
#: For how long a shard is copied from after an update has run into its weights on their
#: way.
COPY_SECONDS = 10.0
#: How often a copy that updates run into is tried again.
TRIES = 4
#: Bytes of the buffer, and the weights that go there.
_Copy = tuple[slice, "Array"]


class ShardRead:
    """The ranges of one shard that a form reads, and where they go in a buffer.

    Parameters
    ----------
    segment : Segment
        The memory of the shard.
    step : Step
        What the form says to it: whose reads these are.
    ranges : sequence of Range
        What is read.
    at : int
        Where that begins in the buffer.
    """

    def __init__(
        self, segment: Segment, step: Step, ranges: Sequence[Range], at: int
    ) -> None:
        self._segment, self._ranges, self._at = segment, ranges, at
        self.looks = (TrainerReads if step.run else LatestReads)(
            segment, step.run, step.rank
        )
        self._whole = [self._copies(side) for side in (0, 1)]
        #: The flip that was read last: another one than that and the next is a surprise.
        self._seen = NEVER
        self.nbytes = sum(len(source) for _, source in self._whole[0])
        copy = copier(self.nbytes)
        #: None to assign to a slice, which costs half of what a call does.
        self._copy = None if copy is np.copyto else copy

    def read(self, bound: int, out: Array) -> int:
        """Read what may be read.

        Parameters
        ----------
        bound : int
            The clock of the trainer; outside runs the least version.
        out : ndarray, shape (n,), uint8
            Where it goes.

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
        """Return the flip to read at, and the weights themselves, to be read at once.

        None where updates come so fast that one would run into it, or one just did, and
        where `read` knows better.
        """
        flip = self.looks.find_flip(bound)
        if flip < 0:
            return None
        seen, self._seen = self._seen, flip
        if flip > seen + 1 or time.monotonic() < self._segment.copied_until:
            return None
        return flip, [source for _, source in self._sources(flip)]

    def is_whole(self, flip: int) -> bool:
        """Return whether what was read at a flip is of that flip; else copy for a while.

        Whoever reads this shard does, by whatever lane.
        """
        if self.looks.is_whole(flip):
            return True
        self._segment.copied_until = time.monotonic() + COPY_SECONDS
        return False

    def _sources(self, flip: int) -> list[_Copy]:
        side = self.looks.side(flip)
        return self._mixed(flip) if side == MIXED else self._whole[side]

    def _copies(self, side: int) -> list[_Copy]:
        """Return what to copy where all weights lie in one buffer."""
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
