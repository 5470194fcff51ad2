"""Workers of tests have ready what they need."""

from __future__ import annotations

import sys
from typing import Any

from tests import preloaded


def missing() -> set[str]:
    return {preloaded.__name__, *preloaded.MODULES} - set(sys.modules)


def test_workers_are_forked_from_a_process_that_has_it_all(client: Any) -> None:
    """What cannot be imported there is left out without a word."""
    assert client.run(missing)
    assert not any(client.run(missing).values())
