"""The copy that a cut makes of a shard with unbounded tables."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from daskps.kernels import row_moves
from daskps.layout.spans import IDS, ROWS, WEIGHTS, Span
from daskps.shards import frozen, frozen_rows
from daskps.shards.frozen import BegunCopy
from daskps.shards.memory.format import ROWS_SEQUENCE
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD
from tests.kernels.compiling import kept
from tests.shards.unbounded_rowing import EMB, NUM, layout_of, made, send, step

LAYOUT = layout_of(2)


def pushed(shard: Shard, sequence: int, pairs: Any) -> None:
    send(shard, step(shard, ADD, {EMB: pairs, NUM: pairs}, sequence))


def shard_with_rows() -> Shard:
    """One of two shards, to which the model's ids from -20 to 20 were pushed."""
    shard = made(LAYOUT, 1)
    pushed(shard, 0, [(i, abs(i)) for i in range(20, -21, -1)])
    return shard


def mine(shard: Shard, ids: Any, ordinal: int = 0) -> list[int]:
    """Those of ids that are the shard's, which another table has elsewhere."""
    piece = shard.segment.tables[ordinal].piece
    return [i for i in ids if piece.holds(np.array([i]), cache_dir=kept())]


def test_a_copy_has_all_rows_by_id_also_those_that_came_meanwhile():
    shard = shard_with_rows()
    n = len(shard.segment.pieces)
    begun = BegunCopy.of(shard.segment, None)
    pushed(shard, 1, [(99, 5), (7, 1), *((i, 5) for i in range(100, 120))])
    copy = begun.read(shard.segment, shard.segment.flip)
    assert copy is not None
    ids = [*range(-20, 21), *range(99, 120)]
    more = dict.fromkeys(range(99, 120), 5) | {7: 8}
    there = mine(shard, ids), mine(shard, ids, 1)
    assert copy.n_rows == [*map(len, there)]
    for i, (first, dim) in enumerate([(3, 2), (7, 1)]):
        k, position = len(there[i]), n + i
        assert copy.get(Span(IDS, position, 0, k)).tolist() == there[i]
        rows = copy.get(Span(ROWS, position, 0, k * dim)).reshape(k, dim)
        wanted = [[first + more.get(i, abs(i))] * dim for i in there[i]]
        assert rows.tolist() == wanted
        assert copy.get(Span(ROWS, position, dim, 2 * dim)).tolist() == wanted[1]
        for area, start, stop in ((IDS, 0, k + 1), (ROWS, -1, 0), (ROWS, 2, 1)):
            with pytest.raises(IndexError):
                copy.get(Span(area, position, start, stop))
    with pytest.raises(LookupError):
        copy.get(Span(WEIGHTS, n, 0, 1))
    assert copy.nbytes == 64 + len(there[0]) * 16 + len(there[1]) * 16
    whole = pickle.loads(pickle.dumps(copy))
    assert (whole.nbytes, whole.n_rows) == (copy.nbytes, copy.n_rows)
    assert len(pickle.dumps(copy)) < copy.nbytes + 2000
    # What happens later is not in it, and nobody writes to it.
    pushed(shard, 2, [(i, 1) for i in there[1]])
    assert copy.get(Span(ROWS, n + 1, 0, k)).tolist() == [row for [row] in wanted]
    with pytest.raises(ValueError, match="read-only"):
        copy.get(Span(ROWS, n, 0, k))[0] = 0


def test_a_table_that_has_outgrown_its_memory_is_copied(monkeypatch):
    monkeypatch.setattr(frozen, "MORE_NBYTES", 0)
    shard = made(LAYOUT, 1)
    begun = BegunCopy.of(shard.segment, EMB)
    pushed(shard, 0, [(i, i) for i in range(50)])
    copy = begun.read(shard.segment, shard.segment.flip)
    assert copy is not None
    assert copy.n_rows == [len(mine(shard, range(50)))]


def test_one_table_alone_is_copied():
    shard = shard_with_rows()
    copy = BegunCopy.of(shard.segment, NUM).read(shard.segment, shard.segment.flip)
    assert copy is not None
    k = len(mine(shard, range(-20, 21), 1))
    assert copy.n_rows == [k]
    assert copy.nbytes == 16 * k


def test_no_copy_is_made_of_rows_that_change(monkeypatch):
    """Neither while somebody is at them nor where that was so in between."""
    shard = shard_with_rows()
    segment, flip = shard.segment, shard.segment.flip
    begun = BegunCopy.of(segment, None)
    assert begun.read(segment, flip - 1) is None
    segment.header[ROWS_SEQUENCE] += 1
    assert begun.read(segment, flip) is None
    segment.header[ROWS_SEQUENCE] += 1
    gather = row_moves.gather

    def late(*args: Any, **more: Any) -> None:
        gather(*args, **more)
        if segment.flip == flip:
            pushed(shard, 1, [(3, 1), (4, 1), (5, 1)])

    monkeypatch.setattr(frozen_rows, "gather", late)
    assert begun.read(segment, flip) is None
    monkeypatch.undo()
    assert begun.read(segment, segment.flip) is not None
