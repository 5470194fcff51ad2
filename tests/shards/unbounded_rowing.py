"""Shards with unbounded tables, for tests; and a model of what their rows come to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from daskps.init import constant
from daskps.kernels import id_hash
from daskps.layout.arrays import Layout
from daskps.layout.slots import PerRow
from daskps.layout.spans import IDS, ROWS
from daskps.layout.tables import UnboundedIds
from daskps.shards.frozen_rows import copy_all_rows, room_for
from daskps.shards.memory.format import GENERATION, N_PRODUCERS
from daskps.shards.memory.room import Own
from daskps.shards.memory.segment import Segment
from daskps.shards.memory.undo import roll_back
from daskps.shards.reader import RowsRead
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, ASSIGN, GRADIENT, REMOVE, Item, Step, Ticket
from tests.kernels.compiling import kept
from tests.shards.making import copy_rows, copy_rows_locked
from tests.shards.rowing import AddingRows

#: An array, an unbounded table with a rule and one of integers without.
W, EMB, NUM = 0, 1, 2
SLOTS = {W: (0.5,), EMB: (0.25, PerRow(0.25))}
DIMS, FIRST = {EMB: 2, NUM: 1}, {EMB: 3.0, NUM: 7.0}


def layout_of(n_shards: int = 1, room: int = 64, **policy: int) -> Layout:
    return Layout.build(
        {"w": ((n_shards,), "float32")},
        n_shards,
        {
            "emb": (0, 2, "float32", UnboundedIds(constant(3.0), 5, room, **policy)),
            "num": (0, 1, "int64", UnboundedIds(constant(7.0), 5, room, **policy)),
        },
    )


def made(layout: Layout, shard: int = 0, buffer: Any = None) -> Shard:
    segment = Segment(layout, shard, SLOTS, buffer, durable=True)
    segment.words[GENERATION], segment.memory = 1, Own()
    rules: Any = {W: AddingRows(), EMB: AddingRows()}
    return Shard(segment, rules, cache_dir=kept())


def item(shard: Shard, index: int, pairs: Sequence[tuple[int, int]]) -> Item:
    """The rows of some pairs (id, value) that are this shard's."""
    n = len(shard.segment.pieces)
    position = next(
        n + i
        for i, table in enumerate(shard.segment.tables)
        if table.piece.table.index == index
    )
    piece: Any = shard.segment.tables[position - n].piece
    table = piece.table
    ids = np.array([i for i, _ in pairs], np.int64)
    found = id_hash.buckets(ids, table.hash_seed, table.n_buckets)
    mine = (piece.first_bucket <= found) & (found < piece.stop_bucket)
    values = np.array([v for _, v in pairs], table.dtype)[mine]
    return Item(position, 0, np.repeat(values, DIMS[index]), ids[mine])


def step(shard: Shard, kind: str, named: Any, sequence: int, **said: Any) -> Step:
    """A push to tables: by index of the table its pairs."""
    items = [item(shard, index, pairs) for index, pairs in named.items()]
    if kind == REMOVE:
        items = [one._replace(data=one.data[:0]) for one in items]
    return Step(kind, items, producer=1, sequence=sequence, **said)


def read(
    shard: Shard, index: int, ids: Sequence[int], flip: int | None = None
) -> dict[int, Any] | None:
    """Rows that there are, by id; under the lock where a flip is asked for."""
    at = item(shard, index, ()).position
    table = shard.segment.tables[at - len(shard.segment.pieces)]
    out = np.full((len(ids), table.piece.table.dim), -1, table.rows.dtype)
    found = np.full(len(ids), 9, np.uint8)
    wanted = [RowsRead(at, np.array(ids, np.int64), out.reshape(-1), None, found)]
    if flip is None:
        assert copy_rows(shard.segment, shard.segment.flip, wanted)
    elif not copy_rows_locked(shard.segment, flip, wanted):
        return None
    assert set(found.tolist()) <= {0, 1}
    assert (out[found == 0] == -1).all()
    pairs = zip(ids, out.tolist(), found.tolist(), strict=True)
    return {i: row for i, row, there in pairs if there}


class Model:
    """What pushes come to: a dict for each table, one row at a time."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[int, float]] = {EMB: {}, NUM: {}}
        self.slots: dict[int, float] = {}
        self.steps = {EMB: 0, NUM: 0}

    def push(self, kind: str, named: dict[int, list[tuple[int, int]]]) -> None:
        for index, pairs in named.items():
            self.steps[index] += kind == GRADIENT
            sums: dict[int, int] = {}
            for i, value in pairs:
                sums[i] = value if kind == ASSIGN else sums.get(i, 0) + value
            rows = self.rows[index]
            if kind == REMOVE:
                for i in sums:
                    rows.pop(i, None)
                    if index == EMB:
                        self.slots.pop(i, None)
                continue
            for i, value in sums.items():
                now = rows.get(i, FIRST[index])
                if index == EMB:
                    self.slots.setdefault(i, 0.25)
                if kind == GRADIENT:
                    rows[i] = now + value * self.steps[index]
                    self.slots[i] += self.steps[index]
                else:
                    rows[i] = value if kind == ASSIGN else now + value

    def of(self, index: int) -> dict[int, list[float]]:
        return {i: [v] * DIMS[index] for i, v in self.rows[index].items()}


def slots_of(shard: Shard) -> dict[int, list[float]]:
    """The slot of each row of the table that has one."""
    table = shard.segment.tables[0]
    assert table.unbounded is not None
    ids, rows = table.unbounded.ids(table.since(shard.segment.current))
    whole, of_row = (slot[rows] for slot in table.slots)
    assert (whole == of_row).all()
    return dict(zip(ids.tolist(), whole.tolist(), strict=True))


def all_rows(segment: Segment, position: int) -> tuple[Any, Any]:
    """The ids of an unbounded table, ascending, and their rows; under the lock."""
    roll_back(segment)
    copies = copy_all_rows(segment, segment.flip, [room_for(segment, position, 0)])
    assert copies is not None
    return copies[0].areas[IDS].reshape(-1), copies[0].areas[ROWS]


def in_force(shard: Shard) -> bytes:
    """All that is in force, as bytes; what rows hold that are nobody's is not."""
    segment, found = shard.segment, b""
    for position, table in enumerate(segment.tables, len(segment.pieces)):
        assert table.unbounded is not None
        ids, rows = all_rows(segment, position)
        lowest = table.since(segment.current)
        _, numbers = table.unbounded.ids(lowest)
        candidates, counts = table.unbounded.index.candidates()
        found += (
            ids.tobytes() + rows.tobytes() + table.unbounded.state[numbers].tobytes()
        )
        found += candidates.tobytes() + counts.tobytes()
        found += repr(table.unbounded.counts(lowest)).encode()
        found += b"".join(slot[numbers].tobytes() for slot in table.slots)
    record = segment.current
    found += record.producers[: record.plain[N_PRODUCERS]].tobytes()
    found += b"".join(
        segment.weights_of(record, p).tobytes()
        + segment.slots_of(record, p)[0].tobytes()
        for p in range(len(segment.pieces))
    )
    return found + record.fixed.tobytes()


KINDS = (GRADIENT, ADD, ASSIGN, REMOVE)


def send(shard: Shard, *steps: Step) -> list[Ticket]:
    tickets = [Ticket(one) for one in steps]
    shard.submit(tickets)
    return tickets
