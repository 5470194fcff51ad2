"""Two things measured in turn, so that a slow moment of the machine meets both."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

#: Bounds of the steps of one sample.
FEWEST, MOST = 3, 50_000


#: Seconds of ours and of a peer's; the i-th ones were measured one after the other.
Samples: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True)
class Comparison:
    """Seconds of one step of ours and of a peer's, pair by pair."""

    job: str
    peer: str
    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    #: The ways from our trainers to the shards, as `stats()` names them.
    ways: tuple[str, ...] = ()
    #: Whether reports show steps a second rather than the time of one.
    is_rate: bool = False

    @property
    def ratios(self) -> list[float]:
        """The peer's time over ours, per pair: above 1, ours is faster."""
        return [b / a for a, b in zip(self.ours, self.theirs, strict=True)]

    @property
    def ratio(self) -> float:
        """Median of the ratios."""
        return statistics.median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """Smallest and largest ratio."""
        return min(self.ratios), max(self.ratios)

    @property
    def medians(self) -> tuple[float, float]:
        """Median seconds of ours and of theirs."""
        return statistics.median(self.ours), statistics.median(self.theirs)


def seconds(
    action: Callable[[], object],
    n: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the seconds of one of n calls, made one after the other."""
    began = clock()
    for _ in range(n):
        action()
    return (clock() - began) / n


def alternate(
    ours: Callable[[], float], theirs: Callable[[], float], pairs: int
) -> Samples:
    """Measure so many pairs; who begins changes from pair to pair."""
    a: list[float] = []
    b: list[float] = []
    for i in range(pairs):
        order = ((ours, a), (theirs, b))
        for measure, found in order if i % 2 == 0 else reversed(order):
            found.append(measure())
    return tuple(a), tuple(b)


def steps_in(seconds: float, measure: Callable[[int], float]) -> int:
    """Return how many steps take about so long; warms them up.

    `measure` runs a number of steps and returns the seconds of one.
    """
    steps = FEWEST
    for _ in range(2):  # a few steps tell little about fast ones
        steps = int(min(max(seconds / measure(steps), FEWEST), MOST))
        if steps < 10 * FEWEST:
            break
    return steps
