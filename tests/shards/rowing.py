"""Shards with tables, for tests; and a model of what their rows come to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from daskps.layout.arrays import Layout
from daskps.layout.slots import PerRow
from daskps.shards.memory.format import GENERATION, N_PRODUCERS, N_RANKS
from daskps.shards.memory.segment import Segment
from daskps.shards.reader import RowsRead
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, ASSIGN, GRADIENT, Item, Step, Ticket
from tests.invariants import validate
from tests.shards.making import copy_rows, copy_rows_locked

#: An array, a table with a rule and one of integers without; indices in this order.
W, EMB, NUM = 0, 1, 2
LAYOUT = Layout.build(
    {"w": ((6,), "float32")},
    1,
    {"emb": (40, 3, "float32"), "num": (7, 2, "int64")},
)
SLOTS = {W: (0.5,), EMB: (0.25, PerRow(0.25))}


class AddingRows:
    """A rule that adds the gradient times its number; its slots add up these numbers."""

    goes_by_epoch = False
    ranks = 0

    def scalars(
        self, step: int, lr: float | None, epoch: int | None, factor: int = 0
    ) -> tuple[float, ...]:
        if lr == 0.25:
            raise ArithmeticError("this prepare raises")
        return (float(step),)

    def is_finite(self, g: Any) -> bool:
        return bool(np.isfinite(g).all())

    def inplace(self, w, g, slots, scalars):
        w += g * np.float32(scalars[0])
        for slot in slots:
            slot += np.float32(scalars[0])

    def publish(
        self, w_in, w_out, g, slots, scalars, slots_out=None, *, past=False, check=False
    ):
        if check and not self.is_finite(g):
            return False
        w_out[:] = w_in + g * np.float32(scalars[0])
        for slot, out in zip(slots, slots_out or slots, strict=True):
            out[:] = slot + np.float32(scalars[0])
        return True

    def fixed(self, w_in, w_out, slots, slots_out=None):
        return lambda g, scalars: self.publish(
            w_in, w_out, g, slots, scalars, slots_out
        )

    def fixed_rows(self, table, log):
        def update(ids, at, g, scalars, base, begin, check):
            place = log._replace(base=base, begin=begin)
            return self.rows(table, ids, at, g, scalars, place, check=check)

        return update

    def rows(self, table, ids, at, g, scalars, log, *, check=False):
        for k, row in enumerate(ids - table.first):
            data, entry = g[k if at is None else at[k]], log.begin + k
            if check and not self.is_finite(data):
                return False
            log.rows[entry] = row
            for array, kept in zip(
                (table.w, *table.slots), (log.w, *log.slots), strict=True
            ):
                kept[entry] = array[row]
            log.word[0] = log.base + entry + 1
            self.inplace(table.w[row], data, [s[row] for s in table.slots], scalars)
        return True


def make(
    layout: Layout = LAYOUT,
    index: int = 0,
    slots: Any = None,
    rules: Any = None,
    **kwargs: Any,
) -> Shard:
    """A shard whose rows begin with 100 times their id, plus the column."""
    segment = Segment(layout, index, SLOTS if slots is None else slots, **kwargs)
    segment.words[GENERATION] = 1
    for table in segment.tables:
        first = table.piece.first_row
        ids = np.arange(first, first + table.piece.n_rows)
        table.rows[:] = 100 * ids[:, None] + np.arange(table.piece.table.dim)
    if rules is None:
        rules = {W: AddingRows(), EMB: AddingRows()}
    return Shard(segment, rules)


def position(shard: Shard, index: int) -> int:
    """Where a parameter or a table is in a shard."""
    segment = shard.segment
    found = [piece.parameter.index for piece in segment.pieces]
    found += [table.piece.table.index for table in segment.tables]
    return found.index(index)


def rows(
    shard: Shard, index: int, ids: Sequence[int], data: Any, at: Any = None
) -> Item:
    """An item of rows; a number stands for rows full of it."""
    ordinal = position(shard, index) - len(shard.segment.pieces)
    piece = shard.segment.tables[ordinal].piece
    n = len(ids) if at is None else int(max(at, default=-1)) + 1
    dtype = piece.table.dtype
    full = np.empty((n, piece.table.dim), dtype)
    full[:] = np.asarray(data, dtype).reshape(
        (-1, 1) if np.ndim(data) == 1 else np.shape(data)
    )
    numbers = None if at is None else np.array(at, np.int64)
    given = np.array(ids, np.int64)
    return Item(position(shard, index), 0, full.reshape(-1), given, numbers)


_sequence = iter(range(1, 10**9))


def send(shard: Shard, kind: str, *items: Item, **said: Any) -> Ticket:
    """Push some items, which must be new."""
    ticket = Ticket(Step(kind, items, producer=1, sequence=next(_sequence), **said))
    shard.submit([ticket])
    validate(shard)
    return ticket


def read(shard: Shard, index: int, ids: Sequence[int], flip: int | None = None) -> Any:
    """Rows as a reader finds them, under the lock where it asks for a flip."""
    segment, at = shard.segment, position(shard, index)
    table = segment.tables[at - len(segment.pieces)]
    out = np.empty((len(ids), table.piece.table.dim), table.rows.dtype)
    wanted = [RowsRead(at, np.array(ids, np.int64), out.reshape(-1))]
    if flip is None:
        assert copy_rows(segment, segment.flip, wanted)
    elif not copy_rows_locked(segment, flip, wanted):
        return None
    return out


def contents(shard: Shard) -> bytes:
    """All that is in force, as bytes: a refused step must leave it as it is."""
    segment = shard.segment
    record = segment.current
    found: list[Any] = [record.fixed, record.ranks[: record.plain[N_RANKS]]]
    found += [record.producers[: record.plain[N_PRODUCERS]]]
    found += [segment.weights_of(record, p) for p in range(len(segment.pieces))]
    found += [
        s for p in range(len(segment.pieces)) for s in segment.slots_of(record, p)
    ]
    for table in segment.tables:
        found += [table.rows, *table.slots]
    return b"".join(np.ascontiguousarray(array).tobytes() for array in found)


KINDS = (GRADIENT, ADD, ASSIGN)
