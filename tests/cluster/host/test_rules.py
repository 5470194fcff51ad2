"""The rules of a store in one process."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from daskps import optim
from daskps.cluster.host.rules import Rules, initial_slots
from daskps.kernels import row_merge, row_writes
from daskps.layout.arrays import Layout


def test_parameters_share_the_kernels_and_scalars_of_their_rule():
    shapes = {"a": ((3,), "float32"), "b": ((2,), "float32"), "c": ((2,), "float64")}
    one, other = optim.SGD(0.1), optim.SGD(0.1)
    pickled = pickle.dumps({0: one, 1: one, 2: one})
    rules = Rules(Layout.build(shapes, 1), pickled)
    a, b, c = (rules.get(i) for i in range(3))
    assert a is b
    assert a is not c
    assert c is not None
    assert c.kernel.dtype == "f8"
    apart = Rules(Layout.build(shapes, 1), pickle.dumps({0: one, 1: other}))
    assert apart.get(0) is not apart.get(1)
    assert apart.get(2) is None


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), 0.5])
def test_first_values_of_slots_travel_as_plain_numbers(value):
    """A rule of the user's own may have NumPy's, which a message is refused for."""
    rule: Any = SimpleNamespace(
        slots=("sum", "other"), slot_init={"sum": value}, row_slots=(), rank_slots=()
    )
    found = initial_slots(rule)
    assert found == (0.5, 0.0)
    assert [type(first) for first in found] == [float, float]


@pytest.mark.parametrize("is_table", [True, False])
def test_what_a_table_needs_is_compiled_for_tables_alone(is_table, monkeypatch):
    warmed: list[Any] = []
    monkeypatch.setattr(row_writes, "warm", lambda d, **_: warmed.append([*d]))
    merged: list[Any] = []
    monkeypatch.setattr(row_merge, "warm", lambda d, **_: merged.append(d.name))
    tables = {"t": (3, 2, "float16")} if is_table else {}
    arrays = {} if is_table else {"t": ((3, 2), "float16")}
    layout = Layout.build(arrays, 1, tables)
    rules = Rules(layout, pickle.dumps({0: optim.SGD(0.1)}))
    bound = rules.get(0)
    assert bound is not None
    kernel = bound.kernel
    asked: list[str] = []
    monkeypatch.setattr(kernel, "warm_rows", lambda: asked.append("rows"))
    monkeypatch.setattr(kernel, "warm", lambda **_: asked.append("arrays"))
    rules.warm(durable=True)
    assert warmed == ([["float16"]] if is_table else [])
    assert merged == (["float32"] if is_table else [])
    assert asked == ["rows" if is_table else "arrays"]
