"""Stores and parameters show themselves without asking anybody."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import init, optim
from daskps.cluster.caller.shard_map import StoreMap
from daskps.layout.arrays import Layout
from daskps.layout.tables import UnboundedIds
from daskps.store.repr import MOST_ROWS, store_html, store_line

NASTY = "<script>alert('&')</script>"


@pytest.fixture
def shown(client):
    """A store with names that must be escaped."""
    params = {NASTY: np.zeros((3, 4), "f4"), "b": np.float64(0)}
    s = daskps.create(
        params, name=NASTY, optimizer=optim.SGD(0.1), shards=3, overwrite=True
    )
    yield s
    s.delete()


def meta(n_parameters, n_shards, tables=None, placed=()):
    shapes = {f"p{i}": ((2,), "float32") for i in range(n_parameters)}
    layout = Layout.build(shapes, n_shards, tables, placed)
    return StoreMap(
        {
            "uid": "u",
            "name": "s",
            "session": True,
            "layout": layout.to_wire(),
            "owners": [f"tcp://worker:{i}" for i in range(n_shards)],
            "generations": [1] * n_shards,
            "rules": b"",
            "optimizers": [(0, "SGD(lr=0.1)")],
            "lineage": "s",
            "origin": "s",
            "recovers": False,
            "cluster": "",
            "segments": [],
        }
    )


def test_line_counts():
    assert store_line("s", None) == "<daskps.ParameterStore 's'>"
    assert store_line("s", meta(1, 1)) == (
        "<daskps.ParameterStore 's': 1 parameter, 8 B, 1 shard on 1 worker>"
    )
    assert store_line("s", meta(3, 2)) == (
        "<daskps.ParameterStore 's': 3 parameters, 24 B, 2 shards on 2 workers>"
    )


def test_html_of_many_rows_is_cut():
    html = store_html("s", meta(MOST_ROWS + 5, MOST_ROWS + 3), ())
    half = MOST_ROWS // 2
    for shown in (0, half - 1, half + 5, MOST_ROWS + 4):
        assert f"<td>p{shown}</td>" in html
    for left_out in (half, half + 4):
        assert f"<td>p{left_out}</td>" not in html
    assert "… 5 more" in html
    assert f"tcp://worker:{half - 1}<" in html
    assert f"tcp://worker:{half}<" not in html
    assert "… 3 more" in html


def test_html_of_one_shard():
    html = store_html("s", meta(1, 1), (17,))
    for text in ("tcp://worker:0", "8 B", "float32", "SGD(lr=0.1)", "<td>17</td>"):
        assert text in html
    assert " more" not in html


@pytest.mark.parametrize(
    ("n_parameters", "placed", "line", "cells"),
    [
        (1, (), "8 B + unbounded rows", ["4 B + unbounded rows"] * 2),
        (0, (), "unbounded rows", ["unbounded rows"] * 2),
        (1, ([[1], [1]],), "8 B + unbounded rows", ["4 B", "4 B + unbounded rows"]),
    ],
)
def test_unbounded_rows_are_not_taken_for_none(
    n_parameters: int, placed: Any, line: str, cells: list[str]
) -> None:
    found = meta(
        n_parameters,
        2,
        {"t": (0, 3, "float32", UnboundedIds(init.normal(), 0))},
        placed,
    )
    assert f"1 table, {line}, 2 shards" in store_line("s", found)
    html = store_html("s", found, ())
    assert [f"<td>{cell}</td><td>not asked" in html for cell in cells] == [True] * 2


def test_html_shows_what_is_known(shown):
    """Names escaped; shards with sizes, workers and the versions last seen."""
    html = shown._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert html.count("not asked yet") == 3
    for worker in shown.placement:
        assert worker in html
    assert "16 B" in html
    for _ in range(7):
        shown.add({NASTY: np.ones((3, 4), "f4")})
    html = shown._repr_html_()
    assert html.count("<td>7</td>") == 3
    assert "not asked yet" not in html


def test_versions_asked_for_are_shown(shown):
    """A handle that never pushed shows the versions it was told."""
    shown.add({NASTY: np.ones((3, 4), "f4")})
    again = daskps.open(NASTY)
    assert again.versions == (1, 1, 1)
    html = again._repr_html_()
    assert html.count("<td>1</td>") == 4
    assert "not asked yet" not in html


def test_parameter(shown):
    p = shown[NASTY]
    assert repr(p) == (
        f"<daskps.ParameterArray {NASTY!r}: (3, 4) float32 of store {NASTY!r}>"
    )
    html = p._repr_html_()
    assert "<script>" not in html
    for text in ("&lt;script&gt;", "(3, 4)", "float32", "48 B"):
        assert text in html


def test_picture_of_a_parameter_has_its_shards(shown):
    """dask.array's, of three shards cut to whole rows; none where there are no axes."""
    html = shown[NASTY]._repr_html_()
    assert "<svg" in html
    assert "<th>shards</th><td>3</td>" in html
    assert html.count("<line") == shown.snapshot()[NASTY]._repr_html_().count("<line")
    assert "<svg" not in shown["b"]._repr_html_()


def test_snapshot(shown):
    html = shown.snapshot()._repr_html_()
    assert "<script>" not in html
    for text in ("at version 0", "&lt;script&gt;", "(3, 4)", "float32", "48 B"):
        assert text in html


def test_list_of_stores(shown):
    found: Any = daskps.list_stores()
    assert found == [*found]
    head, *rows = repr(found).splitlines()
    heads = ["name", "kind", "parameters", "tables", "bytes", "shards", "workers"]
    heads.append("device")
    assert head.split() == heads
    assert len(rows) == len(found)
    assert any(row.startswith(f"{NASTY}  named") for row in rows)
    html = found._repr_html_()
    assert "<script>" not in html
    assert html.count("<tr>") == 1 + len(found)
    assert repr(type(found)()) == "no stores"


def test_repr_sends_nothing(shown, monkeypatch):
    """Not from a handle that is bound, unbound, closed, or of a parameter."""
    handles = [shown, pickle.loads(pickle.dumps(shown)), daskps.open(NASTY)]
    parameter = shown[NASTY]
    handles[2].close()

    def asked(*args, **kwargs):
        raise AssertionError("a repr asked somebody")

    for name in ("run", "start", "directory", "control", "rpc"):
        monkeypatch.setattr(f"daskps.cluster.caller.link.Link.{name}", asked)
    for handle in handles:
        assert "ParameterStore" in repr(handle)
        assert "&lt;script&gt;" in handle._repr_html_()
    assert "ParameterArray" in repr(parameter)
    assert "float32" in parameter._repr_html_()


ALONE = """
import pickle, sys
store = pickle.loads(sys.stdin.buffer.read())
print(repr(store))
print(len(store._repr_html_()) > 0, hash(store) == hash(store.uid))
"""


def test_repr_in_a_process_without_a_cluster(shown):
    found = subprocess.run(
        [sys.executable, "-c", ALONE],
        input=pickle.dumps(shown),
        capture_output=True,
        check=True,
        timeout=60,
    )
    expected = f"<daskps.ParameterStore {NASTY!r}>\nTrue True\n"
    assert found.stdout.decode() == expected
