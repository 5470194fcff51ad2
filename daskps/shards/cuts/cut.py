"""A cut: a moment at which all shards contain the same steps of every producer.

A shard that begins a cut holds every new step and reports what it has applied. From
the reports of all shards follows what each of them lacks: the steps that another
shard has applied and that are meant for this one too. It lets exactly those through;
when it has them all, its weights belong to the cut. Steps that were answered are in no
doubt, since an answer needs all shards, and neither are steps that were given up.

In a BSP run nothing need be held: the shards stop completing rounds, and each serves
the last round that all of them have completed.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from daskps.errors import ConsistencyError, ProducerExpiredError
from daskps.shards import producers
from daskps.shards.cuts.in_flight import InFlight, owner_of
from daskps.shards.memory.format import (
    CLOSED,
    HIGH,
    LIVE,
    MEANT,
    N_PRODUCERS,
    N_RANKS,
    NEXT,
    POLICY,
    PRODUCER,
    RANK_FLOOR,
    ROUNDS,
    RUN,
    SEEN,
    Record,
    Words,
)
from daskps.shards.memory.format import FLOOR as SETTLED
from daskps.shards.parked import flip_of_round
from daskps.shards.producers import WINDOW
from daskps.shards.run_record import POLICY_CODES
from daskps.shards.steps import Intervals, Ready, Ticket, changes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from daskps.shards.memory.segment import Segment

#: Name of a cut and number of the attempt, or any other that is told from others.
CutName = Hashable
#: Owner and sequence number of a step.
StepId = tuple[int, int]
#: Columns of a report's rows, one row per owner.
OWNER, NEWEST, APPLIED, FLOOR = range(4)
_BITS = (1 << WINDOW) - 1


@dataclass(frozen=True, slots=True)
class ShardReport:
    """The progress that one shard has made when a cut begins."""

    shard: int
    run: int = 0
    #: Rounds completed in a BSP run, -1 where none is in progress.
    rounds: int = -1
    #: Per owner its newest step, a bit for each of the 64 up to it, and its floor.
    rows: Words = field(default_factory=lambda: np.empty((0, 4), np.int64))
    #: Owner, sequence number and shards of steps that are not meant for all shards.
    touched: Sequence[tuple[int, int, Intervals]] = ()


@dataclass(frozen=True, slots=True)
class Order:
    """The state a shard must reach: some steps applied, or a round of a BSP run."""

    missing: tuple[StepId, ...] = ()
    run: int = 0
    rounds: int = -1


def report(shard: int, segment: Segment, in_flight: InFlight) -> ShardReport:
    """Return what a shard has applied, as far as it can be in doubt."""
    record = segment.current
    run, rounds = int(record.fixed[RUN]), int(record.fixed[ROUNDS])
    if record.fixed[POLICY] == POLICY_CODES["bsp"]:
        return ShardReport(shard, run, rounds)
    rows = np.concatenate([_producer_rows(record), _rank_rows(record)])
    return ShardReport(shard, run, -1, rows, (*_newest(record), *in_flight.touched()))


def _newest(record: Record) -> Iterable[tuple[int, int, Intervals]]:
    """Give the newest pushes that are not meant for all shards.

    A process that took the shard over from another one knows of no others.
    """
    known = record.producers[: record.fixed[N_PRODUCERS]]
    for row in known[(known[:, CLOSED] == 0) & (known[:, MEANT] != 0)]:
        yield int(row[PRODUCER]), int(row[HIGH]), producers.find_targets(row) or ()


def _producer_rows(record: Record) -> Words:
    known = record.producers[: record.fixed[N_PRODUCERS]]
    rows: Words = known[known[:, CLOSED] == 0][:, [PRODUCER, HIGH, SEEN, SETTLED]]
    # Further back a step cannot be told from a repeat, and is applied no more.
    rows[:, FLOOR] = np.maximum(rows[:, FLOOR], rows[:, NEWEST] - WINDOW + 1)
    return rows


def _rank_rows(record: Record) -> Words:
    """Return rows of the trainers, each of which sends one step after the other."""
    ranks = record.ranks[: record.fixed[N_RANKS]]
    rows = np.empty((len(ranks), 4), np.int64)
    rows[:, OWNER] = -1 - np.arange(len(ranks))
    rows[:, NEWEST] = ranks[:, NEXT] - 1
    rows[:, APPLIED] = -1
    # A trainer that has finished has heard of all its steps, or given them up.
    rows[:, FLOOR] = np.maximum(ranks[:, RANK_FLOOR], ranks[:, NEXT] - ranks[:, LIVE])
    return rows


def agree(reports: Sequence[ShardReport]) -> dict[int, Order]:
    """Return what each shard must reach for all to contain the same steps.

    Raises
    ------
    ConsistencyError
        While a run begins or ends on one shard after the other.
    """
    if len({(r.run, r.rounds < 0) for r in reports}) > 1:
        raise ConsistencyError("a run has begun or ended on some of the shards only")
    if reports and reports[0].rounds >= 0:
        last = min(r.rounds for r in reports)
        return {r.shard: Order((), r.run, last) for r in reports}
    missing: dict[int, list[StepId]] = {r.shard: [] for r in reports}
    touched = {(o, s): of for r in reports for o, s, of in r.touched}
    for owner, rows in _in_doubt(reports):
        for sequence in _applied_anywhere(rows.values()):
            meant = touched.get((owner, sequence))
            for shard, of in missing.items():
                if (meant is None or _contains(meant, shard)) and not _has(
                    rows.get(shard), sequence
                ):
                    of.append((owner, sequence))
    return {shard: Order(tuple(of)) for shard, of in missing.items()}


def _in_doubt(
    reports: Sequence[ShardReport],
) -> Iterable[tuple[int, Mapping[int, Sequence[int]]]]:
    """Give each owner of which shards may differ, and its row by shard.

    Found in NumPy, for there are as many rows as owners times shards: an owner whose
    newest step is the only one in doubt, and is everywhere, is left out.
    """
    shards = np.repeat([r.shard for r in reports], [len(r.rows) for r in reports])
    rows = np.concatenate([r.rows for r in reports]) if reports else np.empty((0, 4))
    owners, at, n = np.unique(rows[:, OWNER], return_inverse=True, return_counts=True)
    newest = np.full(len(owners), np.iinfo(np.int64).min)
    oldest, floor = np.full(len(owners), np.iinfo(np.int64).max), newest.copy()
    np.maximum.at(newest, at, rows[:, NEWEST])
    np.minimum.at(oldest, at, rows[:, NEWEST])
    np.maximum.at(floor, at, rows[:, FLOOR])
    settled = (floor > newest) | (
        (floor == newest) & (oldest == newest) & (n == len(reports))
    )
    for i in np.flatnonzero(~settled).tolist():
        chosen = np.flatnonzero(at == i)
        found = rows[chosen]
        found[:, FLOOR] = floor[i]
        of = zip(shards[chosen].tolist(), found.tolist(), strict=True)
        yield int(owners[i]), dict(of)


def _applied_anywhere(rows: Iterable[Sequence[int]]) -> list[int]:
    rows = list(rows)
    newest, floor = max(row[NEWEST] for row in rows), rows[0][FLOOR]
    first = max(floor, newest - WINDOW + 1, 0)
    return [s for s in range(first, newest + 1) if any(_has(row, s) for row in rows)]


def _has(row: Sequence[int] | None, sequence: int) -> bool:
    if row is None or sequence > row[NEWEST]:
        return False
    behind = row[NEWEST] - sequence
    return behind < WINDOW and bool((row[APPLIED] & _BITS) >> behind & 1)


def _contains(meant: Intervals, shard: int) -> bool:
    return any(start <= shard < stop for start, stop in meant)


class Cut:
    """A cut in progress in one shard.

    Parameters
    ----------
    name : CutName
        The name of the cut.
    """

    def __init__(self, name: CutName) -> None:
        self.name = name
        #: Steps that wait for the cut, in the order in which they came.
        self.held: list[Ticket] = []
        #: The ticket of the cut itself, which waits for the shard to reach it.
        self.ticket: Ticket | None = None
        self._order = Order()
        #: The floors that it has heard of, also of owners that have no row here.
        self._floors: dict[int, int] = {}
        #: Steps of the order that are still to be applied.
        self.missing: set[StepId] = set()

    def holds(self, ticket: Ticket, segment: Segment) -> bool:
        """Keep a step that must wait for the cut; return whether it must."""
        step, record = ticket.step, segment.current
        if not changes(step) or record.fixed[POLICY] == POLICY_CODES["bsp"]:
            return False
        owner = owner_of(step)
        if (owner, step.sequence) in self.missing:
            return False
        if has_applied(record, owner, step.sequence):
            return False
        # It may say that a step the cut waits for was given up.
        self.acknowledge(owner, step.floor)
        self.held.append(ticket)
        return True

    def cancel(self, gone: Collection[int]) -> None:
        """Forget held steps, by the ids of their tickets."""
        self.held = [t for t in self.held if id(t) not in gone]

    def follow(self, order: Order, ticket: Ticket, in_flight: InFlight) -> None:
        """Let the steps of an order through; `ticket` is done when all are applied."""
        self.ticket, self._order = ticket, order
        for owner in {owner for owner, _ in order.missing}:
            self._floors[owner] = max(
                in_flight.floor(owner), self._floors.get(owner, 0)
            )
        self.missing = {(o, s) for o, s in order.missing if s >= self._floors[o]}

    def mark_lost(self, owners: Iterable[int]) -> None:
        """Wait for the steps of some owners no longer."""
        gone = set(owners)
        self.missing = {(o, s) for o, s in self.missing if o not in gone}

    def acknowledge(self, owner: int, floor: int) -> None:
        """Wait no longer for steps that were given up."""
        self._floors[owner] = max(floor, self._floors.get(owner, 0))
        self.missing = {(o, s) for o, s in self.missing if o != owner or s >= floor}

    def advance(self, segment: Segment) -> list[Ticket]:
        """Return the ticket once the shard has reached the cut."""
        if self.ticket is None or self.ticket.outcome is not None:
            return []
        record, order = segment.current, self._order
        self.missing = {m for m in self.missing if not has_applied(record, *m)}
        if self.missing:
            return []
        if order.run:
            self.ticket.outcome = _of_round(segment, order)
        else:
            self.ticket.outcome = Ready(segment.flip, record.version)
        return [self.ticket]

    def stop(self, error: Exception) -> list[Ticket]:
        """End the wait for the cut with an error."""
        if self.ticket is None or self.ticket.outcome is not None:
            return []
        self.ticket.outcome = error
        return [self.ticket]


def broken(why: str) -> ConsistencyError:
    """Return what a cut ends with that must start again."""
    return ConsistencyError(f"the cut must start again: {why}")


def has_applied(record: Record, owner: int, sequence: int) -> bool:
    """Return whether a step was applied, or is too old to be ever applied."""
    if owner < 0:
        rank = -1 - owner
        return rank < record.fixed[N_RANKS] and bool(
            sequence < record.ranks[rank, NEXT]
        )
    try:
        return producers.repeats(record, owner, sequence)
    except ProducerExpiredError:
        return True


def _of_round(segment: Segment, order: Order) -> Ready | Exception:
    flip = flip_of_round(segment, order.run, order.rounds)
    if flip is None:
        return broken(f"round {order.rounds} of run {order.run} is gone")
    return Ready(flip, segment.record(flip).version)
