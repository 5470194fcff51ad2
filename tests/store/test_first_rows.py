"""What unbounded rows may begin with, and how it travels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskps import LayoutError, TableSpec, init, optim
from daskps.layout.tables import UnboundedIds
from daskps.limits import MOST_ROW_NBYTES
from tests.store.test_tables import planned


def shape_of(spec: TableSpec) -> Any:
    return planned({"t": spec}).tables["t"]


@pytest.mark.parametrize(
    ("given", "dtype", "first"),
    [
        (0, "f4", init.constant(0.0)),
        (np.float64(0.1), "f4", init.constant(float(np.float32(0.1)))),
        (init.zeros(), "i8", init.constant(0)),
        (2**64 - 1, "u8", init.constant(2**64 - 1)),
        (True, "bool", init.constant(1)),
        (init.normal(1, 2), "f2", init.normal(1.0, 2.0)),
        (init.uniform(0, np.float64(3)), "f8", init.uniform(0.0, 3.0)),
    ],
)
def test_a_number_or_a_distribution_is_sent_as_plain_numbers(given, dtype, first):
    rows, dim, name, unbounded = shape_of(TableSpec(None, 2, dtype, given))
    assert (rows, dim, name) == (0, 2, np.dtype(dtype).name)
    assert unbounded == UnboundedIds(first, 0)
    kind, numbers, *more = unbounded.to_wire()
    assert {type(n) for n in numbers} <= {int, float}
    assert UnboundedIds.from_wire(kind, numbers, *more) == unbounded


@pytest.mark.parametrize(
    ("given", "dtype", "error", "said"),
    [
        (
            init.fan_in(),
            "f4",
            LayoutError,
            "unbounded rows, which cannot begin with fan_in",
        ),
        (init.fan_avg(), "f4", LayoutError, "give a number, daskps.init.normal or"),
        (lambda shape, dtype, rng: 0, "f4", LayoutError, "each process that reads"),
        ("x", "f4", TypeError, "'x' is no initializer"),
        (init.zeros, "f4", TypeError, "by a call"),
        (1.5, "i4", LayoutError, "cannot start at 1.5"),
        (1e6, "f2", LayoutError, "cannot start at"),
        (init.normal(), "i4", LayoutError, "cannot be drawn"),
        (init.normal(std=8000), "f2", LayoutError, "NaN or Inf in float16"),
        (init.uniform(0, 1e39), "f4", LayoutError, "NaN or Inf in float32"),
        (init.uniform(-1e308, 1e308), "f8", LayoutError, "NaN or Inf in float64"),
    ],
)
def test_what_not_all_could_draw_is_refused(given, dtype, error, said):
    with pytest.raises(error, match=said):
        shape_of(TableSpec(None, 2, dtype, given))


def test_the_farthest_number_that_may_be_drawn_decides():
    """8.3 standard deviations: 7,900 of them are 65,500."""
    shape_of(TableSpec(None, 2, "f2", init.normal(std=7800)))


def test_rows_that_no_shard_has_addresses_for_are_refused():
    assert shape_of(TableSpec(None, MOST_ROW_NBYTES // 4))
    for dim in (MOST_ROW_NBYTES // 4 + 1, 2**40, 2**70):
        with pytest.raises(LayoutError, match=r"a row of table 't' has .* bytes"):
            shape_of(TableSpec(None, dim))


def test_rules_are_found_by_name_for_tables_of_both_kinds():
    params = {"few": TableSpec(3, 2), "any": TableSpec(None, 2), "w": np.zeros(2)}
    rules = {"any": optim.Adagrad(0.1, rowwise=True), "*": optim.SGD(1)}
    plan = planned(params, optimizer=rules)
    assert [type(plan.rules[i]).__name__ for i in range(3)] == ["SGD", "SGD", "Adagrad"]
    assert [*plan.initializers] == [1]
