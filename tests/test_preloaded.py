"""Workers of tests have ready what they need."""

from __future__ import annotations

from typing import Any

from tests.support import gen_cluster, local_cluster


def are_ready(client: Any) -> bool:
    """Tell whether all workers come from a process that could import all of it.

    What is asked there travels by value: nothing is imported for it.
    """

    def is_ready() -> bool:
        import sys

        return "tests.preloaded" in sys.modules

    return all(client.run(is_ready).values())


def test_workers_are_forked_from_a_process_that_has_it_all(client: Any) -> None:
    """What cannot be imported there is left out without a word."""
    assert are_ready(client)


@gen_cluster()
async def test_nothing(s, a, b):
    """Dask's decorator sets the configuration back to its defaults when it is over."""


def test_so_are_those_that_come_after_a_cluster_on_a_tests_own_loop() -> None:
    test_nothing()
    with local_cluster(n_workers=1) as client:
        assert are_ready(client)
