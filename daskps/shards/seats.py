"""A trainer's steps that simply join the open round, without a ticket.

What :meth:`daskps.shards.shard.Shard.submit` finds out for a ticket, for the step that
nearly every step of a run is, in few reads of plain words. Whatever else there is to
say is left to the shard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from daskps.shards.deputy import OPEN
from daskps.shards.memory.format import FLIP, GATE, GENERATION, RUN, VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskps.shards.memory.segment import Segment
    from daskps.shards.rounds.joining import Joining
    from daskps.shards.steps import Tick
    from daskps.typing import Array

#: Said instead of a version: nothing was changed, submit the step.
ASK = -1


class Ordered(Protocol):
    """What a seat asks of its shard, which makes seats and is not known to them."""

    segment: Segment
    generation: int

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits there, and the record says all there is to say."""


class Seat:
    """The place of one rank at one shard.

    Whoever calls :meth:`take` holds the segment's lock. One may be made without: that
    changes nothing.

    Parameters
    ----------
    shard : Ordered
        The state machine.
    joining : Joining
        Its rounds.
    run, rank : int
        The trainer's run and its number in it.
    """

    def __init__(self, shard: Ordered, joining: Joining, run: int, rank: int) -> None:
        self._shard, self._joining = shard, joining
        self._run, self._rank = run, rank
        # Not `joining.rounds`: a run may be about to begin, which that would take for
        # one that is over.
        found = joining.attached
        #: None where the mailboxes are not here.
        self._rounds = found if found and found.tables.run == run else None
        self._usual = joining.usual(self._rounds) if self._rounds else None
        segment = shard.segment
        self._header = segment.header
        self._records = tuple(record.plain for record in segment.records)

    def take(self, tick: Tick, arrays: Mapping[int, Array]) -> int:
        """Take a step, whose arrays are by position.

        Returns
        -------
        int
            The version that the shard is at now; or ASK.
        """
        header, shard, joining = self._header, self._shard, self._joining
        rounds, rank = self._rounds, self._rank
        kind = tick.kind if arrays else None
        if (
            rounds is None
            or rounds is not joining.attached
            or self._records[header[FLIP] & 1][RUN] != self._run
            # No cut and no fence holds steps back while it is open.
            or header[GATE] != OPEN
            or header[GENERATION] != shard.generation
            or not shard.is_idle
        ):
            return ASK
        n = rounds.look(rank, tick.clock, tick.sequence, kind)
        if n < 0 or not joining.fits(arrays):
            return ASK
        usual = self._usual
        try:
            if (
                usual is None
                or not usual.fits(tick, arrays)
                or not usual.take(n, rank, tick, arrays)
            ):
                arrival = rounds.tables.arrival(
                    rank,
                    sequence=tick.sequence,
                    kind=kind,
                    weight=tick.weight,
                    arrays=arrays,
                )
                joining.arrived(rounds, arrival)
        except Exception:  # noqa: BLE001  (nothing came of it; a ticket gets the reason)
            return ASK
        if joining.attached is not rounds or header[GATE] != OPEN:  # it has failed
            return ASK
        return self._records[header[FLIP] & 1][VERSION]
