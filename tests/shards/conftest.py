"""Suites of shards that run in host memory, and once more on the fake device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from daskps.backend import fake
from daskps.shards.arrays.device import DeviceMemory
from tests.shards import making

#: Their shards are made by :func:`tests.shards.making.make` alone.
SUITES = {
    f"tests.shards.{name}"
    for name in (
        *("test_shard", "test_try_step", "test_reads", "test_producers"),
        *("test_delays", "test_epochs", "cuts.test_cut"),
        *("rounds.test_rounds", "rounds.test_kinds"),
    )
}
#: What no device has: functions as `reduce`, deputies, views of weights.
NOT_THERE = {
    "test_an_error_in_a_reduce_function_ends_the_run_and_wakes_everybody",
    "test_an_error_that_a_finishing_rank_sets_off_wakes_everybody",
    "test_rank_that_is_none_joins_no_round",
    "test_round_that_fails_is_left_to_the_shard",
    "test_rounds_count_and_another_process_finds_them",
    "test_a_copy_of_a_flip_that_was_taken_back_is_not_whole",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test of these suites twice; its name in host memory stays."""
    name = metafunc.function.__name__
    if metafunc.module.__name__ in SUITES and name not in NOT_THERE:
        metafunc.fixturenames.append("memory")
        ids = [pytest.HIDDEN_PARAM, "fake"]
        metafunc.parametrize("memory", [None, "fake"], ids=ids, indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what is refused on a device: a function as `reduce`."""
    items[:] = [item for item in items if not _is_refused(item)]


def _is_refused(item: pytest.Item) -> bool:
    params = getattr(getattr(item, "callspec", None), "params", {})
    return params.get("memory") == "fake" and callable(params.get("reduce"))


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have shards made in host memory, or on the fake device."""
    if request.param is None:
        yield
        return
    device = fake.device()
    device.seed(0)
    making.MEMORY.append(lambda: DeviceMemory(device).payload())
    yield
    making.MEMORY.pop()
