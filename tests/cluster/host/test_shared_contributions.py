"""Contributions that other processes read in place: never one that is used again."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daskps.cluster.host.shared_contributions import (
    BLOCK_NBYTES,
    Neighbours,
    Sheet,
    Sheets,
    Spot,
    spans,
)
from daskps.cluster.machine import blocks as module
from daskps.cluster.machine.blocks import FileMembers, Memory, open_memory
from daskps.cluster.machine.mapping import FILES
from tests.cluster.forks import left

#: Bytes of a contribution's arrays, of float32 and float64.
SIZES = [12, 80]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    # Maybe of stores of other tests.
    before, mapped = left(tmp_path), FILES.nbytes()
    found = open_memory(tmp_path, "a")
    yield found
    found.close()
    assert left(tmp_path) == before
    assert FILES.nbytes() <= mapped


@pytest.fixture
def registry(memory: Memory) -> FileMembers:
    assert isinstance(memory.registry, FileMembers)
    return memory.registry


def taken(sheets: Sheets, sizes: list[int] = SIZES) -> Sheet:
    sheet = sheets.take(sizes)
    assert sheet is not None
    return sheet


def filled(sheet: Sheet, value: float) -> tuple[list[Any], Spot]:
    arrays = [sheet.empty(3, "f4"), sheet.empty(10, "f8")]
    for array in arrays:
        array[:] = value
    return arrays, sheet.publish([0, 1])


def read(neighbours: Neighbours, spot: Spot) -> list[float] | None:
    found = neighbours.find(spot)
    if found is None:
        return None
    pairs = zip(spans(SIZES), ("f4", "f8"), strict=True)
    arrays = [found[first:last].view(dtype) for (first, last), dtype in pairs]
    return [value for array in arrays for value in array.tolist()]


def test_a_contribution_is_read_where_it_lies(
    memory: Memory, registry: FileMembers
) -> None:
    sheets, neighbours = Sheets(memory, SIZES), Neighbours(registry)
    kept = [filled(taken(sheets), value) for value in (1.5, 2.5)]
    for value, (arrays, spot) in zip((1.5, 2.5), kept, strict=True):
        assert read(neighbours, spot) == [value] * 13
        arrays[1][0] = 7.0
        assert read(neighbours, spot) == [value] * 3 + [7.0] + [value] * 9
    sheets.close()


def test_what_is_no_longer_looked_at_is_no_longer_found(
    memory: Memory, registry: FileMembers
) -> None:
    sheets, neighbours = Sheets(memory, [BLOCK_NBYTES]), Neighbours(registry)
    [first, second], spot = filled(taken(sheets), 1.0)
    view = second[4:]
    del first, second
    assert read(neighbours, spot) == [1.0] * 13
    del view
    assert read(neighbours, spot) is None
    # The same memory, another contribution: who was told of the first one sees that.
    arrays, again = filled(taken(sheets), 2.0)
    assert (again.name, again.start) == (spot.name, spot.start)
    assert read(neighbours, spot) is None
    assert read(neighbours, again) == [2.0] * 13
    del arrays
    sheets.close()


def test_nothing_is_found_before_it_is_complete(
    memory: Memory, registry: FileMembers
) -> None:
    sheets, neighbours = Sheets(memory, SIZES), Neighbours(registry)
    _, spot = filled(taken(sheets), 1.0)
    sheet = taken(sheets)
    unfinished = spot._replace(start=sheet._cut.start, ticket=sheet._ticket)
    assert read(neighbours, unfinished) is None
    sheets.close()


def test_rounds_take_no_more_memory_than_one_of_them(
    memory: Memory, registry: FileMembers
) -> None:
    sheets = Sheets(memory, SIZES)
    for _ in range(5):
        kept = [filled(taken(sheets), 1.0) for _ in range(100)]
        assert len(registry.names()) == 1
    del kept
    sheets.close()
    large = Sheets(memory, [BLOCK_NBYTES])
    for _ in range(5):
        several = [taken(large, [BLOCK_NBYTES]) for _ in range(3)]
        assert len(registry.names()) == 3
        del several
    # Not one open file for each of many.
    several = [taken(large, [BLOCK_NBYTES]) for _ in range(40)]
    assert len(registry.names()) == 16
    del several
    large.close()
    assert registry.names() == []


def test_the_end_of_a_run_gives_all_back_and_views_stay(
    memory: Memory, registry: FileMembers
) -> None:
    sheets, neighbours = Sheets(memory, SIZES), Neighbours(registry)
    arrays, spot = filled(taken(sheets), 1.0)
    assert read(neighbours, spot) == [1.0] * 13
    sheets.close()
    assert registry.names() == []
    assert sheets.take(SIZES) is None
    assert arrays[0].tolist() == [1.0] * 3
    assert read(Neighbours(registry), spot) is None
    assert read(neighbours, spot) == [1.0] * 13


def test_without_shared_memory_there_is_none(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Sheets(None, SIZES).take(SIZES) is None
    sheets = Sheets(memory, SIZES)
    # An array of another dtype than the store's would not fit.
    assert sheets.take([12, 81 + 64]) is None

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "_make", full)
    assert sheets.take(SIZES) is None
    monkeypatch.undo()
    assert sheets.take(SIZES) is None


def test_what_lies_on_another_machine_is_not_found(registry: FileMembers) -> None:
    name = "0" * 16 + "-" + "1" * 16
    spot = Spot(name, 8192, 5, 4096, 1, (0, 1))
    assert Neighbours(registry).find(spot) is None
    assert Neighbours(None).find(spot) is None
    assert Neighbours(registry).find(None) is None
