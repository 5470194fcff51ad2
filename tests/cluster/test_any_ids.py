"""Rows of any ids through handles: no user can ask for such a table yet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import RowGrad, TableSpec, init, optim
from daskps.layout.tables import AnyIds
from daskps.row_init import initial_rows
from daskps.store import specs, stores
from tests.support import mostly_inside

FIRST, SEED, DIM = init.normal(1.0, 0.5), 7, 3
IDS = np.array([[2**62, -1, 17], [17, -(2**63), 0]])


@pytest.fixture
def any_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the tables of a store that are called "any" those of any ids."""
    made = specs.blueprint

    def blueprint(params: Any, **more: Any) -> Any:
        plan = made(params, **more)
        tables: dict[str, Any] = dict(plan.tables)
        tables["any"] = (0, *tables["any"][1:3], AnyIds(FIRST, SEED))
        return replace(plan, tables=tables)

    monkeypatch.setattr(stores, "blueprint", blueprint)


def at_first(ids: Any) -> Any:
    flat = np.asarray(ids, "i8").reshape(-1)
    return initial_rows(flat, (DIM, "float32"), FIRST, name="any", seed=SEED)


@mostly_inside()
@pytest.mark.usefixtures("any_ids")
def test_absent_rows_are_read_and_present_ones_changed(way):
    """A pull inserts nothing; a push begins with what was read before it."""
    params = {"w": np.zeros(4), "any": TableSpec(1, DIM), "few": TableSpec(9, 2)}
    with daskps.create(params, optimizer=optim.SGD(0.5), shards=3) as store:
        table = store["any"]
        expected = dict(zip(IDS.flat, at_first(IDS), strict=True))

        def check(ids: Any) -> None:
            each = [expected.get(i, at_first([i])[0]) for i in np.ravel(ids).tolist()]
            shape = (*np.shape(ids), DIM)
            found = table.pull(ids)
            rows = np.array(each, "f4").reshape(shape)
            np.testing.assert_array_equal(found, rows, strict=True)

        check(IDS)
        check([])
        assert store.stats()["tables"]["any"]["rows"] == 0
        grads = np.arange(6.0 * DIM, dtype="f4").reshape(*IDS.shape, DIM) / 4
        table.push(IDS, grads)
        for i, g in zip(IDS.flat, grads.reshape(-1, DIM), strict=True):
            expected[i] = expected[i] - np.float32(0.5) * g
        check(IDS)
        check([5, 17, 6, 2**62, 5])
        assert store.stats()["tables"]["any"]["rows"] == 5
        store.add({"any": RowGrad([17, 99], np.ones((2, DIM))), "w": np.ones(4)})
        expected[17] = expected[17] + 1
        expected[99] = at_first([99])[0] + 1
        table.assign([-3, -3], np.array([[1.0] * DIM, [2.0] * DIM]))
        expected[-3] = np.full(DIM, 2, "f4")
        out = np.full((8, 2 * DIM), np.nan, "f4")[:, ::2]
        ids = [*IDS.flat, 99, -3]
        assert (
            store.pull("w", rows={"any": ids, "few": [8]}, out={"any": out})["any"]
            is out
        )
        np.testing.assert_array_equal(out, [expected[int(i)] for i in ids])
        check(np.arange(-500, 500))
        assert store.stats()["tables"]["any"]["rows"] == 7
        found = store.pull_async((), rows={"any": IDS}).result()["any"]
        np.testing.assert_array_equal(
            found.reshape(-1, DIM), [expected[i] for i in IDS.flat]
        )


@mostly_inside()
@pytest.mark.usefixtures("any_ids")
def test_one_sum_per_row_of_tables_of_both_kinds(way):
    """Two pushes, the second by what the first has left in the slots."""
    rule, ids = optim.Adagrad(0.5, rowwise=True), [3, 7, 3]
    params = {"any": TableSpec(1, DIM), "few": TableSpec(9, DIM, init=1.0)}
    g = np.arange(1.0, 10.0, dtype="f4").reshape(3, DIM)
    total = np.array([g[0] + g[2], g[1]])
    squares = np.mean(total**2, axis=1, keepdims=True)
    with daskps.create(params, optimizer=rule, shards=2) as store:
        before = store.pull((), rows={"any": [3, 7], "few": [3, 7]})
        for _ in range(2):
            store.push({"any": RowGrad(ids, g), "few": RowGrad(ids, g)})
        after = store.pull((), rows={"any": [3, 7], "few": [3, 7]})
        step = 0.5 * total * (1 / np.sqrt(squares) + 1 / np.sqrt(2 * squares))
        for name, rows in before.items():
            np.testing.assert_allclose(after[name], rows - step, rtol=1e-5)
