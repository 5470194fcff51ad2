"""Jobs: the same thing by several sides, measured in turn, and the bars between them.

A slow moment of the machine meets all sides of a round alike, so what counts is the ratio
of two sides within a round, and the median of these.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

#: Bounds of the steps of one sample.
FEWEST, MOST = 3, 50_000


class LeftOutError(RuntimeError):
    """A side cannot be measured here, or failed; the other jobs go on."""


@dataclass(frozen=True)
class Sample:
    """One measurement of a side: seconds of a step, and other figures by their names."""

    seconds: float
    #: Seconds too, but for those that `report.SHOWN` shows as something else.
    more: Mapping[str, float] = field(default_factory=dict)

    def figure(self, name: str) -> float:
        """Return one of `more`, or the seconds for an empty name."""
        return self.more[name] if name else self.seconds


#: Takes a sample; plain seconds are one.
Side: TypeAlias = Callable[[], Sample | float]


@dataclass(frozen=True)
class Bar:
    """The aim of a side: a multiple of another side, or a number."""

    side: str
    #: The side it is set against; "" for the number itself.
    beside: str
    limit: float
    #: A figure of the samples; "" for the seconds.
    of: str = ""
    #: Whether less than the limit is missed, instead of more.
    at_least: bool = False

    def reached(self, found: Mapping[str, Sequence[Sample]]) -> list[float]:
        """Return what was reached, round by round; at least: the other's over ours."""
        ours = [sample.figure(self.of) for sample in found[self.side]]
        if not self.beside:
            return ours
        theirs = [sample.figure(self.of) for sample in found[self.beside]]
        pairs = zip(ours, theirs, strict=True)
        return [b / a if self.at_least else a / b for a, b in pairs]

    def is_kept(self, found: Mapping[str, Sequence[Sample]]) -> bool:
        """Tell whether the median of the rounds keeps it."""
        median = statistics.median(self.reached(found))
        return median >= self.limit if self.at_least else median <= self.limit


@dataclass
class Job:
    """One thing that is measured; ours is the first of its sides."""

    title: str
    sides: Mapping[str, Side]
    bars: Sequence[Bar] = ()
    #: Whether reports show steps a second rather than the time of one.
    is_rate: bool = False
    #: Samples of each side that are not kept, at the beginning.
    warm: int = 0
    found: dict[str, list[Sample]] = field(default_factory=dict)

    def measure(self, rounds: int) -> None:
        """Take so many samples of each side; who begins changes from round to round."""
        for _ in range(self.warm):
            for side in self.sides.values():
                side()
        for i in range(rounds):
            order = [*self.sides.items()]
            for name, side in order if i % 2 == 0 else reversed(order):
                taken = side()
                sample = taken if isinstance(taken, Sample) else Sample(taken)
                self.found.setdefault(name, []).append(sample)

    def median(self, side: str, of: str = "") -> float:
        """Return the median of a figure, by default of the seconds."""
        return statistics.median(sample.figure(of) for sample in self.found[side])

    def ratios(self, beside: str) -> list[float]:
        """Return another side's seconds over ours, per round: above 1, ours is faster."""
        ours, theirs = self.found[next(iter(self.found))], self.found[beside]
        return [b.seconds / a.seconds for a, b in zip(ours, theirs, strict=True)]

    def plain(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        samples = {name: [vars(s) for s in taken] for name, taken in self.found.items()}
        bars = [vars(bar) | {"kept": bar.is_kept(self.found)} for bar in self.bars]
        return {"job": self.title, "samples": samples, "bars": bars}


def seconds(
    act: Callable[[], object],
    n: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the seconds of one of n calls, made one after the other."""
    began = clock()
    for _ in range(n):
        act()
    return (clock() - began) / n


def timed(
    act: Callable[[], object],
    steps: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the seconds of one of `steps` steps, after a tenth as many to warm up."""
    for _ in range(max(2, steps // 10)):
        act()
    return seconds(act, steps, clock)


def steps_in(duration: float, measure: Callable[[int], float]) -> int:
    """Return how many steps take about so long; warms them up.

    `measure` runs a number of steps and returns the seconds of one.
    """
    steps = FEWEST
    for _ in range(2):  # a few steps tell little about fast ones
        steps = int(min(max(duration / measure(steps), FEWEST), MOST))
        if steps < 10 * FEWEST:
            break
    return steps


def lasting(duration: float, measure: Callable[[int], float]) -> Side:
    """Return a side of as many steps as take so long, which its first sample finds."""
    steps: list[int] = []

    def side() -> float:
        if not steps:
            steps.append(steps_in(duration, measure))
        return measure(steps[0])

    return side
