"""Unbounded rows through handles."""

from __future__ import annotations

import numpy as np
import pytest

import daskps
from daskps import RowGrad, TableSpec, init, optim
from tests.support import mostly_inside

FIRST, SEED, DIM = init.normal(1.0, 0.5), 7, 3


@mostly_inside()
def test_one_sum_per_row_of_tables_of_both_kinds(way):
    """Two pushes, the second by what the first has left in the slots."""
    rule, ids = optim.Adagrad(0.5, rowwise=True), [3, 7, 3]
    params = {
        "any": TableSpec(None, DIM, init=FIRST),
        "few": TableSpec(9, DIM, init=1.0),
    }
    g = np.arange(1.0, 10.0, dtype="f4").reshape(3, DIM)
    total = np.array([g[0] + g[2], g[1]])
    squares = np.mean(total**2, axis=1, keepdims=True)
    with daskps.create(params, optimizer=rule, shards=2, seed=SEED) as store:
        before = store.pull((), rows={"any": [3, 7], "few": [3, 7]})
        for _ in range(2):
            store.push({"any": RowGrad(ids, g), "few": RowGrad(ids, g)})
        after = store.pull((), rows={"any": [3, 7], "few": [3, 7]})
        step = 0.5 * total * (1 / np.sqrt(squares) + 1 / np.sqrt(2 * squares))
        for name, rows in before.items():
            np.testing.assert_allclose(after[name], rows - step, rtol=1e-5)


@pytest.mark.parametrize("way", ["inside", "machine"], indirect=True)
def test_rows_come_and_go_as_a_table_was_told(way):
    """Memory for the most rows is there from the beginning; each shard goes on by itself."""
    spec = TableSpec(None, 1, "i8", max_rows=1000, ttl=2, admit_after=2)
    with daskps.create({"any": spec}, shards=3) as store:
        table, ones = store["any"], np.ones((5, 1), "i8")
        table.add([1, 2, 2, 3, 3], ones)
        assert len(table) == 0
        assert not table.pull([1, 2, 3]).any()
        table.add([1, 2, 3], ones[:3])
        table.assign([-8], [[5]])
        assert table.ids().tolist() == [-8, 1, 2, 3]
        assert table.pull([2, -8, 7]).ravel().tolist() == [1, 5, 0]
        table.add([1], ones[:1])
        assert table.ids().tolist() == [-8, 1]
        assert table.pull([1, 2, -8]).ravel().tolist() == [2, 0, 5]
        assert table.contains([-8, 1, 2, 3]).tolist() == [True, True, False, False]
        told = store.stats()
        assert told["tables"]["any"]["candidates"] == 0
        assert told["tables"]["any"]["admissions"] == 4
        assert table.nbytes == 2 * 8
        table.add(np.arange(3000), np.ones((3000, 1), "i8"))
        table.add(np.arange(3000), np.ones((3000, 1), "i8"))
        told = store.stats()["tables"]["any"]
        assert 900 < told["rows"] <= 1000
        assert told["evictions"] >= 2000 - 64
