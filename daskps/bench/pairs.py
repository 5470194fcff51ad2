"""Two things measured in turn, so that a slow moment of the machine meets both."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from daskps.bench.cores import full

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.bench.cores import Looks

#: Bounds of the steps of one sample.
FEWEST, MOST = 3, 50_000
#: So many undisturbed pairs speak for all.
ENOUGH = 3
#: Pairs that are measured in search of undisturbed ones, per pair that is wanted.
PATIENCE = 3


@dataclass(frozen=True)
class Effort:
    """How many pairs, how many seconds a sample takes, about, and what looks at cores."""

    pairs: int
    seconds: float
    looks: Looks | None = None


class Samples(NamedTuple):
    """What was measured in turn: seconds of both, and the worst look around each pair."""

    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    looks: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """Seconds of one step of ours and of a peer's, pair by pair.

    Parameters
    ----------
    job, peer : str
        What was measured, and against whom.
    ours, theirs : tuple of float
        Seconds of a step; the i-th ones were measured one after the other.
    looks : tuple of float
        Seconds of the worst look at the cores around each pair; empty if nobody looked.
    ways : tuple of str
        The ways from our trainers to the shards, as `stats()` names them.
    is_rate : bool
        Whether reports show steps a second rather than the time of one.
    best : float
        Seconds of the best look known, where that is none of these.
    """

    job: str
    peer: str
    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    looks: tuple[float, ...] = ()
    ways: tuple[str, ...] = ()
    is_rate: bool = False
    best: float = math.inf

    @property
    def undisturbed(self) -> tuple[int, ...]:
        """The pairs around which all looks found the cores at full speed."""
        return full(self.looks, self.best)

    @property
    def counted(self) -> tuple[int, ...]:
        """The pairs of all figures: those undisturbed, if they are `ENOUGH`, or all."""
        found = self.undisturbed
        return found if len(found) >= ENOUGH else tuple(range(len(self.ours)))

    @property
    def ratios(self) -> list[float]:
        """The peer's time over ours, per counted pair: above 1, ours is faster."""
        return [self.theirs[i] / self.ours[i] for i in self.counted]

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
        """Median seconds of ours and of theirs, in the counted pairs."""
        ours, theirs = (
            statistics.median(side[i] for i in self.counted)
            for side in (self.ours, self.theirs)
        )
        return ours, theirs


def seconds(action: Callable[[], object], n: int = 1) -> float:
    """Measure calls.

    Parameters
    ----------
    action : callable
        What is called.
    n : int
        How often, one call after the other.

    Returns
    -------
    float
        Seconds of one of them.
    """
    began = time.perf_counter()
    for _ in range(n):
        action()
    return (time.perf_counter() - began) / n


def alternate(
    ours: Callable[[], float],
    theirs: Callable[[], float],
    pairs: int,
    looks: Looks | None = None,
) -> Samples:
    """Measure in turn.

    Parameters
    ----------
    ours, theirs : callable
        Return seconds.
    pairs : int
        How many.
    looks : Looks, optional
        Looks at the cores before, between and after all samples. Then it is so many
        undisturbed pairs that are wanted, and up to `PATIENCE` times as many are taken.

    Returns
    -------
    Samples
        Who begins changes from pair to pair.
    """
    a: list[float] = []
    b: list[float] = []
    seen = [looks()] if looks else []
    while len(a) < PATIENCE * pairs:
        undisturbed = len(full(_worst(seen), looks.best)) if looks else len(a)
        if undisturbed >= pairs:
            break
        order = ((ours, a), (theirs, b))
        for measure, found in order if len(a) % 2 == 0 else reversed(order):
            found.append(measure())
            if looks:
                seen.append(looks())
    return Samples(tuple(a), tuple(b), _worst(seen))


def _worst(looks: Sequence[float]) -> tuple[float, ...]:
    """Return the worst look around each pair: pairs share the look between them."""
    return tuple(max(looks[i : i + 3]) for i in range(0, len(looks) - 1, 2))


def steps_in(seconds: float, measure: Callable[[int], float]) -> int:
    """Return how many steps take about so long; warms them up.

    Parameters
    ----------
    seconds : float
        Of one sample.
    measure : callable
        Runs a number of steps and returns the seconds of one.

    Returns
    -------
    int
        At least `FEWEST`, at most `MOST`.
    """
    steps = FEWEST
    for _ in range(2):  # a few steps tell little about fast ones
        steps = int(min(max(seconds / measure(steps), FEWEST), MOST))
        if steps < 10 * FEWEST:
            break
    return steps
