"""Pushes that are updates of their own: outside a run, and under ASP and SSP.

They are applied one after the other and never summed; those that queued up share one
pass over memory and become visible together. A push that is refused for its
generation or its run never comes here: `Shard.submit` looks first.
"""

from __future__ import annotations

import contextlib
import math
from functools import cached_property
from typing import TYPE_CHECKING

from daskps.errors import PushRejectedError, StaleGenerationError
from daskps.optim.factors import of_word, to_word
from daskps.shards import producers, run_record
from daskps.shards.arrays import by_function
from daskps.shards.deputy import NotHereError
from daskps.shards.memory.format import (
    DELAYS,
    FLIP,
    N_APPLIED,
    N_DROPPED,
    N_DUPLICATES,
    VERSION,
)
from daskps.shards.memory.growth import OwnerOnlyError, make_room
from daskps.shards.memory.publication import Publication, checks, is_large
from daskps.shards.memory.undo import roll_back
from daskps.shards.steps import GRADIENT, NOTHING, SCALE, Step, Ticket

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.shards.cuts.in_flight import InFlight
    from daskps.shards.memory.format import Record
    from daskps.shards.memory.growth import Operations
    from daskps.shards.memory.segment import Segment
    from daskps.shards.planning import UpdatePlanner


class Pushes:
    """Applies pushes on arrival.

    Parameters
    ----------
    segment : Segment
        The memory.
    planner : UpdatePlanner
        Makes operations of arrays.
    in_flight : InFlight
        Takes what steps say for cuts.
    """

    def __init__(
        self, segment: Segment, planner: UpdatePlanner, in_flight: InFlight
    ) -> None:
        self._segment = segment
        self._planner = planner
        self._in_flight = in_flight
        self._is_large = is_large(segment)

    def apply(self, tickets: Sequence[Ticket]) -> None:
        """Apply the pushes of some tickets, in order, in one publication if possible."""
        segment, alone = self._segment, len(tickets) == 1
        publication: Publication | None = None
        new: list[Ticket] = []
        for ticket in tickets:
            if publication is not None and self._follows(ticket.step, new[-1].step):
                self._commit(publication, new)
                publication, new = None, []
            planned = self._planned(ticket, publication, alone=alone)
            if planned is None:
                continue
            if (
                publication is not None
                and segment.tables
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
                publication = Publication(segment)
                publication.row = max(ticket.row, 0)
            else:
                publication.row = 0
            self._note(ticket, publication.record)
            publication.add(planned)
            if planned or ticket.step.kind == SCALE:
                publication.record.plain[VERSION] += 1
            ticket.version = publication.record.plain[VERSION]
            new.append(ticket)
        if publication is not None:
            self._commit(publication, new)

    @cached_property
    def _has_functions(self) -> bool:
        """Whether any rule is one of whole arrays; looked up once, and not by each push."""
        positions = range(len(self._segment.pieces))
        return by_function.are_called(map(self._planner.binding, positions))

    def _follows(self, step: Step, last: Step) -> bool:
        """Return whether a push needs what those before it leave, as it is in force."""
        if SCALE in (step.kind, last.kind):
            return True
        if step.kind != GRADIENT or not self._has_functions:
            return False
        pieces = [position for position, *_ in step.items]
        return by_function.are_called(map(self._planner.binding, pieces))

    def _planned(
        self, ticket: Ticket, publication: Publication | None, *, alone: bool
    ) -> Operations | None:
        """Plan the update of one push; None where it is a repeat or is refused.

        Whatever can be wrong with it is found here, and nothing is written; where none
        is under way that it could join, there is room for its rows.
        """
        segment, step = self._segment, ticket.step
        now = segment.records[segment.header[FLIP] & 1]
        record = publication.record if publication else now
        ticket.version = record.plain[VERSION]
        try:
            find_new = run_record.find_new if step.run else producers.find_new
            row = ticket.row = find_new(record, step)
            if row < 0:
                if _repeats(step, record):
                    ticket.duplicate = True
                    segment.header[N_DUPLICATES] += 1
                    return None
                ticket.delay = run_record.find_delay(record, step)
                if ticket.delay >= 0:
                    counts = run_record.dampen(record, step, ticket.delay)
                    ticket.dropped = counts is None
                    step = counts or step
            if step.kind == SCALE:
                planned: Operations = []
                _scaled(record, step)
            else:
                # Else the others would be refused with it.
                may = step.check and self._is_large
                fused = may and alone and checks(segment, step.items)
                planned = self._planner.plan(step, record, fused=fused, alone=alone)
            if ticket.dropped:
                planned = []  # it was fine, as an error should not depend on its age
            if row < 0 and not step.run:
                producers.check_room(record, step.producer)
            if segment.has_unbounded and publication is None:
                make_room(segment, planned)
        except OwnerOnlyError:
            ticket.outcome = NotHereError()
            return None
        except Exception as error:  # noqa: BLE001  (it is this ticket's answer)
            ticket.outcome = error
            return None
        return planned

    def _note(self, ticket: Ticket, record: Record) -> None:
        """Note a planned push, and what it leads to beside its operations, in a record."""
        step, row = ticket.step, ticket.row
        if step.run:
            at = run_record.find_row(record, step.rank) if row < 0 else row
            run_record.note_step(record, at, step)
        else:
            producers.note_push(record, step, row)
        if step.touched is not None or self._in_flight.targets:
            self._in_flight.note(step)
        if step.kind == SCALE:
            for position, word in _scaled(record, step).items():
                record.factors[position] = word

    def _commit(self, publication: Publication, new: Sequence[Ticket]) -> None:
        """Put pushes in force, and count them, or those that were too old for that."""
        try:
            publication.commit()
        except Exception as error:  # noqa: BLE001  (it is these tickets' answer)
            for ticket in new:
                ticket.outcome = error
            # A device that has ended takes nothing back: its shard is lost.
            with contextlib.suppress(StaleGenerationError):
                roll_back(self._segment)
            return
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
