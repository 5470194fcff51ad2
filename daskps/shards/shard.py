"""A shard of arrays and tables: a state machine over one segment, without I/O.

Every race is a plain sequence of calls here. The owner of the segment's lock calls
:meth:`Shard.submit` with tickets and gets back those that are done; a ticket that
must wait stays parked inside, as data, until a later call completes it.

`refusals` says which steps are refused, `planning` what a step's arrays become, `reads`
when its wait is over, `run_state` what becomes of a run; `rounds` keeps the
contributions to a round, `cuts` what a cut holds back.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from daskps.shards.arrays import by_function
from daskps.shards.cuts.cut import Cut, broken
from daskps.shards.cuts.in_flight import InFlight
from daskps.shards.deputy import OPEN, READING, NotHereError, set_gate
from daskps.shards.memory.format import (
    FLIP,
    GATE,
    GENERATION,
    N_DUPLICATES,
    N_RANKS,
    POLICY,
    ROUNDS,
    ROWS_SEQUENCE,
    RUN,
    VERSION,
)
from daskps.shards.memory.publication import Publication
from daskps.shards.memory.undo import roll_back
from daskps.shards.parked import ParkedTickets, round_gone
from daskps.shards.planning import UpdatePlanner
from daskps.shards.pushes import Pushes
from daskps.shards.refusals import find_refusal, is_for_owner
from daskps.shards.run_record import EARLY, NEW, POLICY_CODES, REPEAT
from daskps.shards.run_state import ShardRun
from daskps.shards.steps import ASK, NOTHING, Ticket, changes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from daskps.consistency import Policy
    from daskps.epochs import Epochs
    from daskps.reduction import Reducer
    from daskps.shards.memory.segment import Segment
    from daskps.shards.planning import Bindings
    from daskps.shards.rounds.round import Round
    from daskps.shards.steps import Step
    from daskps.typing import Array

_BSP = POLICY_CODES["bsp"]


class Shard:
    """State machine over a segment.

    Not safe for threads: whoever calls holds the segment's lock; readers need not.

    Parameters
    ----------
    segment : Segment
        The memory.
    bindings : Bindings
        The update rule of each parameter index that has one.
    generation : int
        Incarnation of this shard.
    cache_dir : str, optional
        Where compiled functions are kept.
    """

    def __init__(
        self,
        segment: Segment,
        bindings: Bindings,
        generation: int = 1,
        *,
        cache_dir: str | None = None,
    ) -> None:
        self.segment, self.generation = segment, generation
        segment.cache_dir = cache_dir
        self._planner = UpdatePlanner(segment, bindings)
        self.in_flight = InFlight(segment)
        self._pushes = Pushes(segment, self._planner, self.in_flight)
        #: The cut in progress: no step is applied and no round completed but by it.
        self.cut: Cut | None = None
        self.run_state = ShardRun(segment, self._planner, cache_dir)
        self.parked = ParkedTickets(segment, self.run_state)
        self._header = segment.header
        self._heads = [record.plain for record in segment.records]
        self._abandoned: Exception | None = None
        #: No round, and maybe no push, is applied from this flip on: a copy elsewhere has
        #: to get that first.
        self.last_flip: int | None = None
        self.holds_pushes = False

    @classmethod
    def as_deputy(
        cls, segment: Segment, bindings: Bindings, *, cache_dir: str | None = None
    ) -> Shard:
        """Return a state machine over a segment that another process owns."""
        shard = cls(segment, bindings, segment.header[GENERATION], cache_dir=cache_dir)
        shard.run_state.is_deputy = True
        segment.memory = None
        return shard

    @cached_property
    def calls_functions(self) -> bool:
        """Whether updates of it call a user's function of whole arrays."""
        n = len(self.segment.pieces)
        return by_function.are_called(map(self._planner.binding, range(n)))

    # -- steps ---------------------------------------------------------------

    def submit(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        """Advance the tickets as far as they go and return all that are now done.

        Never raises: what goes wrong with a ticket becomes its outcome.
        """
        batch: list[Ticket] = []
        done: list[Ticket] = []
        if self._header[ROWS_SEQUENCE] & 1:
            roll_back(self.segment)
        for ticket in tickets:
            if self._refused(ticket):
                done.append(ticket)
            elif self.cut is not None and self.cut.holds(ticket, self.segment):
                continue
            elif not ticket.step.run or self.round is None:
                batch.append(ticket)
            else:
                if batch:
                    done += self._apply(batch)
                    batch = []
                done += self._join_round(ticket)
                # Before what comes next: a parked step may be an older one.
                done += self._wake()
        if batch:
            done += self._apply(batch)
        done += self._wake()
        return done if self.cut is None else done + self.cut.advance(self.segment)

    def step(self, step: Step, *, alone: bool = True) -> int:
        """Take a step now, without a ticket, whatever it waits for afterwards.

        With `alone` none is taken where tickets are parked: nobody would ask them
        again.

        Returns
        -------
        int
            The version that the shard is at now; or ASK: nothing was changed, a ticket
            has to wait, or gets the reason.
        """
        header, run, open_round = self._header, step.run, self.run_state.attached
        record = self._heads[header[FLIP] & 1]
        joins = open_round is not None and open_round.run == run
        if (
            # No cut and no fence holds steps back while it is open.
            header[GATE] != OPEN
            # Both the memory and the caller are at this generation of it.
            or not header[GENERATION] == self.generation == step.generation
            or self._abandoned is not None
            or (alone and self.parked.tickets)
            # It is of a run, and not of the one in progress.
            or record[RUN] != run != 0
            or (run and not 0 <= step.rank < record[N_RANKS])
            # The run has rounds whose mailboxes are not here, or that it is no part of.
            or joins != (record[POLICY] == _BSP)
            # A push before its tick, or a mere read.
            or not (step.tick if run else step.kind != NOTHING)
            # Only its owner keeps where such a step goes.
            or (step.touched is not None and self.run_state.is_deputy)
            or header[ROWS_SEQUENCE] & 1  # who came before died at rows
        ):
            return ASK
        if open_round is None or not joins:
            ticket = Ticket(step)
            self._pushes.apply((ticket,))
            return ticket.version if ticket.outcome is None else ASK
        try:
            is_new = open_round.take_step(step) == NEW
        except Exception:  # noqa: BLE001  (nothing came of it; a ticket gets the reason)
            return ASK
        # The round that it completed could not be applied: a ticket gets why.
        has_failed = header[GATE] > OPEN
        return self._heads[header[FLIP] & 1][VERSION] if is_new > has_failed else ASK

    def release_cut(self, why: str) -> list[Ticket]:
        """Give a cut up and go on with what waited for it."""
        cut, self.cut = self.cut, None
        if cut is None:
            return []
        self.set_gate()
        self._apply_complete()
        return cut.stop(broken(why)) + self.submit(cut.held)

    def cancel(self, tickets: Iterable[Ticket]) -> None:
        """Forget parked tickets whose callers have gone."""
        gone = set(map(id, tickets))
        self.parked.cancel(gone)
        if self.cut is not None:
            self.cut.cancel(gone)

    def abandon(self, error: Exception) -> list[Ticket]:
        """Give every parked ticket an error, and later ones too; return the parked."""
        self._abandoned = error
        parked, self.parked.tickets = self.waiting, []
        cut, self.cut = self.cut, None
        for ticket in parked:
            ticket.outcome = error
        return parked if cut is None else parked + cut.stop(error)

    def set_gate(self) -> None:
        """Let other processes only read while this one holds steps or rounds back."""
        held = self.cut is not None or self.run_state.is_held
        held |= self.last_flip is not None
        set_gate(self.segment, READING if held else OPEN)
        # A step may go on though the gate stays as it is, for another reason.
        self.parked.asked = None

    @property
    def waiting(self) -> list[Ticket]:
        """Tickets that wait: those that are parked, and those a cut holds."""
        parked = self.parked.tickets
        return parked if self.cut is None else parked + self.cut.held

    def overrun(self, ticket: Ticket) -> Exception:
        """Return why the round that a ticket was to read is there no more."""
        step = ticket.step
        anew = Ticket(step, owner=ticket.owner, applied=ticket.applied)
        if self._refused(anew) and isinstance(anew.outcome, Exception):
            return anew.outcome
        return round_gone(self.segment, step.clock + step.tick)

    def _refused(self, ticket: Ticket) -> bool:
        """Give a ticket that cannot be served its error; return whether that is so.

        A deputy hands back whatever the owner would refuse, or alone can take.
        """
        segment, state, generation = self.segment, self.run_state, self.generation
        error = self._abandoned or find_refusal(ticket, segment, state, generation)
        if state.is_deputy and (
            error is not None or is_for_owner(ticket.step, segment, state, generation)
        ):
            error = NotHereError()
        # Others may get the same error: a caller that raises it adds nothing to theirs.
        ticket.outcome = error and error.with_traceback(None)
        return error is not None

    def _apply(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        """Apply pushes that are updates of their own, serve plain reads."""
        changing = [t for t in tickets if changes(t.step)]
        if self.holds_pushes and self._is_held:
            self.parked.tickets += changing
            tickets = [t for t in tickets if not changes(t.step)]
        else:
            self._pushes.apply(changing)
        for ticket in tickets:
            ticket.applied = ticket.outcome is None
        return self.parked.settle(tickets)

    # -- rounds (BSP) --------------------------------------------------------

    @property
    def round(self) -> Round | None:
        """The open round of the run in progress, if it has rounds."""
        return self.run_state.attached and self.run_state.round

    @property
    def _may_apply(self) -> bool:
        """Whether a round that is complete may be applied now."""
        return self.cut is None and not self._is_held and self.run_state.may_apply

    @property
    def _is_held(self) -> bool:
        return self.last_flip is not None and self.segment.flip >= self.last_flip

    def hold_updates(
        self, last_flip: int | None, *, pushes: bool = False
    ) -> list[Ticket]:
        """Apply no round from a flip on, or nothing, in any process; with None go on."""
        self.last_flip, self.holds_pushes = last_flip, pushes
        self.set_gate()
        self._apply_complete()
        return self._wake()

    @property
    def is_current(self) -> bool:
        """Whether its memory has no other owner since this object was made of it."""
        return self._header[GENERATION] == self.generation

    def resume(self, generation: int) -> None:
        """Go on after :meth:`abandon`, as another incarnation; nobody else has begun."""
        self._abandoned, self.last_flip = None, None
        self.generation = self._header[GENERATION] = generation
        self.set_gate()

    def _apply_complete(self) -> None:
        """Apply a round that was complete before it could be applied."""
        if (open_round := self.round) is not None and self._may_apply:
            open_round.apply_complete()

    def _join_round(self, ticket: Ticket) -> list[Ticket]:
        """Take a trainer's step into the open round, or park it for the next."""
        step, state, open_round = ticket.step, self.run_state, self.round
        verdict = ""
        try:
            if open_round is not None and changes(step):
                takes = state.takes_ticks and not self._holds_last(open_round)
                may = {"may_apply": self._may_apply, "takes_ticks": takes}
                verdict = open_round.take_step(step, **may)
            elif open_round is not None and step.floor:
                open_round.check_has(step)
        except Exception as error:  # noqa: BLE001  (it is the ticket's answer)
            ticket.outcome = error
            return [ticket]
        if verdict == EARLY:
            self.parked.tickets.append(ticket)
            return []
        if verdict == REPEAT:
            ticket.duplicate = True
            self._header[N_DUPLICATES] += 1
        if state.is_held and self._refused(ticket):  # the round has failed
            return [ticket]
        ticket.applied = True
        ticket.version = ticket.version or self.segment.current.version
        return self.parked.settle([ticket])

    def _holds_last(self, open_round: Round) -> bool:
        """Whether the tick that completes the open round waits until that is applied.

        Once all trainers heard that a round is complete, others could be two ahead of a
        copy that lacks it, and no fence could take these back.
        """
        has_copy = self.last_flip is not None
        return has_copy and not self._may_apply and open_round.lacks_one

    def _wake(self) -> list[Ticket]:
        """Advance parked tickets as long as that publishes something new."""
        done: list[Ticket] = []
        while waiting := self.parked.take_stale():
            held: list[Ticket] = []
            for ticket in waiting:
                if self._refused(ticket):
                    done.append(ticket)
                elif ticket.applied:
                    done += self.parked.settle([ticket])
                elif self.round is None or not ticket.step.run:
                    held.append(ticket)
                else:
                    done += self._join_round(ticket)
            if held:
                done += self.submit(held)
        return done

    # -- runs ----------------------------------------------------------------

    def begin_run(
        self,
        run: int,
        policy: Policy,
        n_ranks: int,
        reduce: str | Reducer = "mean",
        *,
        reset: bool = False,
        memory: Array | None = None,
        epochs: Epochs | None = None,
    ) -> list[Ticket]:
        """Start a run on this shard; the same run again changes nothing.

        A run that is still there is over; its parked tickets are returned. Mailboxes
        go into `memory`, of `Mailbox.nbytes_of`, by default into private memory.
        `epochs` says where in the store's epochs it begins, None where it has none.

        Raises
        ------
        ConsistencyError
            Where that is before what the store has come to; nothing was changed.
        """
        start = run, policy, n_ranks, reduce
        if not self.run_state.begin(*start, reset=reset, memory=memory, epochs=epochs):
            return []
        self.set_gate()
        self.in_flight.forget_ranks()
        return self.release_cut("a run has begun") + self._wake()

    def take_over(self) -> list[Ticket]:
        """Go on where an owner that died has left: no complete round is held back.

        In a run in rounds :meth:`ShardRun.attach_rounds` comes first.
        """
        # Else nobody reads rows without the lock until somebody has taken it.
        roll_back(self.segment)
        if self.segment.writing > self.segment.flip and not self.run_state.is_bsp:
            # Else who reads the shard at rest would take it for one that is changing.
            Publication(self.segment).commit()
        self.set_gate()
        self._apply_complete()
        return self._wake()

    def end_run(
        self,
        run: int,
        reason: str,
        error: Exception | None = None,
        *,
        rounds: int | None = None,
        version: int = 0,
    ) -> list[Ticket]:
        """End a run: its steps are refused from here on, its parked ones now.

        With `error` they get that, otherwise RunCancelledError with the reason. The
        shard goes back to `rounds`, where it is one ahead of that: its last round is
        withdrawn. Its version is `version` then, at least.

        Raises
        ------
        IllegalStateError
            When it cannot go back so far; nothing was changed.
        """
        released: list[Ticket] = []
        told = run, reason, error
        if self.run_state.end(*told, rounds=rounds, version=version):
            self.set_gate()
            released = self.release_cut("a run has ended")
        return released + self._wake()

    def finish_rank(self, run: int, rank: int) -> list[Ticket]:
        """Wait for a trainer no longer: it ended, or has no data.

        In rounds that counts for the open one; the next takes no ticks before
        :meth:`hear_finished`. Where its run cannot go on here it gets why.
        """
        if self.run_state.run != run:
            return []
        self.run_state.check_goes_on(run)
        self.run_state.finish_rank(rank, may_apply=self._may_apply)
        self.set_gate()
        done = self._wake()
        if self.cut is None:
            return done
        self.cut.mark_lost([-1 - rank])
        return done + self.cut.advance(self.segment)

    def hear_finished(self, run: int, n_ranks: int) -> list[Ticket]:
        """Hear that all shards have heard of so many trainers that they ended."""
        if self.run_state.run != run:
            return []
        self.run_state.hear_finished(n_ranks)
        self.set_gate()
        self._apply_complete()
        return self._wake()

    def hold_run(
        self, run: int, limit: int | None = None, error: Exception | None = None
    ) -> list[Ticket]:
        """Complete no round from `limit` on, by default the open one.

        A run is fenced on one shard after the other. Held first, none of them gets
        ahead of the rest meanwhile, and those that are behind can catch up. With
        `error` that is over: steps get it from here on, and parked ones now.
        """
        roll_back(self.segment)
        if self.run_state.run != run:
            return []
        # A fence settles in less time than a cut may take. A round that the cut
        # kept from being applied is complete on all shards: it was answered.
        released = self.release_cut("a run is being fenced")
        if error is not None and self.run_state.why_stopped is None:
            self.run_state.stop(run, error)
        now = self.segment.current.plain[ROUNDS]
        self.segment.fence(now if limit is None else limit)
        self.set_gate()
        self._apply_complete()
        return released + self._wake()

    def rounds_of(self, run: int) -> int:
        """Return the rounds completed in a run, or -1 once it has ended."""
        words = self.segment.current.plain
        return words[ROUNDS] if words[RUN] == run else -1
