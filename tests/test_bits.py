"""Runs have the bits that an earlier commit gave them, whatever carries their calls."""

from __future__ import annotations

import json
from typing import Any

import dask
import pytest

from tests import bits, inprocess
from tests.support import CARRIERS

CASES = tuple(bits.cases())
TABLE: dict[str, Any] = json.loads(bits.TABLE.read_text("utf-8"))


def test_the_table_has_every_case() -> None:
    assert {*TABLE} == {"restored", *(case.name for case in CASES)}
    assert len({*map(str, TABLE.values())}) >= 60


@pytest.mark.parametrize(("inside", "every"), [("process", 1), ("rpc", 3)])
def test_bits_inside_one_process(inside: str, every: int) -> None:
    cases = CASES[::every]
    with dask.config.set(CARRIERS[inside]), inprocess.cluster():
        found = {case.name: bits.found(case) for case in cases}
    assert found == {case.name: TABLE[case.name] for case in cases}


def test_bits_of_the_task_graph() -> None:
    graph = [case for case in CASES if case.has_graph]
    assert len(graph) >= 18
    with dask.config.set(CARRIERS["process"]), inprocess.cluster():
        found = {case.name: bits.found(case, "graph") for case in graph}
    assert found == {case.name: TABLE[case.name] for case in graph}


@pytest.mark.parametrize("way", ["machine", "socket"], indirect=True)
def test_bits_between_processes(way: Any) -> None:
    """Every seventh case: of all policies, codecs and tables some are among them."""
    some = CASES[::7]
    assert {case.sync for case in some} == {"bsp", "asp", "ssp"}
    assert {case.rows for case in some} == {"", "bounded", "unbounded"}
    found = {case.name: bits.found(case) for case in some}
    assert found == {case.name: TABLE[case.name] for case in some}


def test_a_checkpoint_of_an_earlier_commit_is_restored() -> None:
    """Its values have their bits, and so has a run that goes on from there."""
    with dask.config.set(CARRIERS["process"]), inprocess.cluster():
        assert [*bits.restored()] == TABLE["restored"]
