"""The end of a run before its last epoch, and its new start after an error."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from daskps import config
from daskps.errors import DaskPSError
from daskps.store.arguments import whole
from daskps.training.plateau import ReduceOnPlateau
from daskps.training.result import Epoch
from daskps.training.stop import Condition, Reached

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from daskps.epochs import Epochs
    from daskps.training.result import RunStatus


def check_metrics(stop: Any, validate: Any, callbacks: Sequence[object]) -> None:
    """Refuse a condition, or a plateau, of metrics that nobody works out.

    Raises
    ------
    ValueError
        Where there is no `validate`.
    """
    if validate is not None:
        return
    for each in callbacks:
        if isinstance(each, ReduceOnPlateau) and each.metric is not None:
            raise ValueError(
                f"ReduceOnPlateau looks at {each.metric!r:.60} of validate, which is None; "
                f"pass validate=f, where f(params) returns it"
            )
    if isinstance(stop, Condition) and stop.metrics:
        names = ", ".join(map(repr, sorted(stop.metrics)))
        raise ValueError(
            f"stop={stop!r} looks at {names} of validate, which is None; pass "
            f"validate=f, where f(params) returns it"
        )


class StopNow(Exception):  # noqa: N818 - no error: trainers return as at its end
    """A run is to end at the round that it is at."""


class EarlyEnd:
    """Looks whether a run is to end before its last epoch.

    Parameters
    ----------
    stop : callable or None
        The argument of a caller: a condition, or a function of the history.
    """

    def __init__(self, stop: Any) -> None:
        self._condition = stop if isinstance(stop, Condition) else None
        #: Rounds of the store before the run, since its epoch 0.
        self.before = 0
        #: The epoch of the store that the run begins with, and how many of its rounds
        #: there were before.
        self.first = self._since = 0
        self._began = time.monotonic()

    @property
    def is_sudden(self) -> bool:
        """Whether every round that is heard of has to be looked at."""
        return self._condition is not None and self._condition.is_sudden

    def begin(self, at: Epochs, rounds: int) -> int | None:
        """Return how many rounds a run that begins there may have; None for any number.

        `rounds` are those of an epoch.
        """
        self.first, self._since, self._began = at.ended, at.within, time.monotonic()
        self.before = at.first * rounds + at.clock
        limit = None if self._condition is None else self._condition.limit
        return None if limit is None else max(limit - self.before, 0)

    def look(self, status: RunStatus) -> None:
        """Raise `StopNow` where the run is to end within an epoch."""
        # Rounds that all have ended: that of the furthest would be taken back.
        if not self.is_sudden or self._condition is None or not status.slowest:
            return
        spent = sum(epoch.seconds for epoch in status.history) + self.seconds
        step = self.before + status.slowest
        if self._condition.holds(Reached(status.history, step, spent)):
            raise StopNow

    @property
    def seconds(self) -> float:
        """How long the epoch under way has taken."""
        return time.monotonic() - self._began

    def entry(self, event: Mapping[str, Any], metrics: dict[str, float]) -> Epoch:
        """Return what a history has of an epoch that its trainers have reported."""
        reports = sorted(event["reports"], key=lambda r: int(r["rank"]))
        rows = sum(r["rows"] for r in reports)
        losses = [r["loss"] for r in reports if r["loss"] is not None]
        self._began = time.monotonic()
        return Epoch(
            epoch=self.first + event["epoch"],
            loss=sum(losses) / rows if losses and rows else None,
            metrics=metrics,
            seconds=max(r["seconds"] for r in reports),
            staleness=max(r["lag"] for r in reports),
            since=0 if event["epoch"] else self._since,
            step=self.before + max(r["clock"] for r in reports),
        )

    def open_entry(
        self, status: RunStatus, end: Epochs, metrics: dict[str, float]
    ) -> Epoch:
        """Return what a history has of an epoch within which its run was stopped."""
        epoch = end.ended if end.within else end.ended - 1
        return Epoch(
            epoch=epoch,
            loss=status.loss,
            metrics=metrics,
            seconds=self.seconds,
            staleness=0,
            since=self._since if epoch == self.first else 0,
            step=end.rounds,
        )


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

    Refusals of the store are no accidents, and no trainer raised errors of the cluster.
    """
    # One that came in a message is a DaskPSError, of no class below it.
    is_ours = isinstance(error, DaskPSError) and type(error) is not DaskPSError
    if is_ours or isinstance(error, TimeoutError):
        return False
    notes = getattr(error, "__notes__", ())
    return any(str(note).startswith(RAISED_IN) for note in notes)
