"""What must hold in a shard between two calls, whatever came before."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from daskps.errors import IllegalStateError
from daskps.kernels.index_probe import SLOTS_0
from daskps.shards.arrays.row_operations import entries_of, flip_of
from daskps.shards.arrays.unbounded_rows import SIDE_ROOM
from daskps.shards.cuts.in_flight import owner_of
from daskps.shards.deputy import OPEN, gate_of
from daskps.shards.memory.format import (
    CHANGED_ROW,
    CLOCK,
    MAX_PRODUCERS,
    MAX_RANKS,
    N_PRODUCERS,
    N_RANKS,
    N_SIDES_AT,
    NEXT,
    POLICY,
    PRODUCER,
    PRODUCER_WORDS,
    RANK_WORDS,
    ROUNDS,
    ROWS_SEQUENCE,
    RUN,
    SIDE,
    VERSION,
)
from daskps.shards.parked import find_outcome
from daskps.shards.rounds.words import FREE
from daskps.shards.run_record import POLICY_CODES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from daskps.shards.arrays.unbounded_rows import UnboundedRows
    from daskps.shards.cuts.cut import Cut
    from daskps.shards.memory.format import Record
    from daskps.shards.memory.segment import Segment
    from daskps.shards.rounds.round import Round
    from daskps.shards.shard import Shard
    from daskps.shards.steps import Ticket


def validate(shard: Shard, *, tables: bool = True) -> None:
    """Raise IllegalStateError with everything that does not hold in a shard.

    Without `tables` their rows are not looked at, which takes longest.
    """
    segment, rounds, cut = shard.segment, shard.round, shard.cut
    stopped = shard.run_state.why_stopped is not None
    wrong = [
        *_words(segment),
        *_sides(segment),
        *(_tables(segment) if tables else ()),
        *_run(segment, rounds, cut, stopped),
        *_tickets(segment, rounds, shard.parked.tickets, shard.last_flip),
        *_cut(segment, rounds, cut),
    ]
    if wrong:
        raise IllegalStateError("; ".join(wrong))


def _words(segment: Segment) -> Iterator[str]:
    record, n = segment.current, int(segment.current.fixed[N_PRODUCERS])
    if segment.writing not in (segment.flip, segment.flip + 1):
        yield f"{segment.writing=} at {segment.flip=}"
    row, other = segment.header[CHANGED_ROW], segment.record(segment.flip + 1)
    whole = segment.writing == segment.flip
    if row and whole and not _equal_but(row, record, other):
        yield f"the records differ in other rows than the one at {row}"
    if (record.changed > segment.flip).any():
        yield "a piece changed in a flip that never was"
    if record.fixed[VERSION] < 0 or (record.steps > record.fixed[VERSION]).any():
        yield "a piece has taken more steps than the shard has versions"
    if not 0 <= n <= MAX_PRODUCERS:
        yield f"{n} producers"
    elif len(set(record.producers[:n, PRODUCER].tolist())) != n:
        yield "a producer has two rows"


def _equal_but(row: int, record: Record, other: Record) -> bool:
    """Return whether the rows of two records are the same but for the one at a word."""
    sizes = [
        RANK_WORDS * record.plain[N_RANKS],
        PRODUCER_WORDS * record.plain[N_PRODUCERS],
    ]
    starts = record.ranks_at, record.start_of(0)
    differ = np.flatnonzero(record.words != other.words)
    return all(
        row <= at < row + PRODUCER_WORDS
        for start, size in zip(starts, sizes, strict=True)
        for at in differ.tolist()
        if start <= at < start + size
    )


def _sides(segment: Segment) -> Iterator[str]:
    """Look at which buffer holds the weights and the slots of each piece."""
    if segment.words[N_SIDES_AT] != 1 + segment.is_durable:
        yield f"a header with {segment.words[N_SIDES_AT]} slot buffers"
    record = segment.current
    if set(record.weight_sides.tolist()) - {0, 1}:
        yield f"weights in buffers {record.weight_sides.tolist()}"
    if record.plain[SIDE] != record.side:
        yield f"weights in buffer {record.side}, where the record says {record.plain[SIDE]}"
    sides = zip(record.slot_sides.tolist(), segment.slot_init, strict=True)
    for position, (side, init) in enumerate(sides):
        if side not in range(segment.n_sides if init else 1):
            yield f"piece {position} has slots in buffer {side}, which it has not"


def _tables(segment: Segment) -> Iterator[str]:
    """Look at what tables say of rows that are being changed."""
    if segment.header[ROWS_SEQUENCE] & 1:
        yield "rows that are being changed, by nobody"
    for table in segment.tables:
        name, word = table.piece.table.name, table.buffers.undo[0]
        if flip_of(word) > segment.flip + 1:
            yield f"table {name!r} has a log of flip {flip_of(word)}"
        if entries_of(word) > table.room:
            yield f"table {name!r} has {entries_of(word)} entries in its log"
        if flip_of(word) == segment.flip + 1 and entries_of(word):
            yield f"table {name!r} has a log that was not rolled back"
        if (unbounded := table.unbounded) is not None:
            yield from _unbounded(name, unbounded)


def _unbounded(name: str, unbounded: UnboundedRows) -> Iterator[str]:
    """Look at whether the index of a table has its rows, and no others."""
    ids, rows = unbounded.index.ids()
    if not len(ids) == len(np.unique(ids)) == unbounded.n_rows <= unbounded.end:
        yield f"table {name!r} has {unbounded.n_rows} rows, of {len(ids)} ids"
    elif (unbounded.find(ids) != rows).any():
        yield f"table {name!r} has an index that leads elsewhere"
    for side in (0, 1):
        slots = int(unbounded.head[SLOTS_0 + side])
        if slots > unbounded.own[SIDE_ROOM + side]:
            yield f"side {side} of the index of table {name!r} has memory for less"
    n, counted = len(unbounded.index.candidates()[0]), unbounded.counts()["candidates"]
    if n != counted:
        yield f"table {name!r} has {n} candidates, and counts {counted}"


def _run(
    segment: Segment, rounds: Round | None, cut: Cut | None, stopped: bool
) -> Iterator[str]:
    fixed, n_ranks = segment.current.fixed, int(segment.current.fixed[N_RANKS])
    if (rounds is not None) != (fixed[POLICY] == POLICY_CODES["bsp"]) and not stopped:
        yield "rounds without a BSP run, or the reverse"
    if bool(fixed[RUN]) != bool(fixed[POLICY]) or bool(fixed[RUN]) != bool(n_ranks):
        yield "half a run"
    if not 0 <= n_ranks <= MAX_RANKS:
        yield f"{n_ranks} ranks"
    if rounds is not None:
        if (segment.current.live[:, CLOCK] != fixed[ROUNDS]).any():
            yield "a live rank is not at the round of its shard"
        if (rounds.next_sequences < segment.current.ranks[:n_ranks, NEXT]).any():
            yield "a rank's next push is older than the last round"
        yield from _round(rounds, cut is None and gate_of(segment) == OPEN)


def nodes_of(rounds: Round) -> list[tuple[int, int]]:
    """Return the ranks [first, last) of the sums and contributions that are held."""
    table = rounds.find_table()
    pairs = zip(table.first.tolist(), table.last.tolist(), strict=True)
    return sorted(pair for pair in pairs if pair[0] != FREE)


def bound_of(rounds: Round) -> int:
    """Return the largest number of them a round may come to."""
    return rounds.size if callable(rounds.reduce) else -(-rounds.size // 2)


def _round(rounds: Round, is_open: bool) -> Iterator[str]:
    nodes, bound = nodes_of(rounds), bound_of(rounds)
    if rounds.is_complete and is_open:
        yield "a complete round was not applied"
    if len(nodes) > bound:
        yield f"a round holds {len(nodes)} sums, {bound} are enough"
    if any(first < last for (_, last), (first, _) in pairwise(nodes)):
        yield f"contributions are in two sums of {nodes}"


def _tickets(
    segment: Segment,
    rounds: Round | None,
    parked: Sequence[Ticket],
    last_flip: int | None,
) -> Iterator[str]:
    is_held = last_flip is not None and segment.flip >= last_flip
    for ticket in parked:
        if ticket.outcome is not None:
            yield "a finished ticket is parked"
        elif ticket.step.run not in (0, segment.current.fixed[RUN]):
            yield "a ticket of another run is parked"
        elif not ticket.applied and rounds is None and not is_held:
            yield "an early step is parked where there are no rounds"
        elif ticket.applied and find_outcome(segment, ticket) is not None:
            yield "a ticket is parked whose wait is over"


def _cut(segment: Segment, rounds: Round | None, cut: Cut | None) -> Iterator[str]:
    if cut is None:
        return
    for ticket in cut.held:
        if ticket.outcome is not None or ticket.applied:
            yield "a cut holds a step that is applied or done"
        elif ticket.step.run not in (0, segment.current.fixed[RUN]):
            yield "a cut holds a step of another run"
        elif (owner_of(ticket.step), ticket.step.sequence) in cut.missing:
            yield "a cut holds a step it waits for"
    if cut.held and rounds is not None:
        yield "a cut holds steps of a BSP run"
    if cut.ticket is not None and (cut.ticket.outcome is None) != bool(cut.missing):
        yield "whoever waits for a cut waits for nothing, or was told too early"
