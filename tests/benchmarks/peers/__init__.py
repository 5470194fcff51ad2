"""Other systems doing the same jobs, each described by the `PEER` of its module.

Everything they start listens on this machine alone and is ended by its handle.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from tests.benchmarks.jobs import Measure, StepJob


class PeerError(RuntimeError):
    """A peer did not start, or failed at its job."""


@dataclass(frozen=True)
class Peer:
    """Another system."""

    title: str
    #: Starts its processes for so many trainers and servers, or uses the workers of a
    #: client; gives a function that measures jobs of this shape.
    opened: Callable[[int, int, Any], AbstractContextManager[Measure]]
    #: Returns why it cannot be measured here; None where it can.
    missing: Callable[[], str | None] = lambda: None
    #: Tells whether it does a job.
    covers: Callable[[StepJob], bool] = lambda job: True


def lacking(package: str) -> str | None:
    """Return that a package is not installed; None where it is."""
    found = importlib.util.find_spec(package) is not None
    return None if found else f"{package} is not installed"
