"""The end of a worker's process."""

from __future__ import annotations

import atexit
import gc
from types import SimpleNamespace
from typing import Any

import pytest

from daskps.cluster import plugins


class Cycle:
    """Held by nobody but itself; says when it is finalized."""

    def __init__(self, finalized: list[bool]) -> None:
        self.itself, self.finalized = self, finalized

    def __del__(self) -> None:
        self.finalized.append(True)


def test_the_end_finalizes_what_nobody_holds_and_looks_at_nothing_else() -> None:
    finalized: list[bool] = []
    Cycle(finalized)
    before = gc.get_freeze_count()
    try:
        plugins.settle()
        assert finalized
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("nanny", [None, "tcp://127.0.0.1:1"])
def test_only_a_process_made_for_a_worker_ends_so(nanny: Any, monkeypatch: Any) -> None:
    """Also where the host is made twice, after a preload."""
    registered: list[Any] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(atexit, "unregister", lambda f: registered.clear())
    worker: Any = SimpleNamespace(nanny=nanny)
    for _ in range(2):
        plugins.quicken(worker)
    assert registered == ([plugins.settle] if nanny else [])
