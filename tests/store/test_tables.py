"""Tables as users write them down, and rows as they hand them over."""

from __future__ import annotations

from functools import partial

import dask.array as da
import numpy as np
import pytest

from daskps import (
    LayoutError,
    NoOptimizerError,
    PushRejectedError,
    RowGrad,
    TableSpec,
    init,
    optim,
)
from daskps.init import constant
from daskps.layout.arrays import Layout
from daskps.layout.tables import UnboundedIds
from daskps.store import intake
from daskps.store.blueprints import Wanted, blueprint

LAYOUT = Layout.build(
    {"w": ((2,), "float32")},
    2,
    {"emb": (5, 3, "float16"), "seen": (4, 1, "int64")},
)
RULES = {0: "SGD", 1: "SGD"}


def planned(params, **more):
    more = {"optimizer": None, **more}
    where = Wanted(more.pop("shards", 2), more.pop("servers", "auto"), None)
    return blueprint(params, where=where, seed=0, **more)


@pytest.mark.parametrize(
    ("arguments", "policy", "error", "said"),
    [
        ((0, 3), {}, LayoutError, "rows=0"),
        ((-1, 3), {}, LayoutError, "rows=-1"),
        ((3, 0), {}, LayoutError, "dim=0"),
        ((None, 0), {}, LayoutError, "dim=0"),
        ((None, None), {}, TypeError, "dim is an int, found None"),
        ((None, 3, "f4", np.zeros((3, 3))), {}, LayoutError, "begins without any"),
        ((None, 3, "f4", [1.0]), {}, LayoutError, "begins without any"),
        ((None, 3), {"max_rows": 0}, LayoutError, "max_rows=0; it is a number from 1"),
        ((None, 3), {"max_rows": 2**60}, LayoutError, "from 1 to 140,737,488,355,328"),
        ((None, 3), {"max_rows": 2.0}, TypeError, "max_rows is an int"),
        ((None, 3), {"ttl": -1}, LayoutError, "ttl=-1"),
        ((None, 3), {"ttl": "5"}, TypeError, "ttl is an int"),
        ((None, 3), {"admit_after": 0}, LayoutError, "admit_after=0"),
        ((None, 3), {"admit_after": True}, TypeError, "admit_after is an int"),
        ((None, 3), {"admit_after": None}, TypeError, "admit_after is an int"),
        (
            (9, 3),
            {"max_rows": 9},
            LayoutError,
            "max_rows=9 for a table of 9 rows, which",
        ),
        ((9, 3), {"ttl": 5}, LayoutError, "ttl=5 .* or give rows=None"),
        ((9, 3), {"admit_after": 2}, LayoutError, "admit_after=2"),
        ((3.0, 3), {}, TypeError, "rows is an int"),
        ((True, 3), {}, TypeError, "rows is an int"),
        ((3, 3, "complex64"), {}, LayoutError, "complex64 cannot be held"),
        (
            (3, 3, "f4", np.zeros((3, 2))),
            {},
            LayoutError,
            r"shape \(3, 2\), the table \(3, 3\)",
        ),
        ((3, 3, "f4", da.zeros((2, 3))), {}, LayoutError, r"shape \(2, 3\)"),
    ],
)
def test_a_table_that_cannot_be_is_refused(arguments, policy, error, said):
    with pytest.raises(error, match=said):
        TableSpec(*arguments, **policy)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"t": TableSpec(2**45, 2**10)}, "bytes of values"),
        ({"t": TableSpec(None, 2**10, max_rows=2**45)}, "bytes of values"),
        ({"t": TableSpec(2, 1, init=[[1.0], [np.nan]])}, "NaN or Inf"),
        ({"t": TableSpec(2, 1, "i4", [[1.5], [2.0]])}, "make them equal"),
        ({"t": TableSpec(2, 1, init=da.zeros((2, 1), dtype="c8"))}, "cannot hold"),
        ({"t": TableSpec(2, 2, init=[[1.0], [2.0]])}, r"has shape \(2, 1\)"),
        ({"\ud800": TableSpec(2, 2)}, "table name"),
        ({f"t{i}": TableSpec(1, 1) for i in range(9)}, "pieces"),
    ],
)
def test_a_store_of_tables_that_cannot_be_is_refused(params, said):
    with pytest.raises(LayoutError, match=said):
        planned(params, shards=16_384)


def test_a_rule_of_rows_is_refused_for_arrays_by_their_names():
    rule, params = optim.Adagrad(0.1, rowwise=True), {"t": TableSpec(3, 2)}
    assert planned(params, optimizer=rule).rules == {0: rule}
    with pytest.raises(LayoutError, match="optimizer of parameter 'w' is Adagrad"):
        planned({**params, "w": np.zeros(2)}, optimizer=rule)
    both = {"t": rule, "*": optim.Adagrad(0.1)}
    planned({**params, "w": np.zeros(2)}, optimizer=both)


def test_tables_come_after_arrays():
    """So the index of either is the same in rules, values and layout."""
    dask_rows = da.ones((4, 2), chunks=2)
    params = {
        "t": TableSpec(3, 2, "f4", np.ones((3, 2))),
        "w": np.zeros(2),
        "n": {"u": TableSpec(4, 2, init=dask_rows), "v": 1.0},
        "i": TableSpec(2, 1, "i8", init.zeros()),
    }
    plan = planned(params, optimizer={"w": optim.SGD(1), "*": optim.Adam(1)})
    assert [*plan.shapes] == ["w", "n/v"]
    assert plan.tables == {
        "t": (3, 2, "float32"),
        "n/u": (4, 2, "float32"),
        "i": (2, 1, "int64"),
    }
    assert [*plan.arrays] == [0, 1, 2]
    assert plan.arrays[2].dtype == "f4"
    assert [*plan.collections] == [3]
    assert [*plan.initializers] == [4]
    assert {i: type(rule).__name__ for i, rule in sorted(plan.rules.items())} == {
        0: "SGD",
        1: "Adam",
        2: "Adam",
        3: "Adam",
    }


