"""Many rows are read in parts, and what no shard has is worked out by who reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskps import init
from daskps.layout.arrays import Layout
from daskps.layout.tables import UnboundedIds
from daskps.row_init import initial_rows
from daskps.store import targets as targets_of
from tests.cluster.caller.test_row_routes import map_of

DIM, SEED, FIRST = 3, 5, init.uniform(-2, 3)
TABLES: Any = {
    "t": (50, DIM, "float32"),
    "any": (0, DIM, "float32", UnboundedIds(FIRST, SEED)),
}


def rows_of(ids: Any) -> Any:
    """What the shards have of a row, where they have it."""
    return np.asarray(ids)[:, None] * 10.0 + np.arange(DIM)


def answer(target: Any) -> int:
    """Give what a target asks for, of odd ids alone where they may be absent."""
    asked_rows = 0
    for shard in target.shards:
        asked = target.rows_asked(shard)
        rows, marks = [], []
        for one in asked:
            there = one.ids % 2 == 1 if one.is_marked else np.ones(len(one.ids), bool)
            rows.append(np.where(there[:, None], rows_of(one.ids), np.nan).ravel())
            marks += [there.astype("u1")] if one.is_marked else []
            asked_rows += len(one.ids)
        target.fill(shard, [*rows, *marks])
    return asked_rows


@pytest.mark.parametrize("n_shards", [1, 3])
@pytest.mark.parametrize("n", [0, 1, 8, 30])
def test_rows_are_read_in_parts(n_shards, n, monkeypatch):
    """None asks for more than a shard gives at once; together they ask for all."""
    monkeypatch.setattr(targets_of, "most_rows", lambda table: 8)
    layout = Layout.build({"w": ((4,), "float64")}, n_shards, TABLES)
    ids = np.random.default_rng(0).integers(0, 50, n)
    asked = {"t": ids, "any": ids - 25}
    targets = targets_of.pulled(map_of(layout), (), asked, None)
    assert len(targets) == max(1, -(-n // 8))
    counted = [answer(target) for target in targets]
    assert max(counted) <= 2 * 8
    assert sum(counted) == 2 * n
    found = targets[0].finish()
    np.testing.assert_array_equal(found["t"], rows_of(ids).astype("f4"), strict=True)
    is_odd = (ids - 25) % 2 == 1
    looked = targets_of.sought(map_of(layout), layout.tables[1], ids - 25, (1, n))
    assert len(looked) == len(targets)
    assert sum(answer(target) for target in looked) == n
    # A look for rows brings a byte for each id, and no row.
    every = [one for t in looked for shard in t.rows for one in t.rows_asked(shard)]
    assert sum(one.nbytes for one in every) == n
    assert looked[-1].finish().tolist() == [is_odd.tolist()]
    first = initial_rows(ids - 25, (DIM, "float32"), FIRST, name="any", seed=SEED)
    expected = np.where(is_odd[:, None], rows_of(ids - 25), first).astype("f4")
    np.testing.assert_array_equal(found["any"], expected, strict=True)
