"""The open round of a BSP run in one shard: who is in, and what completes it.

Nothing that counts is kept here but in the mailboxes, so several processes may take
turns: each call looks at the table in force. Only pushes before the tick stay with the
process that got them; where that one is gone, their trainer sends all of its clock
again, as one *whole* step.
"""

from __future__ import annotations

import contextlib
from math import nan
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

from daskps import config
from daskps.errors import PushRejectedError, StaleGenerationError
from daskps.kernels.row_merge import warm
from daskps.layout.arrays import compute_dtype
from daskps.reduction import path, reduce_all
from daskps.shards import run_record
from daskps.shards.arrays.operations import scaled
from daskps.shards.memory.format import (
    CLOCK,
    FLIP,
    N_APPLIED,
    RANK_WORDS,
    ROUNDS,
    RUN,
    integers,
)
from daskps.shards.memory.growth import make_room
from daskps.shards.memory.publication import Publication
from daskps.shards.memory.undo import roll_back
from daskps.shards.rounds import sums, words
from daskps.shards.rounds.mailbox import TURNS
from daskps.shards.rounds.sums import KIND_CODES, KINDS, Delivery, forms_of
from daskps.shards.rounds.unticked import (
    Pushed,
    Unticked,
    join_pushes,
    join_rows,
    widened,
)
from daskps.shards.run_record import EARLY, NEW, judge_step
from daskps.shards.steps import GRADIENT, MODEL, NOTHING, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from daskps.reduction import Reducer
    from daskps.shards.memory.segment import Segment
    from daskps.shards.planning import UpdatePlanner
    from daskps.shards.rounds.arena import RankRows
    from daskps.shards.rounds.mailbox import Mailbox, MailboxTable, Slice
    from daskps.shards.rounds.sums import Sum
    from daskps.typing import Array


_NONE: Final[Mapping[int, RankRows]] = MappingProxyType({})


