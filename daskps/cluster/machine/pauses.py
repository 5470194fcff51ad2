"""Waiting for what another process writes, without ever being woken by it."""

from __future__ import annotations

import os
import time

#: Seconds that a waiter sleeps at first, and at most.
NAP, LONGEST_NAP = 20e-6, 500e-6


class Pause:
    """Waits a little, at first without sleeping, later longer each time.

    Parameters
    ----------
    spin : float
        Seconds without a sleep. Whatever else could use the processor gets it.
    """

    def __init__(self, spin: float) -> None:
        self._began, self._spin = time.perf_counter(), spin
        self._nap = NAP

    @property
    def seconds(self) -> float:
        """Seconds since it was made."""
        return time.perf_counter() - self._began

    def __call__(self) -> None:
        """Pause once."""
        if self.seconds < self._spin:
            # Lets other threads go on, too. `time.sleep(0)` takes 65 microseconds.
            os.sched_yield()
        else:
            time.sleep(self._nap)
            self._nap = min(self._nap * 1.5, LONGEST_NAP)
