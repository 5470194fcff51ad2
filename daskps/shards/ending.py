"""Where a run stands in a shard when it ends, and the publication that ends it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from daskps.errors import IllegalStateError
from daskps.shards import run_record
from daskps.shards.memory.format import LIVE, N_RANKS, ROUNDS, RUN
from daskps.shards.memory.publication import Publication
from daskps.shards.memory.withdrawal import Withdrawal, is_possible
from daskps.shards.steps import Standing

if TYPE_CHECKING:
    from daskps.shards.memory.segment import Segment


def standing(segment: Segment, run: int, is_stuck: bool) -> Standing:
    """Return where a run stands in a shard, which may be unable to go on with it."""
    record = segment.current
    if record.fixed[RUN] != run:
        return Standing(-1, record.version)
    ranks = record.ranks[: record.fixed[N_RANKS]]
    return Standing(
        int(record.fixed[ROUNDS]),
        record.version,
        is_stuck=is_stuck,
        has_last=is_possible(segment),
        finished=tuple(np.flatnonzero(ranks[:, LIVE] == 0).tolist()),
    )


class Last:
    """The last publication of the run in progress.

    Parameters
    ----------
    segment : Segment
        The memory.
    rounds : int, optional
        After how many rounds the run ends; one more is withdrawn.
    version : int
        Of which version the shard is then, at least.

    Raises
    ------
    IllegalStateError
        When it cannot go back so far.
    """

    def __init__(self, segment: Segment, rounds: int | None, version: int) -> None:
        fixed = segment.current.fixed
        self._segment, self._version = segment, version
        self._back = 0 if rounds is None else int(fixed[ROUNDS]) - rounds
        if self._back not in (0, 1) or (self._back and not is_possible(segment)):
            raise IllegalStateError(
                f"run {int(fixed[RUN])} is to end after round {rounds}, this shard is "
                f"{self._back} ahead of that and cannot go back"
            )

    def publish(self) -> None:
        """End the run."""
        segment = self._segment
        if self._back:
            publication: Publication = Withdrawal(segment)
        else:
            segment.withdraws = 0
            publication = Publication(segment)
        publication.gather_slots()
        # A version that had the round is never one without it.
        least = publication.old.version + self._back
        run_record.end_run(publication.record, max(self._version, least))
        if self._back:
            publication.finish()
        else:
            publication.commit()
        segment.single_slots()