class Round:
    """The round of one run that is open now, and those that follow it.

    All functions that its steps need compiled are ready when it is made, not when the
    first step comes, which would keep all others from the shard meanwhile.

    Threads: all of it runs under the shard's mutex and lock, in whichever thread brings a
    step: a trainer's, one of sockets or the event loop, of the owner's process or, as a
    deputy, of any that maps the segment. So `_keep` runs in the process of the rank that
    comes, `_apply` and `_publish` in that of the rank that comes last.

    Parameters
    ----------
    run : int
        The run.
    segment : Segment
        The memory of the shard.
    planner : UpdatePlanner
        Makes operations of arrays.
    mailbox : Mailbox
        The memory of the contributions.
    reduce : "mean", "sum" or callable
        How contributions become one gradient.
    fail : callable
        Returns what gets a run and the error for which a round of it cannot be applied:
        a weak reference to :meth:`ShardRun._fail`, or None once that is gone.
    cache_dir : str, optional
        Where compiled functions are kept.
    """

    def __init__(
        self,
        run: int,
        segment: Segment,
        planner: UpdatePlanner,
        mailbox: Mailbox,
        *,
        reduce: str | Reducer,
        fail: Callable[[], Callable[[int, Exception], None] | None],
        cache_dir: str | None = None,
    ) -> None:
        self.run, self.size, self.reduce = run, mailbox.n_ranks, reduce
        self.mailbox = mailbox
        self._segment, self._planner = segment, planner
        self._fail, self._cache_dir = fail, cache_dir
        self._is_on_device = segment.payload.device is not None
        self._header = segment.header
        self._heads = [record.plain for record in segment.records]
        self._records = [record.words for record in segment.records]
        #: Where the rows of the ranks begin in a record.
        self._ranks_at = len(segment.records[0].fixed)
        self._sizes = self.size, mailbox.n_slices
        self._paths: dict[int, Array] = {}
        #: Compiled forms of `look`, `climb`, `join`, `note` and `empty` of :mod:`words`,
        #: by the same names: read the Python there.
        self.work = words.compiled(cache_dir)
        #: The last findings, see :mod:`words`; the same as plain integers.
        self._found = np.zeros(words.SLICES + self.size.bit_length(), np.int64)
        self.found = integers(self._found)
        #: The table of the open round, as it was found last.
        self._table = mailbox.tables[0]
        #: The pushes of each rank in the open round before its tick.
        self._unticked = Unticked()
        #: The dtypes and shapes of arrays of whole pieces.
        dtypes = [np.dtype(compute_dtype(p.parameter.dtype)) for p in segment.pieces]
        shapes = [(p.size,) for p in segment.pieces]
        self._wanted = list(zip(dtypes, shapes, strict=True))
        #: Whether sums that are not finite are refused: what they are made of is.
        self._checks = config.check_finite()
        of = segment.pieces, self.work, segment.payload
        self._forms = forms_of(*of, check=self._checks)
        #: By kind whether what ranks bring is weighed, and the sum of it divided: of
        #: gradients that is as the run says; models are averaged, and deltas added up.
        is_mean = {GRADIENT: reduce == "mean", MODEL: True}
        self._weighs = {kind: is_mean.get(kind, False) for kind in KINDS}
        #: By kind what a complete round says to rules: it has no number of its own.
        self._said = {kind: Step(kind, run=run) for kind in KINDS}
        self._said[NOTHING] = self._said[GRADIENT]
        for dtype in {a.piece.table.dtype for a in mailbox.arenas if a.room}:
            warm(np.dtype(compute_dtype(dtype)), cache_dir=cache_dir)

    @property
    def is_current(self) -> bool:
        """Whether the run is the one in progress."""
        return self._heads[self._header[FLIP] & 1][RUN] == self.run

    def find_table(self) -> MailboxTable:
        """Return the table of the open round; write it, where that has yet to be emptied."""
        side, mailbox = self._header[FLIP] & 1, self.mailbox
        turn = mailbox.words[TURNS] & 1
        table = mailbox.tables[turn]
        if table.words[words.ROUND] != self._heads[side][ROUNDS]:
            table = mailbox.tables[1 - turn]
            record, at = self._records[side], self._ranks_at
            self.work.empty(table.array, record, at, self.size, mailbox.n_slices)
            mailbox.words[TURNS] += 1
        self._table = table
        return table

    # -- a step joins --------------------------------------------------------

    def take_step(
        self, step: Step, *, may_apply: bool = True, takes_ticks: bool = True
    ) -> str:
        """Take a trainer's step into the round if it is new; return the verdict.

        Raises
        ------
        PushRejectedError, NoOptimizerError
            When its arrays or rows do not fit.
        ContributionLostError
            When the rank's pushes before this one went with the shard's worker.
        ConsistencyError
            When the others send another kind.
        """
        table = self.find_table()
        if self._is_on_device:
            step = self._planner.brought(step, of_round=True)
        arrays: dict[int, Array] = {}
        code = KIND_CODES.get(step.kind, words.FREE) if step.items else 0
        joins = step.tick and may_apply and takes_ticks and not self._unticked
        if joins and code >= 0 and 0 <= step.rank < self.size:
            n_pieces, wanted = len(self._wanted), self._wanted
            for position, start, data, ids, _ in step.items:
                if (
                    ids is not None
                    or start
                    or not 0 <= position < n_pieces
                    or (data.dtype, data.shape) != wanted[position]
                    or not data.flags.c_contiguous
                ):
                    break
                arrays[position] = data
            if len(arrays) == len(step.items):
                n = self._look(step, bool(arrays and step.weight), code)
                if n >= 0:
                    self._deliver(step, arrays, n)
                    return NEW
        return self._judge(step, table, may_apply=may_apply, takes_ticks=takes_ticks)

    def _look(self, step: Step, brings: bool, code: int) -> int:
        """Return how many slices a step meets that joins as it is; -1 for any other.

        Not -1 only where :func:`judge_step` says NEW, the kind fits and nothing was
        pushed before the tick. All else that it finds is in :attr:`found`.
        """
        said = step.rank, brings, step.clock, step.sequence, code
        nodes = self._paths.get(step.rank)
        to = self._find_path(step.rank) if nodes is None else nodes, self._found
        return self.work.look(self._table.array, *self._sizes, *said, *to)

    def _climb(self, rank: int, brings: bool) -> int:
        """As :meth:`_look`, for a rank that is in by what was looked at before."""
        table, out = self._table.array, (self._find_path(rank), self._found)
        return self.work.climb(table, *self._sizes, rank, brings, *out)

    def _find_path(self, rank: int) -> Array:
        """Return the nodes above a rank whose sums are formed."""
        known = self._paths.get(rank)
        if known is None:
            above = () if callable(self.reduce) else path(rank, self.size)
            known = self._paths[rank] = np.array(above, np.int64).reshape(-1)
        return known

    def _deliver(
        self,
        step: Step,
        arrays: Mapping[int, Array],
        n: int,
        *,
        rows: Mapping[int, RankRows] = _NONE,
        may_apply: bool = True,
        bits: int = words.TICKED,
    ) -> None:
        """Take a rank into the round, which `n` slices of sums meet, as was found.

        The round that it completes is applied, if that may be; else what came is kept.
        Of `rows`, by the number of their table, sums are formed when the round is
        applied.
        """
        code = KIND_CODES[step.kind] if arrays or rows else 0
        if not step.weight:
            arrays, rows = {}, {}
        slices = self._slices(n) if n else ()
        came = Delivery(step, arrays, slices, code, bits)
        if rows:
            scale = step.weight if self._weighs[step.kind] else 1.0
            spans = {}
            for ordinal, of in rows.items():
                taken, arena = self._table.spans(ordinal), self.mailbox.arenas[ordinal]
                with np.errstate(all="ignore"):
                    spans[ordinal] = arena.place(taken.values(), of, scale)
            came = came._replace(spans=spans)
        if self.found[words.LAST] and may_apply:
            self._apply(came)
        else:
            self._keep(came)

    def _slices(self, n: int) -> list[Slice]:
        """Return the first `n` slices that were found."""
        found, first = self.found, words.SLICES
        return [self.mailbox.slice(found[at]) for at in range(first, first + n)]

    def _keep(self, came: Delivery) -> None:
        """Keep the sum of what came; put the table in force that has the rank in it."""
        mailbox, step, n = self.mailbox, came.step, len(came.slices)
        if came.arrays or n > 1:
            weighs = self._weighs[step.kind]
            out = mailbox.slice(self.found[words.INTO])
            weights = [nan] * len(out.arrays)
            for position, total in sums.gather(came, weighs, self._forms).items():
                weights[position] = total.weight
                total.write(out.arrays[position])
            out.weigh(weights)
            if self._is_on_device:
                # Their owner may change the arrays once this is taken.
                self._segment.payload.wait()
        table, other = self._table, mailbox.tables[self._table is mailbox.tables[0]]
        who = step.rank, came.bits, step.sequence + 1, came.code, step.weight
        self.work.join(table.array, other.array, *self._sizes, self._found, n, *who)
        if came.spans:
            other.note_rows(step.rank, step.weight, came.spans)
        mailbox.words[TURNS] += 1
        self._unticked.pop(step.rank, None)

    def _apply(self, came: Delivery) -> None:
        """Publish the round that a rank completes, or say why it cannot be."""
        try:
            n_pushes = self._publish(came)
        except Exception as error:  # noqa: BLE001  (every trainer gets it)
            # A device that has ended takes nothing back: its shard is lost.
            with contextlib.suppress(StaleGenerationError):
                roll_back(self._segment)
            if (fail := self._fail()) is not None:
                fail(self.run, error)
            return
        self._header[N_APPLIED] += n_pushes
        self._unticked.clear()

    def _publish(self, came: Delivery) -> int:
        """Publish a complete round; return how many pushed."""
        segment, table, step = self._segment, self._table, came.step
        said = self._said[KINDS[came.code or table.words[words.KIND]]]
        has_rows = bool(came.spans or table.words[words.N_BROUGHT])
        if has_rows and segment.has_unbounded:
            roll_back(segment)
        if callable(self.reduce):
            reduced = self._reduce(came, said.kind)
        else:
            weighs = self._weighs[said.kind]
            reduced = sums.divide(sums.gather(came, weighs, self._forms), weighs)
        rows: Mapping[int, tuple[Array, Array]] = {}
        if has_rows:
            rows = self._merge(came, said.kind)
        now = segment.records[self._header[FLIP] & 1]
        planned = self._planner.round(said, reduced, rows, now, check=self._checks)
        if has_rows and segment.has_unbounded:
            make_room(segment, planned)
        # Not before: it overwrites the round before the one in force.
        publication = Publication(segment, of_sums=True)
        publication.add(planned)
        record = self._records[publication.flip & 1]
        who = step.rank, came.bits, step.sequence + 1, step.weight
        n_pushes: int = self.work.note(
            record, self._ranks_at, table.array, self.size, *who
        )
        publication.commit()
        return n_pushes

    def _reduce(self, came: Delivery, kind: str) -> dict[int, Sum | Array]:
        """Return what a function makes of the arrays of a complete round, by position."""
        held = enumerate(self._table.first.tolist())
        nodes = {r: self.mailbox.slice(i).node() for i, r in held if r != words.FREE}
        if came.arrays:
            weight, arrays = came.step.weight, dict(came.arrays)
            if self._weighs[kind]:
                of = weight, self._segment.payload
                arrays = {p: scaled(array, *of) for p, array in arrays.items()}
            nodes[came.step.rank] = arrays, dict.fromkeys(arrays, weight)
        payload = self._segment.payload
        payload.wait()  # the function's own work comes after all that was queued
        if kind == GRADIENT:
            return dict(reduce_all(nodes, self.size, self.reduce))
        # Sums are not to be made in place of what others have in their slices.
        view = payload.fetch if self._is_on_device else _read_only
        views = {
            rank: ({p: view(array) for p, array in arrays.items()}, weights)
            for rank, (arrays, weights) in nodes.items()
        }
        how = "mean" if kind == MODEL else "sum"
        found = reduce_all(views, self.size, how)
        return {p: payload.bring(array) for p, array in found.items()}

    def _merge(self, came: Delivery, kind: str) -> dict[int, tuple[Array, Array]]:
        """Return ids and sums of the rows of a complete round by position."""
        table, step, found = self._table, came.step, {}
        is_mean = self._weighs[kind]
        for ordinal, arena in enumerate(self.mailbox.arenas):
            spans = table.spans(ordinal)
            if ordinal in came.spans:
                spans[step.rank] = came.spans[ordinal]
            if spans:
                weights = None
                if is_mean:
                    weights = {r: table.weights[r] for r in spans}
                    weights |= {step.rank: step.weight} if ordinal in came.spans else {}
                merged = arena.merge(spans, weights, self._cache_dir)
                found[len(self._wanted) + ordinal] = merged
        return found

    # -- what is not as simple -----------------------------------------------

    def _judge(
        self, step: Step, table: MailboxTable, *, may_apply: bool, takes_ticks: bool
    ) -> str:
        """Take a step that does not simply join; see :meth:`take_step`."""
        rank = step.rank
        word = table.ranks[rank]
        state = (
            table.words[words.ROUND],
            bool(word & words.TICKED),
            bool(word & words.FINISHED),
        )
        uncommitted = self._unticked.find_next(rank, table)
        verdict = judge_step(step, state, table.next[rank], uncommitted)
        if verdict != NEW:
            return verdict
        if step.tick and not takes_ticks:
            return EARLY
        if step.tick and not may_apply and self.size == 1:
            # A contribution from the task graph is in no memory that others have: it is
            # accepted when it is applied.
            return EARLY
        self._check(step)
        held = None if step.whole else self._unticked.find(rank, state[0])
        if held is None and not step.whole and table.has_pushed(rank):
            raise run_record.lost(step)
        before, arrays, rows = held or (None, {}, {})
        kind = before.kind if before else NOTHING
        if step.items:
            kind = self._check_kind(step, table)
            step = widened(step, self._segment.payload)
        rows = join_rows(rows, step, self._planner)
        brought = {p - len(self._wanted): of for p, of in rows.items()}
        for ordinal, came in brought.items() if step.weight else ():
            taken = table.spans(ordinal).values()
            self.mailbox.arenas[ordinal].check(taken, len(came.ids))
        with np.errstate(all="ignore"):
            arrays = join_pushes(arrays, step, self._segment.payload)
        step = step._replace(kind=kind, items=())
        if step.tick:
            n = self._climb(rank, bool(arrays and step.weight))
            self._deliver(step, arrays, n, rows=brought, may_apply=may_apply)
        else:
            table.note_pushed(rank, True)
            self._segment.payload.wait()
            self._unticked[rank] = Pushed(step, arrays, rows)
        return NEW

    def _check_kind(self, step: Step, table: MailboxTable) -> str:
        """Return the kind of a step with arrays, if it is that of the round.

        Where ranks send several kinds at once, one shard has seen the one first and
        another one the other: no shard completes the round, and the run ends.
        """
        other = self._unticked.find_other_kind(step, table)
        if other is not None:
            kind, rank = other
            error = run_record.other_kind(step, kind)
            is_own = rank == step.rank or step.kind not in KIND_CODES
            if not is_own and (fail := self._fail()) is not None:
                fail(self.run, error)
            raise error
        return step.kind

    def _check(self, step: Step) -> None:
        """Refuse arrays and rows that the round does not take; nothing was changed."""
        self._planner.check(step, whole=True)
        if all(item.ids is None for item in step.items):
            return
        if callable(self.reduce):
            raise PushRejectedError(
                f"rows of a table were pushed in a run whose reduce= is the function "
                f"{self.reduce!r:.60}, which takes whole arrays; nothing was applied, "
                f"train with reduce='mean' or 'sum'"
            )
        if step.kind == GRADIENT:
            self._planner.check_rules(step)
        if step.check:
            self._planner.look(step)

    def check_has(self, step: Step) -> None:
        """Refuse a read of a rank whose last contribution went with a machine.

        The floor of the read is its rank's clock: so many rounds it has sent.

        Raises
        ------
        ContributionLostError
            Where that is more than came here.
        """
        table = self.find_table()
        word = table.ranks[step.rank]
        now = table.words[words.ROUND]
        if step.floor > now and not word & (words.TICKED | words.FINISHED):
            raise run_record.lacks(step, now)

    # -- ranks that end and begin --------------------------------------------

    def finish_rank(self, rank: int, may_apply: bool) -> None:
        """Wait for a rank no longer, from the open round on."""
        table = self.find_table()
        after = self._unticked.find_next(rank, table)
        self._unticked.pop(rank, None)
        if not self.waits_for(rank):
            return
        n = self._climb(rank, brings=False)
        if not table.words[words.N_TICKED]:
            self.found[words.LAST] = 0
        nothing = Step(run=self.run, rank=rank, sequence=after - 1, weight=0.0)
        self._deliver(nothing, {}, n, may_apply=may_apply, bits=words.FINISHED)

    def waits_for(self, rank: int) -> bool:
        """Return whether a rank has not finished."""
        return not self.find_table().ranks[rank] & words.FINISHED

    @property
    def n_finished(self) -> int:
        """How many ranks have finished."""
        return sum(bool(w & words.FINISHED) for w in self.find_table().ranks)

    def restart_rank(self, rank: int, attempt: int) -> tuple[int, int]:
        """Let a trainer take the place of a lost one; return its clock and next number.

        The round drops what that one left of an unfinished step, and refuses what it
        sends from here on. `attempt` is which of the rank's trainers asks, as the
        directory counts them; asked again, or with 0, nothing changes.
        """
        table, first = self.find_table(), run_record.first_of(attempt)
        ticked = table.ranks[rank] & words.TICKED
        if table.next[rank] < first:
            if not ticked:
                self._unticked.pop(rank, None)
                table.note_pushed(rank, False)
            # Last: a process that dies before has changed nothing that counts.
            table.next[rank] = first
        record = self._heads[self._header[FLIP] & 1]
        clock = record[self._ranks_at + rank * RANK_WORDS + CLOCK]
        return clock + ticked, table.next[rank]

    # -- a round that waits --------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """Whether the open round is complete, and was not applied."""
        table = self.find_table()
        return table.words[words.N_IN] == self.size and table.words[words.N_TICKED] > 0

    @property
    def lacks_one(self) -> bool:
        """Whether all ranks but one are in."""
        return self.find_table().words[words.N_IN] == self.size - 1

    def apply_complete(self) -> None:
        """Apply the open round if it was complete before it could be applied."""
        if not self.is_complete:
            return
        found, n = self.found, 0
        if not callable(self.reduce):
            for index, first in enumerate(self._table.first.tolist()):
                if first != words.FREE:
                    found[words.SLICES + n] = index
                    n += 1
        nobody = Step(run=self.run, sequence=-1, weight=0.0)
        self._apply(Delivery(nobody, {}, self._slices(n)))

    # -- checks --------------------------------------------------------------

    @property
    def next_sequences(self) -> list[int]:
        """The next sequence number of every rank."""
        table = self.find_table()
        return [self._unticked.find_next(rank, table) for rank in range(self.size)]


def _read_only(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view
