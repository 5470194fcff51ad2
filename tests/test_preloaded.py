"""Workers of tests have ready what they need."""

from __future__ import annotations

from typing import Any

from tests import preloaded
from tests.support import gen_cluster, local_cluster

READY = {preloaded.__name__, *preloaded.MODULES}


def missing(client: Any) -> set[str]:
    """Return what some worker has not imported.

    What is asked there travels by value: who imports this module imports all of it.
    """

    def imported() -> Any:
        import sys

        return set(sys.modules)

    return {name for found in client.run(imported).values() for name in READY - found}


def test_workers_are_forked_from_a_process_that_has_it_all(client: Any) -> None:
    """What cannot be imported there is left out without a word."""
    assert not missing(client)


@gen_cluster()
async def test_nothing(s, a, b):
    """Dask's decorator sets the configuration back to its defaults when it is over."""


def test_so_are_those_that_come_after_a_cluster_on_a_tests_own_loop() -> None:
    test_nothing()
    with local_cluster(n_workers=1) as client:
        assert not missing(client)
