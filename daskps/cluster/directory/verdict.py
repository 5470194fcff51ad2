"""Decides if a shard without an owner is away or lost, by what was seen of it.

Away while there is evidence of its memory, which is asked for again and again; lost
without. Nothing here knows a clock or a worker: who leads an adoption says what it
heard and when, in seconds of any clock that only rises, and does what is due.
"""

from __future__ import annotations

import enum
import math

from daskps.cluster.wire.reports import Sight

#: When an absence is no longer a matter of moments, and is said.
_SAY_SECONDS = 5.0
#: Between two questions: at first often, as a worker dies within milliseconds and the
#: next one comes within a second; then every second; rarely once a shard is lost.
FIRST_SECONDS, PAUSE_SECONDS, LOST_SECONDS = 0.05, 1.0, 10.0
#: The share of its absence that may pass between two questions.
_PATIENCE = 0.125


class Due(enum.Enum):
    """An action that a verdict asks for, each once."""

    #: Say that the shard is away, and why.
    SAY = enum.auto()
    #: End the runs that wait for it.
    END_RUNS = enum.auto()
    #: It is lost, until somebody finds it after all.
    LOSE = enum.auto()


class Verdict:
    """The evidence of one shard that its worker left, and what follows from it.

    Parameters
    ----------
    now : float
        When the worker left.
    lost_after : float
        Seconds without evidence after which it is lost.
    runs_end_after : float or None
        Seconds after which its runs end; None for never.
    """

    def __init__(
        self,
        now: float,
        *,
        lost_after: float,
        runs_end_after: float | None = None,
    ) -> None:
        self.is_lost = False
        self._left_at = self._evident_at = self._ask_at = now
        self._lost_after = lost_after
        end = math.inf if runs_end_after is None else runs_end_after
        self._found_at, self._absent = -math.inf, False
        self._to_come = {Due.SAY: now + _SAY_SECONDS, Due.END_RUNS: now + end}

    def see(self, sight: Sight, now: float) -> None:
        """Take in what one worker says, and when to ask again."""
        if sight is Sight.FOUND:
            self._evident_at = self._found_at = now
            self._absent = False
        elif sight is Sight.ABSENT:
            self._absent = True
        self.asked(now)

    def asked(self, now: float) -> None:
        """Note that a question was put; the answer may be long in coming."""
        self._ask_at = now + self._pause(now)

    def ask_now(self, now: float) -> None:
        """Ask at once, as where a worker came."""
        self._ask_at = now

    def is_to_ask(self, now: float) -> bool:
        """Return whether it is time for the next question."""
        return now >= self._ask_at

    def due(self, now: float, *, others: bool) -> list[Due]:
        """Return what is due now.

        Parameters
        ----------
        now : float
            The time.
        others : bool
            Whether there are workers on its machine that were not heard yet.
        """
        found = [what for what, at in self._to_come.items() if now >= at]
        for what in found:
            del self._to_come[what]
        is_silent = now >= self._evident_at + self._lost_after
        if not self.is_lost and (is_silent or (self._absent and not others)):
            self.is_lost = True
            # Its runs end by that.
            self._to_come.clear()
            return [Due.LOSE]
        return found

    def wakes_at(self) -> float:
        """Return when there is something to ask or to do next."""
        silent_at = math.inf if self.is_lost else self._evident_at + self._lost_after
        return min(self._ask_at, silent_at, *self._to_come.values())

    def _pause(self, now: float) -> float:
        if self.is_lost and now > self._found_at:
            return LOST_SECONDS
        since = (now - self._left_at) * _PATIENCE
        return min(max(FIRST_SECONDS, since), PAUSE_SECONDS, self._lost_after / 4)
