"""Taking back the last round of a run, where other shards do not have it.

A round is one publication, so what a shard was before it is all there: the record that
is not in force has the counts, and names the buffers of weights and slots. To
*withdraw* the round is to put that record in force once more, under a flip and a
version of its own: no version ever names two states.

Nothing of it is written but words of the record. A process that is killed on the way
leaves a shard that still has the round, and a header word that says what was under
way; the next process with the lock does all of it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.shards.memory.format import CHANGED_ROW, ROUNDS, RUN
from daskps.shards.memory.publication import Publication

if TYPE_CHECKING:
    from daskps.shards.memory.segment import Segment


def is_possible(segment: Segment) -> bool:
    """Return whether the last round of the run in progress can be withdrawn."""
    flip, now = segment.flip, segment.current.plain
    before = segment.record(flip - 1).plain
    if segment.withdraws == segment.writing == flip + 1:
        # Begun and not ended; the run may be out of that record already.
        return before[ROUNDS] == now[ROUNDS] - 1
    return (
        segment.writing == flip
        and before[RUN] == now[RUN] != 0
        and before[ROUNDS] == now[ROUNDS] - 1
    )


class Withdrawal(Publication):
    """The publication that takes back the one in force; :meth:`commit` ends it.

    Parameters
    ----------
    segment : Segment
        The memory; :func:`is_possible` says whether its last round can be withdrawn.
    """

    withdraws = True

    def _begin(self) -> None:
        """Begin with what was in force before, as it stands in the other record."""
        segment, flip = self.segment, self.flip
        # First: without it no process could tell that the weights to go back to are
        # whole.
        segment.withdraws = flip
        segment.header[CHANGED_ROW] = 0
        segment.writing = flip
        # Producers that have ended are noted in the record in force, at any time.
        self.record.take_producers(self.old)

    def commit(self) -> None:
        """Take the round back, after its rows were told once more."""
        for table in self.segment.tables:
            table.feed.again(self.old, self.record)
            if table.since(self.old):
                # Rows whose time was over are there again, and no entry has them.
                table.feed.stop()
        super().commit()
