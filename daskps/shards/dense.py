"""A shard of dense parameters: a state machine over one segment, without I/O.

Every race is a plain sequence of calls here. The owner of the segment's lock calls
:meth:`Shard.submit` with tickets and gets back those that are done; a ticket that
must wait stays parked inside, as data, until a later call completes it.

What a step's arrays become is in `planning`, when its wait is over in `waiting`, what
a run has in the record in `runs`, the contributions to a round in `rounds`, what a
cut holds back in `cuts`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from daskps.consistency import BSP, Policy
from daskps.errors import StaleGenerationError
from daskps.shards import producers, runs
from daskps.shards.base import GRADIENT, MODEL, Array, Ready, Ticket
from daskps.shards.cuts import Cut, broken
from daskps.shards.doubts import Doubts
from daskps.shards.invariants import check
from daskps.shards.planning import Planner, count
from daskps.shards.pushes import Pushes
from daskps.shards.rounds import EARLY, REPEAT, Rounds
from daskps.shards.segment import LIVE, ROUNDS, RUN, Segment
from daskps.shards.update import Binding, Publication
from daskps.shards.waiting import outcome, policy_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from daskps.reduction import Reducer


class Shard:
    """State machine over a segment.

    Not safe for threads: whoever calls holds the segment's lock, except for
    :meth:`read`, which validates itself.

    Parameters
    ----------
    segment : Segment
        The memory.
    bindings : mapping of int to Binding
        The update rule of each parameter index that has one.
    generation : int
        Incarnation of this shard.
    """

    def __init__(
        self, segment: Segment, bindings: Mapping[int, Binding], generation: int = 1
    ) -> None:
        self.segment = segment
        self.generation = generation
        self.parked: list[Ticket] = []
        self._planner = Planner(segment, bindings)
        self.doubts = Doubts(segment)
        self._pushes = Pushes(segment, self._planner, self.doubts)
        #: The cut in progress: no step is applied and no round completed but by it.
        self.cut: Cut | None = None
        self._rounds: Rounds | None = None
        #: The run that ended last, and what its steps get.
        self._ended: tuple[int, Exception | None] = (0, None)
        self._reason = "it has ended"
        self._abandoned: Exception | None = None
        #: The round from which on none is completed, while the run is being fenced.
        self._limit: int | None = None
        #: Flip at which the parked tickets were asked last.
        self._asked = -1

    # -- steps ---------------------------------------------------------------

    def submit(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        """Advance the tickets as far as they go and return all that are now done.

        Never raises: what goes wrong with a ticket becomes its outcome.
        """
        batch: list[Ticket] = []
        done: list[Ticket] = []
        with np.errstate(all="ignore"):
            for ticket in tickets:
                if self._refused(ticket):
                    done.append(ticket)
                elif self.cut is not None and self.cut.holds(ticket, self.segment):
                    continue
                elif self._rounds is None or not ticket.step.run:
                    batch.append(ticket)
                else:
                    done += self._apply(batch)
                    batch = []
                    done += self._join(ticket)
                    # Before what comes next: a parked step may be an older one.
                    done += self._wake()
            done += self._apply(batch)
            done += self._wake()
        return done if self.cut is None else done + self.cut.advance(self.segment)

    def release_cut(self, why: str) -> list[Ticket]:
        """Give a cut up and go on with what waited for it."""
        cut, self.cut = self.cut, None
        if cut is None:
            return []
        with np.errstate(all="ignore"):
            self._complete_round()
        return cut.stop(broken(why)) + self.submit(cut.held)

    def cancel(self, tickets: Iterable[Ticket]) -> None:
        """Forget parked tickets whose callers have gone."""
        gone = set(map(id, tickets))
        self.parked = [t for t in self.parked if id(t) not in gone]
        if self.cut is not None:
            self.cut.cancel(gone)

    def abandon(self, error: Exception) -> list[Ticket]:
        """Give every parked ticket an error, and later ones too; return the parked."""
        self._abandoned = error
        parked, self.parked = self.waiting, []
        cut, self.cut = self.cut, None
        for ticket in parked:
            ticket.outcome = error
        return parked if cut is None else parked + cut.stop(error)

    @property
    def waiting(self) -> list[Ticket]:
        """Tickets that wait: those that are parked, and those a cut holds."""
        return self.parked + self.cut.held if self.cut is not None else self.parked

    def _refused(self, ticket: Ticket) -> bool:
        step, record = ticket.step, self.segment.current
        if self._abandoned is not None:
            ticket.outcome = self._abandoned
        elif step.generation != self.generation:
            ticket.outcome = StaleGenerationError(
                f"a message for generation {step.generation} of a shard that is at "
                f"{self.generation}; ask the directory where it lives and send again"
            )
        elif step.run and step.run != record.fixed[RUN]:
            ticket.outcome = self._over(step.run)
        elif not ticket.applied:
            ticket.outcome = runs.misplaced(step, record)
        return ticket.outcome is not None

    def _apply(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        """Apply pushes that are updates of their own, serve plain reads."""
        self._pushes.apply(tickets)
        return self._settle(tickets)

    # -- rounds (BSP) --------------------------------------------------------

    def _join(self, ticket: Ticket) -> list[Ticket]:
        """Take a trainer's step into the open round, or park it for the next."""
        rounds, step = self._rounds, ticket.step
        if rounds is not None and runs.changes(step):
            now = int(self.segment.current.fixed[ROUNDS])
            try:
                verdict = rounds.verdict(step, now)
                if verdict == EARLY:
                    self.parked.append(ticket)
                    return []
                ticket.duplicate = verdict == REPEAT
                self._pushes.n_duplicates += ticket.duplicate
                if not ticket.duplicate:
                    self._planner.check(step, whole=True)
                    rounds.join(step)
                    self._complete_round()
            except Exception as error:  # noqa: BLE001  (it is the ticket's answer)
                ticket.outcome = error
                return [ticket]
        if self._refused(ticket):
            return [ticket]
        ticket.applied = True
        ticket.version = ticket.version or self.segment.current.version
        return self._settle([ticket])

    def _complete_round(self) -> None:
        """Apply the open round if it is complete; a round that fails ends the run."""
        rounds = self._rounds
        if rounds is None or not rounds.complete or self.cut is not None:
            return
        now = int(self.segment.current.fixed[ROUNDS])
        if self._limit is not None and now >= self._limit:
            return
        try:
            publication = Publication(self.segment)
            record = publication.record
            kind = MODEL if rounds.is_model else GRADIENT
            planned = self._planner.round(rounds.reduced(), kind, record)
            publication.add(planned)
            count(planned, record)
            rounds.note(record)
            publication.commit()
        except Exception as error:  # noqa: BLE001  (every trainer gets it)
            self._end(int(self.segment.current.fixed[RUN]), str(error), error)
            return
        self._pushes.n_applied += len(rounds.done) if rounds.weight > 0 else 0
        rounds.close_round()

    # -- waiting -------------------------------------------------------------

    def _settle(self, tickets: Iterable[Ticket]) -> list[Ticket]:
        """Finish what need not wait, park the rest."""
        done = []
        for ticket in tickets:
            if ticket.outcome is None:
                ticket.outcome = outcome(self.segment, ticket)
            if ticket.outcome is None:
                self.parked.append(ticket)
            else:
                done.append(ticket)
        return done

    def _wake(self) -> list[Ticket]:
        """Advance parked tickets as long as that publishes something new."""
        done: list[Ticket] = []
        while self.parked and self._asked != self.segment.flip:
            self._asked = self.segment.flip
            waiting, self.parked = self.parked, []
            for ticket in waiting:
                if self._refused(ticket):
                    done.append(ticket)
                elif ticket.applied:
                    done += self._settle([ticket])
                else:
                    done += self._join(ticket)
        return done

    def read(
        self, ready: Ready, parts: Sequence[tuple[str, int, int, Array]]
    ) -> Ready | None:
        """Copy elements out without the lock.

        Parameters
        ----------
        ready : Ready
            Where to read.
        parts : sequence of (dtype, start, stop, out)
            What to copy, in elements of this shard's vector of that dtype.

        Returns
        -------
        Ready or None
            What was read, or None when an update ran into the copy.
        """
        vectors = self.segment.vectors[ready.flip & 1]
        for dtype, start, stop, out in parts:
            out[:] = vectors[dtype][start:stop]
        return ready if self.segment.writing <= ready.flip + 1 else None

    # -- runs ----------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """Policy of the run in progress."""
        return policy_of(self.segment.current)

    def begin_run(
        self,
        run: int,
        policy: Policy,
        n_ranks: int,
        reduce: str | Reducer = "mean",
        *,
        reset: bool = False,
    ) -> list[Ticket]:
        """Start a run on this shard; the same run again changes nothing.

        A run that is still there is over; its parked tickets are returned.
        """
        if self.segment.current.fixed[RUN] == run:
            return []
        if run == self._ended[0]:
            raise self._over(run)
        runs.check_size(n_ranks)
        publication = Publication(self.segment)
        runs.begin(publication.record, run, policy, n_ranks)
        if reset:
            publication.record.steps[:] = 0
            self.segment.reset_slots()
        publication.commit()
        self._rounds = Rounds(n_ranks, reduce) if isinstance(policy, BSP) else None
        self._reason, self._limit = "another run has begun", None
        self.doubts.forget_ranks()
        return self.release_cut("a run has begun") + self._wake()

    def end_run(
        self, run: int, reason: str, error: Exception | None = None
    ) -> list[Ticket]:
        """End a run: its steps are refused from here on, its parked ones now.

        With `error` they get that, otherwise RunCancelledError with the reason.
        """
        ended = self.segment.current.fixed[RUN] == run
        self._end(run, reason, error)
        released = self.release_cut("a run has ended") if ended else []
        return released + self._wake()

    def _end(self, run: int, reason: str, error: Exception | None) -> None:
        if self.segment.current.fixed[RUN] != run:
            if not self.segment.current.fixed[RUN] and run != self._ended[0]:
                # Its beginning may still be on the way, and must not come after.
                self._ended, self._reason = (run, error), reason
            return
        self._ended, self._reason = (run, error), reason
        self._rounds, self._limit = None, None
        publication = Publication(self.segment)
        runs.end(publication.record)
        publication.commit()

    def _over(self, run: int) -> Exception:
        ended, error = self._ended
        return error if run == ended and error else runs.ended(run, self._reason)

    def finish(self, run: int, rank: int) -> list[Ticket]:
        """Wait for a trainer no longer: it ended, or has no data."""
        current = self.segment.current
        if current.fixed[RUN] != run:
            return []
        with np.errstate(all="ignore"):
            if self._rounds is not None:
                self._rounds.finish(rank)
                self._complete_round()
            elif current.ranks[rank, LIVE]:
                publication = Publication(self.segment)
                publication.record.ranks[rank, LIVE] = 0
                publication.commit()
            done = self._wake()
        if self.cut is None:
            return done
        self.cut.excuse([-1 - rank])
        return done + self.cut.advance(self.segment)

    def hold(self, run: int, limit: int | None = None) -> list[Ticket]:
        """Complete no round from `limit` on, by default the open one.

        A run is fenced on one shard after the other. Held first, none of them gets
        ahead of the rest meanwhile, and those that are behind can catch up.
        """
        fixed = self.segment.current.fixed
        if fixed[RUN] != run:
            return []
        self._limit = int(fixed[ROUNDS]) if limit is None else limit
        # A fence settles in less time than a cut may take.
        released = self.release_cut("a run is being fenced")
        with np.errstate(all="ignore"):
            self._complete_round()
            return released + self._wake()

    def rounds_of(self, run: int) -> int:
        """Return the rounds completed in a run, or -1 once it has ended."""
        fixed = self.segment.current.fixed
        return int(fixed[ROUNDS]) if fixed[RUN] == run else -1

    def resume(self, run: int, rank: int) -> tuple[int, int]:
        """Return (clock, next sequence) of a rank that starts again.

        What it left of an unfinished BSP step is dropped; of an unfinished step under
        ASP and SSP the pushes that were applied are told from new ones.
        """
        record = self.segment.current
        if record.fixed[RUN] != run:
            raise self._over(run)
        clock, sequence = runs.place(record, rank)
        if self._rounds is None:
            return clock, sequence
        return self._rounds.restart(rank, clock, sequence)

    # -- producers and checks ------------------------------------------------

    @property
    def n_pushes(self) -> int:
        """Pushes applied."""
        return self._pushes.n_applied

    @property
    def n_duplicates(self) -> int:
        """Pushes that were repeats."""
        return self._pushes.n_duplicates

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

    def validate(self) -> None:
        """Raise IllegalStateError where an invariant does not hold."""
        check(self.segment, self._rounds, self.parked, self.cut)
