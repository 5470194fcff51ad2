"""A shard of dense parameters: a state machine over one segment, without I/O.

Every race is a plain sequence of calls here. The owner of the segment's lock calls
:meth:`Shard.submit` with tickets and gets back those that are done; a ticket that
must wait stays parked inside, as data, until a later call completes it.

What a step's arrays become is in `planning`, when its wait is over in `reads`, what
becomes of a run in `run_state`, the contributions to a round in `rounds`, what a cut
holds back in `cuts`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from daskps.consistency import Policy
from daskps.shards import producers, run_record
from daskps.shards.arrays.planning import UpdatePlanner
from daskps.shards.cuts.cut import Cut, broken
from daskps.shards.cuts.floors import Floors
from daskps.shards.deputy import (
    OPEN,
    READING,
    NotHereError,
    is_for_owner,
    set_gate,
)
from daskps.shards.invariants import check
from daskps.shards.memory.areas import RECORD
from daskps.shards.memory.format import (
    FLIP,
    GATE,
    GENERATION,
    LIMIT,
    N_APPLIED,
    N_DUPLICATES,
    POLICY,
    ROUNDS,
    RUN,
    VERSION,
)
from daskps.shards.pushes import Pushes
from daskps.shards.reads import find_outcome, round_gone
from daskps.shards.run_record import EARLY, REPEAT
from daskps.shards.run_state import ShardRun
from daskps.shards.steps import ASK, Tick, Ticket

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from daskps.consistency import Policy
    from daskps.reduction import Reducer
    from daskps.shards.arrays.planning import Bindings
    from daskps.shards.memory.segment import Segment
    from daskps.shards.memory.witness import Witness
    from daskps.shards.rounds.round import Round
    from daskps.shards.steps import Step
    from daskps.typing import Array


class Shard:
    """State machine over a segment.

    Not safe for threads: whoever calls holds the segment's lock. Readers need not: what
    they do is in :mod:`daskps.shards.reads`.

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
        self.parked: list[Ticket] = []
        self._planner = UpdatePlanner(segment.pieces, bindings)
        self.floors = Floors(segment)
        self._pushes = Pushes(segment, self._planner, self.floors)
        #: The cut in progress: no step is applied and no round completed but by it.
        self.cut: Cut | None = None
        self.run_state = ShardRun(segment, self._planner, cache_dir)
        self._header = segment.header
        self._heads = [record.plain for record in segment.records]
        self._abandoned: Exception | None = None
        #: What the parked tickets were asked at last.
        self._asked: object = None

    @classmethod
    def as_deputy(
        cls, segment: Segment, bindings: Bindings, *, cache_dir: str | None = None
    ) -> Shard:
        """Return a state machine over a segment that another process owns."""
        shard = cls(segment, bindings, segment.header[GENERATION], cache_dir=cache_dir)
        shard.run_state.is_deputy = True
        return shard

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

    def try_step(
        self, tick: Tick, arrays: Mapping[int, Array], *, alone: bool = True
    ) -> int:
        """Take a trainer's step that simply joins the open round, as most do.

        With `alone` not where tickets are parked: nobody would ask them again.

        Returns
        -------
        int
            The version that the shard is at now; or ASK.
        """
        header, open_round = self._header, self.run_state.attached
        if (
            open_round is None
            or open_round.run != tick.run
            or self._heads[header[FLIP] & 1][RUN] != tick.run
            # No cut and no fence holds steps back while it is open.
            or header[GATE] != OPEN
            or header[GENERATION] != self.generation
            or self._abandoned is not None
            or (alone and self.parked)
        ):
            return ASK
        try:
            n = open_round.find_slices(tick, arrays)
            if n < 0:
                return ASK
            open_round.deliver(tick, arrays, n)
        except Exception:  # noqa: BLE001  (nothing came of it; a ticket gets the reason)
            return ASK
        if header[GATE] != OPEN:  # the round has failed
            return ASK
        return self._heads[header[FLIP] & 1][VERSION]

    def release_cut(self, why: str) -> list[Ticket]:
        """Give a cut up and go on with what waited for it."""
        cut, self.cut = self.cut, None
        if cut is None:
            return []
        self.set_gate()
        with np.errstate(all="ignore"):
            self._apply_complete()
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

    def set_gate(self) -> None:
        """Let other processes only read while this one holds steps or rounds back.

        And while a witness follows the shard, which they would not call.
        """
        held = self.cut is not None or self.run_state.is_held
        is_open = not held and self.segment.witness is None
        set_gate(self.segment, OPEN if is_open else READING)

    def watch(self, witness: Witness | None) -> None:
        """Tell a witness of each change from here on, with None nobody."""
        self.segment.watch(witness)
        self.set_gate()

    @property
    def waiting(self) -> list[Ticket]:
        """Tickets that wait: those that are parked, and those a cut holds."""
        return self.parked + self.cut.held if self.cut is not None else self.parked

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
        error = self._refusal(ticket)
        if self.run_state.is_deputy and (error or self._is_for_owner(ticket.step)):
            error = NotHereError()
        ticket.outcome = error
        return error is not None

    def _refusal(self, ticket: Ticket) -> Exception | None:
        step, record = ticket.step, self.segment.current
        if self._abandoned is not None:
            return self._abandoned
        if step.generation != self.generation:
            return run_record.stale(step, self.generation)
        if step.run and step.run != record.plain[RUN]:
            return self.run_state.why_over(step.run)
        if step.run and (stopped := self.run_state.why_stopped) is not None:
            return stopped
        return None if ticket.applied else run_record.misplaced(step, record)

    def _is_for_owner(self, step: Step) -> bool:
        moved = self.segment.header[GENERATION] != self.generation
        has_rounds = not self.is_bsp or self.round is not None
        return moved or is_for_owner(self.segment, step, has_rounds=has_rounds)

    def _apply(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        """Apply pushes that are updates of their own, serve plain reads."""
        self._pushes.apply(tickets)
        return self._settle(tickets)

    # -- rounds (BSP) --------------------------------------------------------

    @property
    def round(self) -> Round | None:
        """The open round of the run in progress, if it has rounds."""
        return self.run_state.round

    @property
    def _may_apply(self) -> bool:
        """Whether a round that is complete may be applied now."""
        return self.cut is None and self.run_state.may_apply

    def _apply_complete(self) -> None:
        """Apply a round that was complete before it could be applied."""
        if (open_round := self.round) is not None and self._may_apply:
            open_round.apply_complete()

    def _join_round(self, ticket: Ticket) -> list[Ticket]:
        """Take a trainer's step into the open round, or park it for the next."""
        step, open_round = ticket.step, self.round
        if open_round is not None and run_record.changes(step):
            version = self._try_ticket(step)
            if version != ASK:
                ticket.applied, ticket.version = True, version
                return self._settle([ticket])
            if self.run_state.is_held and self._refused(ticket):  # the round has failed
                return [ticket]
            try:
                verdict = open_round.take_step(step, self._may_apply)
            except Exception as error:  # noqa: BLE001  (it is the ticket's answer)
                ticket.outcome = error
                return [ticket]
            if verdict == EARLY:
                self.parked.append(ticket)
                return []
            if verdict == REPEAT:
                ticket.duplicate = True
                self._header[N_DUPLICATES] += 1
        if self.run_state.is_held and self._refused(ticket):
            return [ticket]
        ticket.applied = True
        ticket.version = ticket.version or self.segment.current.version
        return self._settle([ticket])

    def _try_ticket(self, step: Step) -> int:
        """As :meth:`try_step`, for a step whose arrays nobody has looked at."""
        arrays = {item.position: item.data for item in step.items}
        n_pieces = len(self.segment.pieces)
        if (
            not step.tick
            or len(arrays) < len(step.items)
            or any(
                i.start or i.ids is not None or not 0 <= i.position < n_pieces
                for i in step.items
            )
        ):
            return ASK
        return self.try_step(Tick.of(step, step.kind), arrays, alone=False)

    # -- waiting -------------------------------------------------------------

    def _settle(self, tickets: Iterable[Ticket]) -> list[Ticket]:
        """Finish what need not wait, park the rest."""
        done = []
        for ticket in tickets:
            if ticket.outcome is None:
                ticket.outcome = find_outcome(self.segment, ticket)
            if ticket.outcome is None:
                self.parked.append(ticket)
            else:
                done.append(ticket)
        return done

    def _wake(self) -> list[Ticket]:
        """Advance parked tickets as long as that publishes something new."""
        done: list[Ticket] = []
        while self.is_stale:
            self._asked = self._sight()
            waiting, self.parked = self.parked, []
            for ticket in waiting:
                if self._refused(ticket):
                    done.append(ticket)
                elif ticket.applied:
                    done += self._settle([ticket])
                else:
                    done += self._join_round(ticket)
        return done

    @property
    def is_stale(self) -> bool:
        """Whether something was published that parked tickets were not asked at."""
        return bool(self.parked) and self._asked != self._sight()

    def _sight(self) -> object:
        """Return all that may end a parked ticket's wait: a flip, a gate, a fence."""
        header = self._header
        return header[FLIP], header[GATE], header[LIMIT], self.run_state.stopped

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
    ) -> list[Ticket]:
        """Start a run on this shard; the same run again changes nothing.

        A run that is still there is over; its parked tickets are returned. Mailboxes
        go into `memory`, of `Mailbox.nbytes_of`, by default into private memory.
        """
        begun = self.run_state.begin(
            run, policy, n_ranks, reduce, reset=reset, memory=memory
        )
        if not begun:
            return []
        self.set_gate()
        self.floors.forget_ranks()
        return self.release_cut("a run has begun") + self._wake()

    def take_over(self) -> list[Ticket]:
        """Go on where an owner that died has left: no complete round is held back.

        In a run in rounds :meth:`ShardRun.attach_rounds` comes first.
        """
        self.set_gate()
        with np.errstate(all="ignore"):
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

        Where its run cannot go on here it gets why.
        """
        if self.run_state.run != run:
            return []
        self.run_state.check_goes_on(run)
        with np.errstate(all="ignore"):
            self.run_state.finish_rank(rank, may_apply=self._may_apply)
            done = self._wake()
        if self.cut is None:
            return done
        self.cut.excuse([-1 - rank])
        return done + self.cut.advance(self.segment)

    def hold_run(
        self, run: int, limit: int | None = None, error: Exception | None = None
    ) -> list[Ticket]:
        """Complete no round from `limit` on, by default the open one.

        A run is fenced on one shard after the other. Held first, none of them gets
        ahead of the rest meanwhile, and those that are behind can catch up. With
        `error` that is over: steps get it from here on, and parked ones now.
        """
        if self.run_state.run != run:
            return []
        # A fence settles in less time than a cut may take. What that kept from being
        # applied is complete on all shards: it was answered.
        released = self.release_cut("a run is being fenced")
        if error is not None and self.run_state.why_stopped is None:
            self.run_state.stop(run, error)
        now = self.segment.current.plain[ROUNDS]
        self.segment.fence(now if limit is None else limit)
        self.set_gate()
        with np.errstate(all="ignore"):
            self._apply_complete()
            return released + self._wake()

    # -- what the record says ------------------------------------------------

    @property
    def is_bsp(self) -> bool:
        """Whether the run in progress has rounds."""
        return self.segment.current.plain[POLICY] == run_record.CODES["bsp"]

    def rounds_of(self, run: int) -> int:
        """Return the rounds completed in a run, or -1 once it has ended."""
        words = self.segment.current.plain
        return words[ROUNDS] if words[RUN] == run else -1

    @property
    def n_pushes(self) -> int:
        """Pushes applied."""
        return self.segment.header[N_APPLIED]

    @property
    def n_duplicates(self) -> int:
        """Pushes that were repeats."""
        return self.segment.header[N_DUPLICATES]

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
        words = producers.closing(self.segment.current, ids)
        self.segment.amend(RECORD, words)

    def validate(self) -> None:
        """Raise IllegalStateError where an invariant does not hold."""
        stopped = self.run_state.why_stopped is not None
        check(self.segment, self.round, self.parked, self.cut, stopped=stopped)
