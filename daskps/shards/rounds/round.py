"""The open round of a BSP run in one shard: who is in, and what completes it.

Nothing that counts is kept here but in the mailboxes, so several processes may take
turns: each call looks at the table in force. Only pushes before the tick stay with the
process that got them; where that one is gone, their trainer sends all of its clock
again, as one *whole* step.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

from daskps import config
from daskps.errors import PushRejectedError
from daskps.layout.arrays import compute_dtype
from daskps.reduction import path
from daskps.shards import run_record
from daskps.shards.memory.format import (
    CLOCK,
    FLIP,
    N_APPLIED,
    RANK_WORDS,
    ROUNDS,
    RUN,
    integers,
)
from daskps.shards.memory.publication import Publication
from daskps.shards.memory.undo import settle
from daskps.shards.rounds import sums, words
from daskps.shards.rounds.completion import Completion
from daskps.shards.rounds.mailbox import TURN
from daskps.shards.rounds.row_sums import Arenas
from daskps.shards.rounds.sums import CODES, Delivery, DirectSums
from daskps.shards.rounds.unticked import (
    Pushed,
    Unticked,
    join_pushes,
    join_rows,
    widened,
)
from daskps.shards.run_record import EARLY, NEW, judge_step
from daskps.shards.steps import GRADIENT, NOTHING, Tick

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from daskps.reduction import Reducer
    from daskps.shards.arrays.planning import UpdatePlanner
    from daskps.shards.memory.segment import Segment
    from daskps.shards.rounds.arena import RankRows
    from daskps.shards.rounds.mailbox import Mailbox, MailboxTable
    from daskps.shards.steps import Step
    from daskps.typing import Array


_NONE: Final[Mapping[int, RankRows]] = MappingProxyType({})


class Round:
    """The round of one run that is open now, and those that follow it.

    All functions that its steps need compiled are ready when it is made, not when the
    first step comes, which would keep all others from the shard meanwhile.

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
        Returns what gets a run and the error for which a round of it cannot be applied.
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
        self._fail = fail
        self._header = segment.header
        self._heads = [record.plain for record in segment.records]
        self._records = [record.words for record in segment.records]
        #: Where the rows of the ranks begin in a record.
        self._ranks_at = len(segment.records[0].fixed)
        self._sizes = self.size, mailbox.n_slices
        self._paths: dict[int, Array] = {}
        self.work = words.compiled(cache_dir)
        #: The last findings, see :mod:`words`; the same as plain integers.
        self._found = np.zeros(words.SLICES + 2 * self.size.bit_length(), np.int64)
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
        self._direct = DirectSums.of(segment, planner, reduce, self.work)
        #: Positions of tables come after those of arrays.
        self._n_pieces = len(segment.pieces)
        self._arenas = Arenas(mailbox.arenas, cache_dir)
        self._completion = Completion(
            *(segment, planner, mailbox),
            reduce=reduce,
            arenas=self._arenas,
            found=self.found,
            check=self._checks,
        )

    @property
    def is_current(self) -> bool:
        """Whether the run is the one in progress."""
        return self._heads[self._header[FLIP] & 1][RUN] == self.run

    def find_table(self) -> MailboxTable:
        """Return the table of the open round, after emptying it where that is due."""
        side, mailbox = self._header[FLIP] & 1, self.mailbox
        turn = mailbox.words[TURN] & 1
        table = mailbox.tables[turn]
        if table.words[words.ROUND] != self._heads[side][ROUNDS]:
            table = mailbox.tables[1 - turn]
            record, at = self._records[side], self._ranks_at
            self.work.empty(table.array, record, at, self.size, mailbox.n_slices)
            mailbox.words[TURN] += 1
        self._table = table
        return table

    # -- a step joins --------------------------------------------------------

    def find_slices(self, tick: Tick, arrays: Mapping[int, Array]) -> int:
        """Return how many slices a step meets that joins as it is; -1 for any other.

        Not -1 only where :func:`judge_step` says NEW, the kind fits and nothing was
        pushed before the tick. All else that it finds is in :attr:`found`.
        """
        rank, code = tick.rank, CODES.get(tick.kind, words.FREE) if arrays else 0
        if self._unticked or code < 0 or not 0 <= rank < self.size:
            return -1
        for position, data in arrays.items():
            dtype, shape = self._wanted[position]
            if (
                data.dtype != dtype
                or data.shape != shape
                or not data.flags.c_contiguous
            ):
                return -1
        table, brings = self.find_table().array, bool(arrays and tick.weight)
        when, out = (tick.clock, tick.sequence), (self._find_path(rank), self._found)
        n: int = self.work.look(table, *self._sizes, rank, brings, *when, code, *out)
        return n

    def _climb(self, rank: int, brings: bool) -> int:
        """As :meth:`find_slices`, for a rank that is in by what was looked at before."""
        table, out = self._table.array, (self._find_path(rank), self._found)
        n: int = self.work.climb(table, *self._sizes, rank, brings, *out)
        return n

    def _find_path(self, rank: int) -> Array:
        """Return the nodes above a rank whose sums are formed."""
        known = self._paths.get(rank)
        if known is None:
            above = () if callable(self.reduce) else path(rank, self.size)
            known = self._paths[rank] = np.array(above, np.int64).reshape(-1)
        return known

    def deliver(
        self,
        tick: Tick,
        arrays: Mapping[int, Array],
        n: int,
        *,
        rows: Mapping[int, RankRows] = _NONE,
        may_apply: bool = True,
        bits: int = words.TICKED,
    ) -> None:
        """Take a rank into the round, which `n` slices of sums meet, as was found.

        The round that it completes is applied, if that may be; else what came is kept.
        Sums are formed at once where all parts of them are gradients of the whole shard
        and that is small, and otherwise lazily, tile by tile. Of `rows`, by the number of
        their table, they are formed when the round is applied.
        """
        code = CODES[tick.kind] if arrays or rows else 0
        if not tick.weight:
            arrays, rows = {}, {}
        slices = self.mailbox.find_slices(self.found, words.SLICES, n) if n else ()
        weight = 0.0
        if self._direct is not None:
            weight = self._direct.weigh(tick, arrays, slices)
        came = Delivery(tick, arrays, slices, code, bits, weight)
        if rows:
            scale = tick.weight if sums.is_mean(tick.kind, self.reduce) else 1.0
            spans = self._arenas.place(self._table, rows, scale)
            came = came._replace(spans=spans)
        if self.found[words.LAST] and may_apply:
            self._apply(came)
        else:
            self._keep(came)

    def _keep(self, came: Delivery) -> None:
        """Keep the sum of what came; put the table in force that has the rank in it."""
        mailbox, tick, n = self.mailbox, came.tick, len(came.slices)
        if came.arrays or n > 1:
            out = mailbox.slice(self.found[words.INTO])
            if came.weight and self._direct is not None:
                self._direct.fill(came, out)
            else:
                weighs = sums.is_mean(tick.kind, self.reduce)
                sums.fill_slice(out, sums.gather(came, weighs, self.found))
        table, other = self._table, mailbox.tables[self._table is mailbox.tables[0]]
        who = tick.rank, came.bits, tick.sequence + 1, came.code, tick.weight
        self.work.join(table.array, other.array, *self._sizes, self._found, n, *who)
        if came.spans:
            other.note_rows(tick.rank, tick.weight, came.spans)
        mailbox.words[TURN] += 1
        self._unticked.pop(tick.rank, None)

    def _apply(self, came: Delivery) -> None:
        """Publish the round that a rank completes, or say why it cannot be."""
        try:
            has_rows = came.spans or self._table.words[words.N_BROUGHT]
            if came.weight and self._direct is not None and not has_rows:
                n_pushes = self._publish_direct(came, self._direct)
            else:
                with np.errstate(all="ignore"):
                    n_pushes = self._completion.publish(self._table, came, self._note)
        except Exception as error:  # noqa: BLE001  (every trainer gets it)
            settle(self._segment)
            if (fail := self._fail()) is not None:
                fail(self.run, error)
            return
        self._header[N_APPLIED] += n_pushes
        self._unticked.clear()

    def _publish_direct(self, came: Delivery, direct: DirectSums) -> int:
        """Publish gradients for all pieces of a small shard; return how many pushed."""
        now, divisor = self._segment.current, 1.0
        counts, words = now.steps, now.factors
        if self.reduce == "mean":
            divisor = came.weight
        rules = enumerate(direct.rules)
        epoch = self._planner.epoch_of
        scalars = [
            r.scalars(
                *(counts.item(p) + 1, None),
                *(epoch() if r.goes_by_epoch else None, words[p]),
            )
            for p, r in rules
        ]
        check, segment = self._checks, self._segment
        if check and segment.n_sides == 1 and any(segment.slot_init):
            # Slots in force are written with the first piece.
            for position in range(len(direct.rules)):
                out = direct.formed[position]
                direct.form(came, position, out, divisor, check=True)
            check = False
        publication = Publication(segment)
        n_pushes = self._note(came, publication.flip)
        for position, rule in enumerate(direct.rules):
            out = direct.formed[position]
            data = direct.form(came, position, out, divisor, check=check)
            publication.update(position, rule, data, scalars[position])
        publication.finish()
        return n_pushes

    def _note(self, came: Delivery, flip: int) -> int:
        """Note the complete round in the record of a flip; return how many pushed."""
        tick, table = came.tick, self._table.array
        who = tick.rank, came.bits, tick.sequence + 1, tick.weight
        record = self._records[flip & 1]
        n: int = self.work.note(record, self._ranks_at, table, self.size, *who)
        return n

    # -- what is not as simple -----------------------------------------------

    def take_step(self, step: Step, may_apply: bool, takes_ticks: bool) -> str:
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
        table, rank = self.find_table(), step.rank
        word = table.ranks[rank]
        state = (
            table.words[words.ROUND],
            bool(word & words.TICKED),
            bool(word & words.FINISHED),
        )
        following = self._unticked.find_next(rank, table)
        verdict = judge_step(step, state, table.next[rank], following)
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
            step = widened(step)
        rows = join_rows(rows, step, self._planner)
        brought = {p - self._n_pieces: of for p, of in rows.items()}
        if step.weight:
            self._arenas.check(table, brought)
        arrays = join_pushes(arrays, step)
        tick = Tick.of(step, kind)
        if step.tick:
            n = self._climb(rank, bool(arrays and step.weight))
            self.deliver(tick, arrays, n, rows=brought, may_apply=may_apply)
        else:
            table.note_pushed(rank, True)
            self._unticked[rank] = Pushed(tick, arrays, rows)
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
            is_own = rank == step.rank or step.kind not in CODES
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
        nothing = Tick(
            self.run, rank, table.words[words.ROUND], after - 1, NOTHING, 0.0
        )
        self.deliver(nothing, {}, n, may_apply=may_apply, bits=words.FINISHED)

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

    def apply_complete(self) -> None:
        """Apply the open round if it was complete before it could be applied."""
        if not self.is_complete:
            return
        found, n = self.found, 0
        if not callable(self.reduce):
            for index, first in enumerate(self._table.first.tolist()):
                if first != words.FREE:
                    at = words.SLICES + 2 * n
                    found[at], found[at + 1] = index, 1
                    n += 1
        slices = self.mailbox.find_slices(found, words.SLICES, n)
        nobody = Tick(self.run, -1, 0, -1, NOTHING, 0.0)
        self._apply(Delivery(nobody, {}, slices))

    # -- checks --------------------------------------------------------------

    @property
    def next_sequences(self) -> list[int]:
        """The next sequence number of every rank."""
        table = self.find_table()
        return [self._unticked.find_next(rank, table) for rank in range(self.size)]
