"""Trainers' steps in a BSP run: each joins the open round, and the last applies it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np

from daskps.shards.arrays.planning import UpdatePlanner, count
from daskps.shards.memory.areas import untouched
from daskps.shards.memory.format import N_APPLIED
from daskps.shards.memory.publication import Publication
from daskps.shards.rounds.mailbox import Mailbox
from daskps.shards.rounds.rounds import EARLY, NEW, Rounds
from daskps.shards.rounds.tables import Arrival, Tables
from daskps.shards.rounds.usual import Usual, usual_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.reduction import Reducer
    from daskps.shards.memory.segment import Segment
    from daskps.shards.steps import Step
    from daskps.typing import Array


class Joining:
    """Takes steps into rounds and applies those that are complete.

    Parameters
    ----------
    segment : Segment
        The memory.
    planner : UpdatePlanner
        Makes operations of arrays.
    fail : callable
        Gets a run and the error for which a round of it cannot be applied.
    cache_dir : str, optional
        Where compiled functions are kept.
    """

    def __init__(
        self,
        segment: Segment,
        planner: UpdatePlanner,
        fail: Callable[[int, Exception], None],
        cache_dir: str | None = None,
    ) -> None:
        self._segment, self._planner = segment, planner
        #: Returns whether arrays by position may join a round.
        self.fits = planner.are_whole
        # A cycle would keep the memory of shards that are gone.
        self._failing = weakref.WeakMethod(fail)
        #: The rounds of the run that has its mailboxes here, maybe over by now.
        self.attached: Rounds | None = None
        self._cache_dir = cache_dir

    @property
    def rounds(self) -> Rounds | None:
        """The rounds of the run in progress, if it has any."""
        if self.attached is not None and not self.attached.tables.current:
            # Another process has ended the run: its mailboxes are not needed here.
            self.attached = None
        return self.attached

    def begin(
        self, run: int, n_ranks: int, reduce: str | Reducer, memory: Array | None
    ) -> None:
        """Make the mailboxes of a run that the record is going to have."""
        pieces = self._segment.pieces
        if memory is None:
            # Most rounds need far fewer slices than the worst order of arrival.
            memory = untouched(Mailbox.nbytes_of(pieces, n_ranks, reduce))
        mailbox = Mailbox(pieces, n_ranks, reduce, memory)
        mailbox.clear(run)
        self._take(run, mailbox, reduce)

    def attach(
        self, run: int, n_ranks: int, reduce: str | Reducer, memory: Array | None
    ) -> None:
        """Use the mailboxes of a run that was begun by another process.

        Without memory they are new, and what has come for the open round is gone.
        """
        if memory is None:
            self.begin(run, n_ranks, reduce, None)
            return
        mailbox = Mailbox(self._segment.pieces, n_ranks, reduce, memory)
        mailbox.check(run)
        self._take(run, mailbox, reduce)

    def _take(self, run: int, mailbox: Mailbox, reduce: str | Reducer) -> None:
        tables = Tables(run, self._segment, mailbox, reduce, self._cache_dir)
        self.attached = Rounds(tables)

    def usual(self, rounds: Rounds) -> Usual | None:
        """Return what takes the usual steps of rounds, if any are.

        What any step of theirs needs compiled is ready then.
        """
        # Not by the first step, which would keep all others from the shard meanwhile.
        _ = rounds.tables.work
        return usual_of(self._segment, self._planner, rounds.tables, self._fail)

    def end(self) -> None:
        """Leave the mailboxes of a run that is over."""
        self.attached = None

    def join(self, rounds: Rounds, step: Step, may_apply: bool) -> str:
        """Take a step into the open round if it is new; return the verdict."""
        verdict = rounds.verdict(step)
        if verdict == NEW and step.tick and not may_apply and rounds.tables.size == 1:
            # What a round of the task graph brings is in no memory that others have:
            # it is accepted when it is applied.
            return EARLY
        if verdict == NEW:
            self._planner.check(step, whole=True)
            self.arrived(rounds, rounds.arrive(step), may_apply)
        return verdict

    def finish(self, rank: int, may_apply: bool) -> bool:
        """Wait for a rank no longer; return whether there are rounds at all."""
        rounds = self.rounds
        if rounds is not None:
            self.arrived(rounds, rounds.finish(rank), may_apply)
        return rounds is not None

    def place(self, rank: int, attempt: int) -> tuple[int, int] | None:
        """Return (clock, next sequence) of a rank that starts again, if in rounds."""
        rounds = self.rounds
        return None if rounds is None else rounds.restart(rank, attempt)

    def complete(self, may_apply: bool) -> None:
        """Apply the open round if it was complete before it could be applied."""
        rounds = self.rounds
        if rounds is not None and may_apply:
            standing = rounds.tables.standing()
            if standing is not None:
                self._apply(rounds, standing)

    def _fail(self, run: int, error: Exception) -> None:
        fail = self._failing()
        if fail is not None:
            fail(run, error)

    def arrived(
        self, rounds: Rounds, arrival: Arrival | None, may_apply: bool = True
    ) -> None:
        """Apply the round that an arrival completes; else keep what came."""
        if arrival is None:
            return
        if arrival.last and may_apply:
            with np.errstate(all="ignore"):
                self._apply(rounds, arrival)
        else:
            rounds.store(arrival)

    def _apply(self, rounds: Rounds, arrival: Arrival) -> None:
        tables = rounds.tables
        try:
            reduced, kind = tables.reduced(arrival), tables.kind_of(arrival)
            planned = self._planner.round(reduced, kind, self._segment.current.steps)
            # Not before: it overwrites the round before the one in force.
            publication = Publication(self._segment)
            publication.add(planned)
            count(planned, publication.record.steps)
            n_pushes = tables.note(
                publication.flip,
                arrival.rank,
                arrival.bits,
                arrival.next,
                arrival.weight,
            )
            publication.commit()
        except Exception as error:  # noqa: BLE001  (every trainer gets it)
            self._fail(tables.run, error)
            return
        self._segment.header[N_APPLIED] += n_pushes
        rounds.close()