def rows(ids, values):
    return {"emb": RowGrad(ids, values)}


def test_rows_are_made_ready_in_the_dtype_that_is_computed_in():
    dense, named = intake.parted(
        LAYOUT, {"w": [1, 2], **rows([[4], [0]], np.ones((2, 1, 3)))}
    )
    assert [*dense] == ["w"]
    [given] = intake.row_gradients(LAYOUT, RULES, named, weight=0.5, finite=True)
    assert given.data.dtype == "f4"
    assert given.data.tolist() == [0.5] * 6
    assert given.split.ids.tolist() == [0, 4]
    [[given]] = intake.row_values(LAYOUT, named, "delta", finite=True)
    assert given.data.dtype == "f2"


def test_what_needs_no_copy_is_not_copied():
    ids, data = np.array([0, 1]), np.ones((2, 3), "f4")
    [given] = intake.row_gradients(
        LAYOUT, RULES, rows(ids, data), weight=1.0, finite=True
    )
    assert np.shares_memory(given.data, data)


@pytest.mark.parametrize(
    ("weight", "values", "said"),
    [
        (1.0, np.full((1, 3), np.inf), "NaN or Inf"),
        (1e30, np.full((1, 3), 1e30), "times weight=1e"),
        (1.0, np.ones((1, 3)) + 0j, "complex128"),
        (1.0, np.ones((1, 2)), r"must be \(1, 3\)"),
        (1.0, np.ma.masked_all((1, 3)), "masked"),
    ],
)
def test_rows_that_do_not_fit_are_refused(weight, values, said):
    with pytest.raises(PushRejectedError, match=said):
        intake.row_gradients(
            LAYOUT, RULES, rows([1], values), weight=weight, finite=True
        )


def test_gradients_need_a_rule_and_floats():
    with pytest.raises(NoOptimizerError, match="table 'emb'"):
        intake.row_gradients(
            LAYOUT, {}, rows([1], np.ones((1, 3))), weight=1, finite=True
        )
    named = {"seen": RowGrad([1], [[1]])}
    with pytest.raises(PushRejectedError, match="int64 and takes no gradient"):
        intake.row_gradients(LAYOUT, {2: ""}, named, weight=1, finite=True)
    with pytest.raises(PushRejectedError, match="same_kind"):
        intake.row_values(LAYOUT, {"seen": RowGrad([1], [[1.5]])}, "delta", finite=True)


def test_many_rows_go_in_parts(monkeypatch):
    """Those of a gradient do not: that is one step."""
    monkeypatch.setattr(intake, "MOST_PUSHED_ROWS", 4)
    named = {
        **rows(np.arange(10) % 5, np.arange(30.0).reshape(10, 3)),
        "seen": RowGrad([1], [[1]]),
    }
    calls = intake.row_values(LAYOUT, named, "delta", finite=True)
    assert [[g.split.table.name for g in call] for call in calls] == [
        ["emb", "seen"],
        ["emb"],
        ["emb"],
    ]
    data = np.concatenate([call[0].data for call in calls])
    assert data.tolist() == [*range(30)]
    named.pop("seen")
    # Ten, but no more than three different ones of each shard.
    [_] = intake.row_gradients(LAYOUT, RULES, named, weight=1.0, finite=True)
    one = Layout.build({}, 1, {"emb": (5, 3, "float32")})
    with pytest.raises(PushRejectedError, match="for 5 rows of table 'emb' in shard 0"):
        intake.row_gradients(one, {0: ""}, named, weight=1.0, finite=True)


@pytest.mark.parametrize(("n", "steps"), [(0, 1), (1024, 1), (1025, 2), (60_000, 59)])
def test_a_removal_goes_in_steps_of_one_size(n, steps):
    """However much memory there is: a task that runs again has the same numbers."""
    layout = Layout.build(
        {}, 3, {"any": (0, 1, "float32", UnboundedIds(constant(0.0), 5, 99999))}
    )
    calls = intake.removals(layout, layout.tables[0], np.arange(n))
    assert len(calls) == steps
    named = [given.split.ids for [given] in calls]
    assert max(map(len, named)) <= 1024
    assert np.sort(np.concatenate(named)).tolist() == [*range(n)]


@pytest.mark.parametrize(
    "given", [{"emb": np.ones((5, 3))}, rows([1], np.ones((1, 3)))]
)
@pytest.mark.parametrize("check", ["gradients", "models", "values"])
def test_what_looks_at_arrays_takes_no_rows(check, given):
    """Rows are taken apart before; an aggregate's are not."""
    looks = {
        "gradients": partial(intake.gradients, LAYOUT, RULES, given),
        "models": partial(intake.gradients, LAYOUT, RULES, given, model=True),
        "values": partial(intake.values, LAYOUT, given, "value"),
    }
    with pytest.raises(PushRejectedError, match=r"'emb'.*takes no rows"):
        looks[check](finite=True)


def test_rows_are_for_tables_alone():
    with pytest.raises(PushRejectedError, match="'w', which is an array of shape"):
        intake.gradients(LAYOUT, RULES, {"w": RowGrad([0], [1])}, finite=True)
