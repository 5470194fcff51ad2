"""The run in progress in one shard, and the one that ended last: begin, hold, end, resume.

The memory and the mailboxes hold what others may go on with: which run is in
progress, which ended last, how far a fenced one may go. Why a run ended is the
directory's to say, and beside it this process knows; that one cannot go on here its
next owner finds out by the same round.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np

from daskps.backend.host import untouched
from daskps.consistency import BSP, Policy
from daskps.epochs import Epochs
from daskps.errors import IllegalStateError, LayoutError
from daskps.layout.arrays import counted
from daskps.shards import run_record
from daskps.shards.deputy import READING, NotHereError, set_gate
from daskps.shards.memory.areas import HEADER
from daskps.shards.memory.format import (
    CLOCK,
    DELAYS,
    ENDED,
    FIRST,
    LIVE,
    MAX_RANKS,
    N_DELAYS,
    N_DROPPED,
    N_RANKS,
    POLICY,
    ROUNDS,
    RUN,
)
from daskps.shards.memory.publication import Publication, Withdrawal, is_possible
from daskps.shards.memory.undo import roll_back
from daskps.shards.rounds.mailbox import Mailbox
from daskps.shards.rounds.round import Round
from daskps.shards.steps import RunPosition

if TYPE_CHECKING:
    from collections.abc import Iterable

    from daskps.optim import Bound
    from daskps.reduction import Reducer
    from daskps.shards.memory.segment import Segment
    from daskps.shards.planning import UpdatePlanner
    from daskps.typing import Array


def check_run(
    rules: Iterable[tuple[str, Bound | None]], policy: Policy, n_ranks: int
) -> None:
    """Refuse a run whose trainers such a rule cannot tell from each other.

    Parameters
    ----------
    rules : iterable of (str, Bound or None)
        Parameters and their rules.
    policy : Policy
        Of the run.
    n_ranks : int
        How many trainers it has.

    Raises
    ------
    LayoutError
        Naming the parameter.
    """
    for name, bound in rules:
        if bound is None or not bound.ranks:
            continue
        said = f"{name[:60]!r} has the optimizer {bound.rule!r}"
        if isinstance(policy, BSP):
            raise LayoutError(
                f"{said}, which keeps state for each trainer, and under sync='bsp' their "
                f"gradients are reduced to one; use sync='asp' or 'ssp'"
            )
        if n_ranks > bound.ranks:
            raise LayoutError(
                f"{said}, which keeps state for {counted(bound.ranks, 'trainer')}, and the "
                f"run has {n_ranks}; use fewer, or make the store with ranks={n_ranks}"
            )


class ShardRun:
    """All that a shard knows of its runs.

    Parameters
    ----------
    segment : Segment
        The memory.
    planner : UpdatePlanner
        Makes operations of arrays.
    cache_dir : str, optional
        Where compiled functions are kept.
    """

    def __init__(
        self, segment: Segment, planner: UpdatePlanner, cache_dir: str | None = None
    ) -> None:
        self._segment, self._planner, self._cache_dir = segment, planner, cache_dir
        #: Whether another process owns the segment.
        self.is_deputy = False
        #: Rounds of the run whose mailboxes are here, maybe over by now.
        self.attached: Round | None = None
        #: The run that ended last, and what its steps get.
        self._ended: tuple[int, Exception | None] = (0, None)
        self._reason = "it has ended"
        #: A run that is held, and what its steps get: one of its rounds cannot be
        #: applied here, or it is being fenced and no more is waited for.
        self.stopped: tuple[int, Exception | None] = (0, None)

    @property
    def run(self) -> int:
        """The run in progress, 0 where there is none."""
        return self._segment.current.plain[RUN]

    @property
    def n_ranks(self) -> int:
        """Number of ranks of the run in progress, 0 where there is none."""
        return self._segment.current.plain[N_RANKS]

    @property
    def live(self) -> list[bool]:
        """For each rank of the run in progress whether the others wait for it."""
        ranks = self._segment.current.ranks[: self.n_ranks]
        live: list[bool] = (ranks[:, LIVE] == 1).tolist()
        return live

    @property
    def is_bsp(self) -> bool:
        """Whether the run in progress has rounds."""
        return self._segment.current.plain[POLICY] == run_record.POLICY_CODES["bsp"]

    @property
    def round(self) -> Round | None:
        """The open round of the run in progress, if it has rounds."""
        if self.attached is not None and not self.attached.is_current:
            # Another process has ended the run: its mailboxes are not needed here.
            self.attached = None
        return self.attached

    @property
    def why_stopped(self) -> Exception | None:
        """The error for steps of the run in progress, if it can only be ended here."""
        run, error = self.stopped
        return error if run and run == self.run else None

    @property
    def is_held(self) -> bool:
        """Whether the run in progress is being fenced, or cannot go on here."""
        return self._segment.limit is not None or self.why_stopped is not None

    @property
    def may_apply(self) -> bool:
        """Whether neither a fence nor an error keeps the open round from its end."""
        limit = self._segment.limit
        is_open = limit is None or self._segment.current.plain[ROUNDS] < limit
        return is_open and self.why_stopped is None

    @property
    def takes_ticks(self) -> bool:
        """Whether the open round takes ticks: not before all know who has finished.

        A shard that goes on without a rank, which another one still waits for, would
        get two rounds ahead of that; no fence could take these back.
        """
        return self.may_apply or not self._segment.awaits_word

    def why_over(self, run: int) -> Exception:
        """Return what steps of a run get that is not in progress."""
        ended, error = self._ended
        return error if run == ended and error else run_record.ended(run, self._reason)

    def check_goes_on(self, run: int) -> None:
        """Raise why a run cannot go on here, if so."""
        if run == self.stopped[0] and (error := self.why_stopped) is not None:
            raise error

    # -- beginning -----------------------------------------------------------

    def begin(
        self,
        run: int,
        policy: Policy,
        n_ranks: int,
        reduce: str | Reducer,
        *,
        reset: bool,
        memory: Array | None,
        epochs: Epochs | None,
    ) -> bool:
        """Start a run, and end one that is still there; return whether it is new.

        Raises ConsistencyError where it would begin with an epoch that there was
        already.
        """
        roll_back(self._segment)
        if self.run == run:
            return False
        if run == self._segment.header[ENDED]:
            raise self.why_over(run)
        if not 1 <= n_ranks <= MAX_RANKS:
            raise IllegalStateError(f"a run of {n_ranks} ranks reached a shard")
        pieces = enumerate(self._segment.pieces)
        rules = ((p.parameter.name, self._planner.binding(at)) for at, p in pieces)
        check_run(rules, policy, n_ranks)
        if self.run:
            self.end(self.run, "another run has begun")
        current = self._segment.current
        if epochs is None:
            # A run without any: what there was of an epoch is not gone on with after
            # it.
            epochs = Epochs(run_record.epochs_of(current).following)
        elif not reset:
            run_record.check_epochs(current, epochs)
        if isinstance(policy, BSP):
            self._open_rounds(run, n_ranks, reduce, memory)
            self._segment.double_slots()
        publication = Publication(self._segment)
        record = publication.record
        run_record.begin_run(record, run, policy, n_ranks, epochs=epochs)
        if record.plain[POLICY] == run_record.MEASURED:
            self._forget_delays()
        if reset:
            publication.reset()
        publication.gather_weights()
        publication.commit()
        return True

    def _forget_delays(self) -> None:
        """Begin to count how old gradients are."""
        for at in (N_DROPPED, *range(DELAYS, DELAYS + N_DELAYS)):
            self._segment.header[at] = 0

    def attach_rounds(
        self,
        run: int,
        n_ranks: int,
        reduce: str | Reducer,
        memory: Array | None,
        *,
        empty: bool = False,
    ) -> None:
        """Take part in a run in rounds whose mailboxes another process has made.

        Without memory, or `empty`, there is nothing in them: the round is sent again.
        Raises ProtocolError when they are not there, RunCancelledError for an old run.
        """
        attach = memory is not None and not empty
        self._open_rounds(run, n_ranks, reduce, memory, attach=attach)
        if self.round is None:
            raise self.why_over(run)

    def mailbox_nbytes(self, n_ranks: int, reduce: str | Reducer) -> int:
        """Return the memory that the mailboxes of a run in rounds need."""
        tables = [table.piece for table in self._segment.tables]
        return Mailbox.nbytes_of(self._segment.pieces, n_ranks, reduce, tables)

    def _open_rounds(
        self,
        run: int,
        n_ranks: int,
        reduce: str | Reducer,
        memory: Array | None,
        *,
        attach: bool = False,
    ) -> None:
        """Use the mailboxes in some memory, which are empty unless they are attached."""
        pieces = self._segment.pieces
        tables = [table.piece for table in self._segment.tables]
        if memory is None:
            # Most rounds need far fewer slices than the worst order of arrival.
            memory = untouched(self.mailbox_nbytes(n_ranks, reduce))
        of, payload = (pieces, n_ranks, reduce, memory), self._segment.payload
        mailbox = Mailbox(*of, tables=tables, payload=payload)
        if attach:
            mailbox.check(run)
        else:
            mailbox.clear(run)
        self.attached = Round(
            run,
            self._segment,
            self._planner,
            mailbox,
            reduce=reduce,
            # A cycle would keep the memory of shards that are gone.
            fail=weakref.WeakMethod(self._fail),
            cache_dir=self._cache_dir,
        )

    # -- under way -----------------------------------------------------------

    def _fail(self, run: int, error: Exception) -> None:
        """Hold a run one of whose rounds cannot be applied: every trainer gets why.

        It ends with all shards: those that have applied the round take it back. A
        deputy leaves that to the owner: nothing came of the step here.
        """
        if self.is_deputy:
            raise NotHereError from error
        self.stop(run, error)

    def stop(self, run: int, error: Exception) -> None:
        """Hold a run that cannot go on here: its steps get `error`, until it is ended."""
        if self.run == run:
            self.stopped = run, error
            set_gate(self._segment, READING)

    def finish_rank(self, rank: int, *, may_apply: bool) -> None:
        """Wait for a trainer of the run in progress no longer."""
        if (open_round := self.round) is not None:
            is_news = not self._segment.is_alone and open_round.waits_for(rank)
            if is_news and self._segment.limit is None:
                limit = self._segment.current.plain[ROUNDS] + 1
                self._segment.fence(limit, until_word=True)
            open_round.finish_rank(rank, may_apply)
        elif self._segment.current.ranks[rank, LIVE]:
            publication = Publication(self._segment)
            publication.record.ranks[rank, LIVE] = 0
            publication.commit()

    def hear_finished(self, n_ranks: int) -> None:
        """Go on where no more ranks have finished than all shards have heard of."""
        open_round = self.round
        if open_round is None or not self._segment.awaits_word:
            return
        if open_round.n_finished <= n_ranks:
            self._segment.unfence()

    def resume_rank(self, run: int, rank: int, attempt: int = 0) -> tuple[int, int]:
        """Return (clock, next sequence) of a rank that starts again.

        `attempt` counts its trainers. The shard drops what one before it left of an
        unfinished BSP step, and refuses its steps from here on; of an unfinished step
        under ASP and SSP the pushes that were applied are told from new ones. With 0
        nothing changes.
        """
        if self.run != run:
            raise self.why_over(run)
        self.check_goes_on(run)
        if (open_round := self.round) is not None:
            return open_round.restart_rank(rank, attempt)
        row = self._segment.current.ranks[rank]
        return int(row[CLOCK]), int(row[FIRST])

    # -- ending --------------------------------------------------------------

    def find_position(self, run: int) -> RunPosition:
        """Return where a run stands here."""
        record = self._segment.current
        if self.run != run:
            return RunPosition(-1, record.version)
        ranks = record.ranks[: record.plain[N_RANKS]]
        return RunPosition(
            record.plain[ROUNDS],
            record.version,
            is_stuck=self.why_stopped is not None,
            has_last=is_possible(self._segment),
            finished=tuple(np.flatnonzero(ranks[:, LIVE] == 0).tolist()),
        )

    def end(
        self,
        run: int,
        reason: str,
        error: Exception | None = None,
        *,
        rounds: int | None = None,
        version: int = 0,
    ) -> bool:
        """End a run, after `rounds`; return whether it was in progress.

        Raises
        ------
        IllegalStateError
            When it cannot go back so far; nothing was changed.
        """
        # Else what was begun here and not ended would come after its end.
        roll_back(self._segment)
        if self.run != run:
            if not self.run and run != self._segment.header[ENDED]:
                # Its beginning may still be on the way, and must not come after.
                self._note_end(run, reason, error)
            return False
        back = 0 if rounds is None else self._segment.current.plain[ROUNDS] - rounds
        if back not in (0, 1) or (back and not is_possible(self._segment)):
            raise IllegalStateError(
                f"run {run} is to end after round {rounds}, this shard is {back} ahead "
                f"of that and cannot go back"
            )
        self._note_end(run, reason, error or self.why_stopped)
        self.attached = None
        self._publish_end(back, version)
        return True

    def _note_end(self, run: int, reason: str, error: Exception | None) -> None:
        """Note that a run is over: in the memory, and for whoever asks here also why."""
        self._segment.amend(HEADER, ((ENDED, run),))
        self._ended, self._reason = (run, error), reason

    def _publish_end(self, back: int, version: int) -> None:
        """Take the run out of the record, and its last round where it goes `back`."""
        segment = self._segment
        # Of the record in force: what is ended may have been begun before, half-way.
        epochs = run_record.epochs_of(segment.current)
        if back and epochs.per_epoch:
            epochs = epochs._replace(clock=epochs.clock - back)
        if back:
            publication: Publication = Withdrawal(segment)
        else:
            segment.withdraws = 0
            publication = Publication(segment)
        publication.gather_slots()
        # A version that had the round is never one without it.
        least = publication.old.version + back
        run_record.end_run(publication.record, max(version, least), epochs)
        publication.commit()
        segment.single_slots()
