"""A shard of dense parameters: a state machine over one segment, without I/O.

Every race is a plain sequence of calls here. The owner of the segment's lock calls
:meth:`Shard.submit` with tickets and gets back those that are done; a ticket that
must wait stays parked inside, as data, until a later call completes it.

What a step's arrays become is in `planning`, when its wait is over in `reads`, what
a run has in the record in `run_record`, the contributions to a round in `rounds`,
what a cut holds back in `cuts`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from daskps.consistency import BSP, Policy
from daskps.shards import ending, producers, run_record
from daskps.shards.arrays.planning import UpdatePlanner
from daskps.shards.cuts.cut import Cut, broken
from daskps.shards.cuts.floors import Floors
from daskps.shards.deputy import (
    N_GATES,
    OPEN,
    READING,
    NotHereError,
    gate_of,
    is_for_owner,
    set_gate,
)
from daskps.shards.invariants import check
from daskps.shards.memory.areas import RECORD, untouched
from daskps.shards.memory.format import (
    FLIP,
    GATE,
    GENERATION,
    LIVE,
    N_APPLIED,
    N_DUPLICATES,
    POLICY,
    ROUNDS,
    RUN,
    VERSION,
)
from daskps.shards.memory.publication import Publication
from daskps.shards.pushes import Pushes
from daskps.shards.reads import find_outcome, round_gone
from daskps.shards.rounds.mailbox import Mailbox
from daskps.shards.rounds.round import EARLY, REPEAT, Round
from daskps.shards.steps import ASK, Tick, Ticket

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from daskps.reduction import Reducer
    from daskps.shards.arrays.planning import Bindings
    from daskps.shards.memory.segment import Segment
    from daskps.shards.memory.witness import Witness
    from daskps.shards.steps import Standing, Step
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
        #: Whether another process owns the segment.
        self._is_deputy = False
        self.parked: list[Ticket] = []
        self._planner = UpdatePlanner(segment.pieces, bindings)
        self.floors = Floors(segment)
        self._pushes = Pushes(segment, self._planner, self.floors)
        #: The cut in progress: no step is applied and no round completed but by it.
        self.cut: Cut | None = None
        #: Rounds of the run whose mailboxes are here, maybe over by now.
        self._round: Round | None = None
        self._cache_dir = cache_dir
        self._header = segment.header
        self._heads = [record.plain for record in segment.records]
        #: The run that ended last, and what its steps get.
        self._ended: tuple[int, Exception | None] = (0, None)
        self._reason = "it has ended"
        self._abandoned: Exception | None = None
        #: A run that is held, and what its steps get: one of its rounds cannot be
        #: applied here, or it is being fenced and no more is waited for.
        self._stopped: tuple[int, Exception | None] = (0, None)
        #: What the parked tickets were asked at last.
        self._asked = -1

    @classmethod
    def as_deputy(
        cls, segment: Segment, bindings: Bindings, *, cache_dir: str | None = None
    ) -> Shard:
        """Return a state machine over a segment that another process owns."""
        shard = cls(segment, bindings, segment.header[GENERATION], cache_dir=cache_dir)
        shard._is_deputy = True
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

    def try_step(self, tick: Tick, arrays: Mapping[int, Array]) -> int:
        """Take a trainer's step that simply joins the open round, as most do.

        Returns
        -------
        int
            The version that the shard is at now; or ASK.
        """
        # Parked tickets would have to be asked again.
        return ASK if self.parked else self._try_step(tick, arrays)

    def _try_step(self, tick: Tick, arrays: Mapping[int, Array]) -> int:
        header, open_round = self._header, self._round
        if (
            open_round is None
            or open_round.run != tick.run
            or self._heads[header[FLIP] & 1][RUN] != tick.run
            # No cut and no fence holds steps back while it is open.
            or header[GATE] != OPEN
            or header[GENERATION] != self.generation
            or self._abandoned is not None
        ):
            return ASK
        try:
            n = open_round.find_slices(tick, arrays)
            if n < 0 or not self._planner.are_whole(arrays):
                return ASK
            open_round.deliver(tick, arrays, n)
        except Exception:  # noqa: BLE001  (nothing came of it; a ticket gets the reason)
            return ASK
        if self._round is not open_round or header[GATE] != OPEN:  # it has failed
            return ASK
        return self._heads[header[FLIP] & 1][VERSION]

    def release_cut(self, why: str) -> list[Ticket]:
        """Give a cut up and go on with what waited for it."""
        cut, self.cut = self.cut, None
        if cut is None:
            return []
        self.set_gate()
        self._asked = -1
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
        segment = self.segment
        held = self.cut is not None or self.is_held or segment.witness is not None
        set_gate(segment, READING if held else OPEN)

    def watch(self, witness: Witness | None) -> None:
        """Tell a witness of each change from here on, with None nobody."""
        self.segment.watch(witness)
        self.set_gate()

    @property
    def is_held(self) -> bool:
        """Whether the run in progress is being fenced, or cannot go on here."""
        return self.segment.limit is not None or self.why_stopped is not None

    @property
    def why_stopped(self) -> Exception | None:
        """What steps of the run in progress get, where it can only be ended here."""
        run, error = self._stopped
        return error if run and run == self.segment.current.fixed[RUN] else None

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
        if self._is_deputy and (error is not None or self._is_for_owner(ticket.step)):
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
            return self._over(step.run)
        if step.run and (stopped := self.why_stopped) is not None:
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
        if self._round is not None and not self._round.is_current:
            # Another process has ended the run: its mailboxes are not needed here.
            self._round = None
        return self._round

    @property
    def _open(self) -> bool:
        """Whether a round that is complete may be applied now."""
        if self.cut is not None or self.why_stopped is not None:
            return False
        limit = self.segment.limit
        return limit is None or bool(self.segment.current.fixed[ROUNDS] < limit)

    def _fail(self, run: int, error: Exception) -> None:
        """Hold a run one of whose rounds cannot be applied: every trainer gets why.

        It ends with all shards: those that have applied the round take it back. A
        deputy leaves that to the owner: nothing came of the step here.
        """
        if self._is_deputy:
            raise NotHereError from error
        if self.segment.current.fixed[RUN] == run:
            self._stop(run, error)

    def _stop(self, run: int, error: Exception) -> None:
        self._stopped = run, error
        self.set_gate()
        # Parked steps are told why.
        self._asked = -1

    def _apply_complete(self) -> None:
        """Apply a round that was complete before it could be applied."""
        if (open_round := self.round) is not None and self._open:
            open_round.apply_complete()

    def _join_round(self, ticket: Ticket) -> list[Ticket]:
        """Take a trainer's step into the open round, or park it for the next."""
        step, open_round = ticket.step, self.round
        if open_round is not None and run_record.changes(step):
            version = self._try_ticket(step)
            if version != ASK:
                ticket.applied, ticket.version = True, version
                return self._settle([ticket])
            if self.is_held and self._refused(ticket):  # the round has failed
                return [ticket]
            try:
                verdict = open_round.take_step(step, self._open)
            except Exception as error:  # noqa: BLE001  (it is the ticket's answer)
                ticket.outcome = error
                return [ticket]
            if verdict == EARLY:
                self.parked.append(ticket)
                return []
            if verdict == REPEAT:
                ticket.duplicate = True
                self._pushes.n_duplicates += 1
        if self.is_held and self._refused(ticket):
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
            or any(i.start or not 0 <= i.position < n_pieces for i in step.items)
        ):
            return ASK
        return self._try_step(Tick.of(step, step.kind), arrays)

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

    def _sight(self) -> int:
        """Return what decides whether a parked ticket's wait is over.

        A gate that closes lets no deputy wait on.
        """
        return self.segment.flip * N_GATES + gate_of(self.segment)

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
        if self.segment.current.fixed[RUN] == run:
            return []
        if run == self._ended[0]:
            raise self._over(run)
        run_record.check_size(n_ranks)
        if over := int(self.segment.current.fixed[RUN]):
            self._end(over, "another run has begun", None)
        if isinstance(policy, BSP):
            self._open_round(run, n_ranks, reduce, memory)
            self.segment.double_slots()
        publication = Publication(self.segment)
        run_record.begin_run(publication.record, run, policy, n_ranks)
        if reset:
            publication.reset()
        publication.gather_weights()
        publication.commit()
        self.set_gate()
        self.floors.forget_ranks()
        return self.release_cut("a run has begun") + self._wake()

    def attach_rounds(
        self, run: int, n_ranks: int, reduce: str | Reducer, memory: Array | None
    ) -> None:
        """Take part in a run in rounds whose mailboxes another process has made.

        Without memory they are empty, as of the task graph, which sends a round again.
        Raises ProtocolError when they are not there, RunCancelledError for an old run.
        """
        self._open_round(run, n_ranks, reduce, memory, attach=memory is not None)
        if self.round is None:
            raise self._over(run)

    def _open_round(
        self,
        run: int,
        n_ranks: int,
        reduce: str | Reducer,
        memory: Array | None,
        *,
        attach: bool = False,
    ) -> None:
        """Use the mailboxes in some memory, which are empty unless they are attached."""
        pieces = self.segment.pieces
        if memory is None:
            # Most rounds need far fewer slices than the worst order of arrival.
            memory = untouched(Mailbox.nbytes_of(pieces, n_ranks, reduce))
        mailbox = Mailbox(pieces, n_ranks, reduce, memory)
        if attach:
            mailbox.check(run)
        else:
            mailbox.clear(run)
        self._round = Round(
            run,
            self.segment,
            self._planner,
            mailbox,
            reduce=reduce,
            fail=self._fail,
            cache_dir=self._cache_dir,
        )

    def take_over(self) -> list[Ticket]:
        """Go on where an owner that died has left: no complete round is held back.

        In a run in rounds :meth:`attach_rounds` comes first.
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
        ended = self.segment.current.fixed[RUN] == run
        self._end(run, reason, error, rounds=rounds, version=version)
        released = self.release_cut("a run has ended") if ended else []
        return released + self._wake()

    def _end(
        self,
        run: int,
        reason: str,
        error: Exception | None,
        *,
        rounds: int | None = None,
        version: int = 0,
    ) -> None:
        if self.segment.current.fixed[RUN] != run:
            if not self.segment.current.fixed[RUN] and run != self._ended[0]:
                # Its beginning may still be on the way, and must not come after.
                self._ended, self._reason = (run, error), reason
            return
        last = ending.Last(self.segment, rounds, version)
        self._ended, self._reason = (run, error or self.why_stopped), reason
        self._round = None
        last.publish()
        self.set_gate()

    def _over(self, run: int) -> Exception:
        ended, error = self._ended
        return error if run == ended and error else run_record.ended(run, self._reason)

    def finish(self, run: int, rank: int) -> list[Ticket]:
        """Wait for a trainer no longer: it ended, or has no data.

        Where its run cannot go on here it gets why.
        """
        current = self.segment.current
        if current.fixed[RUN] != run:
            return []
        self.check_goes_on(run)
        with np.errstate(all="ignore"):
            if (open_round := self.round) is not None:
                open_round.finish_rank(rank, self._open)
            elif current.ranks[rank, LIVE]:
                publication = Publication(self.segment)
                publication.record.ranks[rank, LIVE] = 0
                publication.commit()
            done = self._wake()
        if self.cut is None:
            return done
        self.cut.excuse([-1 - rank])
        return done + self.cut.advance(self.segment)

    def hold(
        self, run: int, limit: int | None = None, error: Exception | None = None
    ) -> list[Ticket]:
        """Complete no round from `limit` on, by default the open one.

        A run is fenced on one shard after the other. Held first, none of them gets
        ahead of the rest meanwhile, and those that are behind can catch up. With
        `error` that is over: steps get it from here on, and parked ones now.
        """
        if self.segment.current.fixed[RUN] != run:
            return []
        # A fence settles in less time than a cut may take. What that kept from being
        # applied is complete on all shards: it was answered.
        released = self.release_cut("a run is being fenced")
        if error is not None and self.why_stopped is None:
            self._stop(run, error)
        now = int(self.segment.current.fixed[ROUNDS])
        self.segment.fence(now if limit is None else limit)
        self.set_gate()
        self._asked = -1
        with np.errstate(all="ignore"):
            self._apply_complete()
            return released + self._wake()

    def stop(self, run: int, error: Exception) -> None:
        """Hold a run that cannot go on here: its steps get `error`, until it is ended."""
        if self.segment.current.fixed[RUN] == run:
            self._stop(run, error)

    def standing(self, run: int) -> Standing:
        """Return where a run stands here."""
        return ending.standing(self.segment, run, self.why_stopped is not None)

    def check_goes_on(self, run: int) -> None:
        """Raise why a run cannot go on here, if so."""
        if run == self._stopped[0] and (error := self.why_stopped) is not None:
            raise error

    def resume(self, run: int, rank: int, attempt: int = 0) -> tuple[int, int]:
        """Return (clock, next sequence) of a rank that starts again.

        `attempt` counts its trainers. What one before it left of an unfinished BSP step
        is dropped, and its steps are refused from here on; of an unfinished step under
        ASP and SSP the pushes that were applied are told from new ones. With 0 nothing
        changes.
        """
        record = self.segment.current
        if record.fixed[RUN] != run:
            raise self._over(run)
        self.check_goes_on(run)
        if (open_round := self.round) is not None:
            return open_round.restart_rank(rank, attempt)
        return run_record.place(record, rank)

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
        stopped = self.why_stopped is not None
        check(self.segment, self.round, self.parked, self.cut, stopped=stopped)
