"""Whether a run that has failed is begun anew: for which errors, and how often."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from daskps import config
from daskps.errors import DaskPSError
from daskps.store.arguments import whole

if TYPE_CHECKING:
    from collections.abc import Callable

#: How the notes begin that say which trainer or round an error was raised in.
RAISED_IN = "raised in "


@dataclass
class Retries:
    """How often a run may be begun anew, and when it was.

    BigDL counts so: its retries are for failures that come soon after each other, see
    Dai et al., "BigDL: A distributed deep learning framework for big data", SoCC 2019.

    Parameters
    ----------
    most : int
        How often within `window` seconds.
    window : float
        Seconds after which a failure no longer counts.
    clock : callable
        Returns the time in seconds.
    """

    most: int = 0
    window: float = math.inf
    clock: Callable[[], float] = time.monotonic
    _failures: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, retries: Any, window: Any) -> Retries:
        """Return what two arguments of `train` say.

        Raises
        ------
        ValueError, TypeError
            For a negative number, and for what is no duration.
        """
        seconds = config.deadline(window, "retry_window")
        most = whole(retries, "retries", least=0)
        return cls(most, math.inf if seconds is None else seconds)

    def fail(self, error: Exception) -> bool:
        """Count a failure; return whether the run may be begun anew after it."""
        if not self.most or not is_users(error):
            return False
        now = self.clock()
        recent = [then for then in self._failures if now - then < self.window]
        self._failures = [*recent, now]
        return len(self._failures) <= self.most


def is_users(error: Exception) -> bool:
    """Return whether code of the user's raised it in a run: gradient, rule or reduce.

    What the store refuses is no accident, and what the cluster raises no trainer did.
    """
    if isinstance(error, (DaskPSError, TimeoutError)):
        return False
    notes = getattr(error, "__notes__", ())
    return any(str(note).startswith(RAISED_IN) for note in notes)
