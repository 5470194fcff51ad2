"""Indexes of table pieces in memory of their own, with guards around every area."""

from __future__ import annotations

from typing import Any

import numpy as np

from daskps.kernels import index_probe as at
from daskps.kernels.row_index import RowIndex
from daskps.kernels.words_log import WordsLog
from tests.kernels.compiling import kept

#: What stands before, between and behind the areas.
GUARD = 0x5EED
BASE = 5 << 24


def made(
    rows: int = 40, slots: int = 64, *, log: int = 400, seed: int = 7, **more: Any
) -> tuple[RowIndex, WordsLog]:
    """Return an index without rows, whose sides have room for twice as many entries."""
    sizes = [at.N_HEAD, rows, rows, 4 * slots, 4 * slots]
    starts = np.cumsum([2, *(n + 2 for n in sizes)])[:-1]
    words = np.full(starts[-1] + sizes[-1] + 2, GUARD, np.int64)
    for start, n in zip(starts, sizes, strict=True):
        words[start : start + n] = 0
    places = np.stack([starts, sizes], 1).reshape(-1)
    index = RowIndex(words, places, cache_dir=kept())
    index.begin(seed=seed, rows=rows, slots=slots, **more)
    return index, WordsLog(np.zeros(2 * log, np.int64), np.zeros(1, np.int64), BASE)


def guards(index: RowIndex) -> bool:
    """Return whether nothing outside of the areas has changed."""
    inside = np.zeros(len(index.words), bool)
    for start, n in index.places.reshape(-1, 2):
        inside[start : start + n] = True
    return bool((index.words[~inside] == GUARD).all())


def rows_of(index: RowIndex, ids: Any, **more: Any) -> Any:
    """Return the row of each id."""
    ids = np.array(ids, np.int64)
    rows = np.empty(len(ids), np.int64)
    missing = index.look_up(ids, rows, **more)
    assert missing == (rows < 0).sum()
    return rows


def push(index: RowIndex, ids: Any, log: WordsLog, **more: Any) -> tuple[Any, Any]:
    """Give rows to ids as a push does; return them, and what has become of them."""
    rows = rows_of(index, ids, since=more.get("since", 0))
    return rows, index.take(np.array(ids, np.int64), rows, log, **more)


def validate(index: RowIndex) -> dict[int, int]:
    """Check all that must hold, and return the row of each id."""
    head, (ids, rows) = index.head, index.ids()
    assert guards(index)
    assert len(set(ids.tolist())) == len(ids) == head[at.USED]
    assert (rows_of(index, ids) == rows).all()
    counted, counts = index.candidates()
    assert len(counted) == head[at.CANDIDATES]
    assert (counts > 0).all()
    assert (rows_of(index, counted) == -1).all()
    side = int(head[at.SIDE])
    start, n = index.places[2 * (at.SIDE_0 + side)], head[at.SLOTS_0 + side]
    values = index.words[start + 1 : start + 2 * n : 2]
    assert (values != 0).sum() == len(ids) + len(counted)
    if not head[at.BUCKETS]:
        free, row = set(), int(head[at.FREE])
        state = index.words[index.places[2 * at.STATE] :]
        while row:
            assert row not in free
            free.add(row)
            row = -int(state[row - 1])
        every = {row - 1 for row in free} | set(rows.tolist())
        assert every == set(range(int(head[at.END])))
    return dict(zip(ids.tolist(), rows.tolist(), strict=True))
