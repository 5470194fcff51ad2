"""Pushes that are updates of their own: outside a run, and under ASP and SSP.

They are applied one after the other and never summed; those that queued up share one
pass over memory and become visible together. A push that is refused for its
generation or its run never comes here: `Shard.submit` looks first.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

from daskps.errors import PushRejectedError
from daskps.optim.factors import of_word, to_word
from daskps.shards import producers, run_record
from daskps.shards.arrays import by_function
from daskps.shards.arrays.counting import count
from daskps.shards.deputy import NotHereError
from daskps.shards.memory.format import (
    DELAYS,
    N_APPLIED,
    N_DROPPED,
    N_DUPLICATES,
    POLICY,
    ROWS_SEQUENCE,
    VERSION,
)
from daskps.shards.memory.growth import OwnerOnlyError, make_room
from daskps.shards.memory.publication import Publication, is_large, looks
from daskps.shards.memory.undo import settle
from daskps.shards.run_record import CODES
from daskps.shards.steps import (
    ADD,
    ASK,
    ASSIGN,
    GRADIENT,
    NOTHING,
    SCALE,
    Step,
    Tick,
    Ticket,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.shards.arrays.planning import Operations, UpdatePlanner
    from daskps.shards.cuts.floors import Floors
    from daskps.shards.memory.format import Record
    from daskps.shards.memory.segment import Segment
    from daskps.shards.steps import Item
    from daskps.typing import Array

_IN_ROUNDS = CODES["bsp"]


class Pushes:
    """Applies pushes on arrival.

    Parameters
    ----------
    segment : Segment
        The memory.
    planner : UpdatePlanner
        Makes operations of arrays.
    floors : Floors
        Takes what steps say for cuts.
    """

    def __init__(
        self, segment: Segment, planner: UpdatePlanner, floors: Floors
    ) -> None:
        self._segment = segment
        self._planner = planner
        self._floors = floors
        self._is_large = is_large(segment)

    def try_step(
        self,
        tick: Tick,
        arrays: Mapping[int, Array],
        rows: Sequence[Item] = (),
        *,
        check: bool = False,
    ) -> int:
        """Apply one push that nothing is to be said against, as most are.

        Returns
        -------
        int
            The version that it leads to; ASK for any other: nothing was changed.
        """
        old = self._segment.current
        if (row := self._find_row(old, tick, arrays, rows)) < 0:
            return ASK
        try:
            planned = self._planner.whole(tick, arrays, old.steps)
            of_rows: Operations = []
            if rows:
                of_rows = self._planner.rows(tick, rows, old.steps, check=check)
            if of_rows and self._segment.has_any_ids:
                make_room(self._segment, of_rows)
        except Exception:  # noqa: BLE001  (a ticket gets the reason)
            return ASK
        if planned is None:
            return ASK
        publication = Publication(self._segment)
        publication.row = row
        record = publication.record
        if tick.run:
            run_record.note_step(record, row, tick, tick=True)
        else:
            producers.note_new(record, row, tick)
        self._floors.note(tick)
        changes = bool(planned) or bool(of_rows)
        record.plain[VERSION] = version = old.plain[VERSION] + changes
        if of_rows and not self._write_rows(of_rows, publication):
            return ASK
        if planned:
            publication.take_along(len(planned))
        for position, rule, data, scalars in planned:
            publication.update(position, rule, data, scalars)
        publication.finish()
        self._segment.header[N_APPLIED] += tick.kind != NOTHING
        return version

    def _find_row(
        self,
        old: Record,
        tick: Tick,
        arrays: Mapping[int, Array],
        rows: Sequence[Item],
    ) -> int:
        """Return where the row of a push begins that is as simple; -1 for any other."""
        segment = self._segment
        if old.plain[POLICY] == _IN_ROUNDS or (arrays and self._is_large):
            return -1
        if segment.header[ROWS_SEQUENCE] & 1:  # who came before died at rows
            return -1
        is_simple = tick.kind == GRADIENT or (
            tick.kind in (ADD, ASSIGN) if rows else tick.run
        )
        if not is_simple:
            return -1
        if tick.run:
            return run_record.find_new(old, tick)
        return producers.find_new(old, tick.producer, tick.sequence)

    def _write_rows(self, planned: Operations, publication: Publication) -> bool:
        """Update rows; return whether they were fine.

        Else they are as they were, and a ticket gets the reason.
        """
        publication.add(planned)
        count(planned, publication.record.steps)
        try:
            publication.write_rows()
        except Exception:  # noqa: BLE001  (a ticket gets the reason)
            settle(self._segment)
            return False
        return True

    def apply(self, tickets: Sequence[Ticket]) -> None:
        """Apply the pushes of some tickets, in order, in one publication."""
        changing = [t for t in tickets if run_record.changes(t.step)]
        publication: Publication | None = None
        new: list[Ticket] = []
        for ticket in changing:
            if publication is not None and (
                SCALE in (ticket.step.kind, new[-1].step.kind)
                or (self._has_functions and self._calls_function(ticket.step))
            ):
                # As those before it leave them.
                self._commit(publication, new)
                publication, new = None, []
            planned = self._planned(ticket, publication, alone=len(changing) == 1)
            if planned is None:
                continue
            if (
                publication is not None
                and self._segment.tables
                and not publication.has_room(planned)
            ):
                self._commit(publication, new)
                publication, new = None, []
                # Had that come to nothing, this push would be another step.
                planned = self._planned(ticket, None, alone=False)
                if planned is None:
                    continue
            if publication is None:
                # Not for a repeat or a refusal: it overwrites the record before the
                # one in force, which somebody may be reading from.
                publication = Publication(self._segment)
            self._take(ticket, planned, publication)
            new.append(ticket)
        if publication is not None:
            self._commit(publication, new)
        for ticket in tickets:
            ticket.applied = ticket.outcome is None

    @cached_property
    def _has_functions(self) -> bool:
        """Whether any rule is one of whole arrays; looked up once, and not by each push."""
        positions = range(len(self._segment.pieces))
        return by_function.are_called(map(self._planner.binding, positions))

    def _calls_function(self, step: Step) -> bool:
        """Return whether a step leads to what is made of the weights in force."""
        pieces = [p for p, *_ in step.items] if step.kind == GRADIENT else []
        return by_function.are_called(map(self._planner.binding, pieces))

    def _planned(
        self, ticket: Ticket, publication: Publication | None, *, alone: bool
    ) -> Operations | None:
        """Plan the update of one push; None where it is a repeat or is refused.

        Whatever can be wrong with it is found here, and nothing is written; where none is
        under way that it could join, there is room for its rows.
        """
        record = publication.record if publication else self._segment.current
        step = ticket.step
        ticket.version = record.version
        try:
            if _repeats(step, record):
                ticket.duplicate = True
                self._segment.header[N_DUPLICATES] += 1
                return None
            ticket.delay = run_record.find_delay(record, step)
            if ticket.delay >= 0:
                counts = run_record.dampen(record, step, ticket.delay)
                ticket.dropped = counts is None
                step = counts or step
            # Else the others would be refused with it.
            fused = step.check and alone and looks(self._segment, step.items)
            if step.kind == SCALE:
                planned = []
                _scaled(record, step)
            else:
                looked = {"fused": fused, "alone": alone}
                planned = self._planner.step(step, record.steps, **looked)
            if ticket.dropped:
                planned = []  # it was fine, as an error should not depend on its age
            if not step.run and producers.lacks_room(record, step.producer):
                raise producers.no_room(record)
            if self._segment.has_any_ids and publication is None:
                make_room(self._segment, planned)
        except OwnerOnlyError:
            ticket.outcome = NotHereError()
            return None
        except Exception as error:  # noqa: BLE001  (it is this ticket's answer)
            ticket.outcome = error
            return None
        return planned

    def _take(
        self, ticket: Ticket, planned: Operations, publication: Publication
    ) -> None:
        """Make a planned push part of a publication."""
        step, record = ticket.step, publication.record
        _note(step, record)
        self._floors.note(step)
        publication.add(planned)
        count(planned, record.steps)
        changes = bool(planned)
        if step.kind == SCALE:
            for position, word in _scaled(record, step).items():
                record.factors[position] = word
            changes = True
        ticket.version = record.plain[VERSION] = record.version + changes

    def _commit(self, publication: Publication, new: Sequence[Ticket]) -> None:
        try:
            publication.commit()
        except Exception as error:  # noqa: BLE001  (it is these tickets' answer)
            settle(self._segment)
            for ticket in new:
                ticket.outcome = error
        else:
            self._count(new)

    def _count(self, new: Sequence[Ticket]) -> None:
        """Count pushes that have taken effect, or were too old for that."""
        header = self._segment.header
        for ticket in new:
            if ticket.delay >= 0:
                header[DELAYS + run_record.delay_bucket(ticket.delay)] += 1
            if ticket.dropped:
                header[N_DROPPED] += 1
            else:
                header[N_APPLIED] += ticket.step.kind != NOTHING


def _scaled(record: Record, step: Step) -> dict[int, int]:
    """Return the factors of learning rates that a step leads to, as words."""
    found, times = dict[int, int](), step.lr or 0.0
    for position, *_ in step.items:
        before = of_word(record.factors[position])
        if not 0 < before * times < math.inf:
            raise PushRejectedError(
                f"a learning rate is {before:g} times that of its optimizer, and times "
                f"{times:g} no number is left of it; nothing was changed"
            )
        found[position] = to_word(before * times)
    return found


def _repeats(step: Step, record: Record) -> bool:
    if step.run:
        return run_record.repeats(record, step)
    return producers.repeats(record, step.producer, step.sequence)


def _note(step: Step, record: Record) -> None:
    if step.run:
        at = run_record.find_row(record, step.rank)
        run_record.note_step(record, at, step, tick=step.tick)
    else:
        producers.note_push(
            record,
            step.producer,
            step.sequence,
            floor=step.floor,
            meant=step.touched,
            given_up=step.given_up,
        )
