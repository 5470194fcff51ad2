"""Samples of ways that alternate, the bars between them, and the table of both."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


@dataclass(frozen=True)
class WaySample:
    """Calls of one way, made one after the other; microseconds."""

    took: tuple[float, ...]
    #: CPU time of a call, in the caller's process and in the one that answers.
    caller: float = math.nan
    server: float = math.nan
    #: Which part of the calls took a lane.
    by_lane: float = math.nan
    #: Calls a second, where many are made at a time.
    rate: float = math.nan


#: Takes a sample.
TakesSample: TypeAlias = "Callable[[], WaySample]"


@dataclass(frozen=True)
class Bar:
    """What a way should reach, as a multiple of another way or as a number."""

    way: str
    #: The way it is set against; "" for the number itself.
    beside: str
    limit: float
    #: A percentile such as "p50", or "rate".
    of: str = "p50"
    #: Whether less than the limit is missed, instead of more.
    at_least: bool = False

    def ratios(self, found: Mapping[str, Sequence[WaySample]]) -> list[float]:
        """Return what was reached, round by round.

        A bar of at least so much sets the other way's time above ours.
        """
        ours = [_figure(s, self.of) for s in found[self.way]]
        if not self.beside:
            return ours
        theirs = [_figure(s, self.of) for s in found[self.beside]]
        pairs = zip(ours, theirs, strict=True)
        if self.at_least and self.of != "rate":
            return [b / a for a, b in pairs]
        return [a / b for a, b in pairs]

    def verdict(self, found: Mapping[str, Sequence[WaySample]]) -> dict[str, Any]:
        """Return the median of what was reached, its range, and whether it is kept."""
        ratios = self.ratios(found)
        ratio = float(np.median(ratios))
        kept = ratio >= self.limit if self.at_least else ratio <= self.limit
        return {
            "what": self._what(),
            "ratio": ratio,
            "range": [min(ratios), max(ratios)],
            "limit": self.limit,
            "at_least": self.at_least,
            "kept": bool(kept),
        }

    def _what(self) -> str:
        of = "" if self.of == "p50" else f", {self.of}"
        if not self.beside:
            return f"{self.way}{of or ', p50'}"
        if self.at_least and self.of != "rate":
            return f"{self.beside} / {self.way}{of}"
        return f"{self.way} / {self.beside}{of}"


def _figure(sample: WaySample, of: str) -> float:
    if of == "rate":
        return sample.rate
    return float(np.percentile(sample.took, int(of[1:])))


@dataclass
class Row:
    """One job: its ways, measured in turn, and their bars."""

    job: str
    sides: dict[str, TakesSample]
    bars: Sequence[Bar] = ()
    found: dict[str, list[WaySample]] = field(default_factory=dict)

    def measure(self, rounds: int) -> None:
        """Take so many samples of each way; who begins changes from round to round."""
        for i in range(rounds):
            order = [*self.sides.items()]
            for way, side in order if i % 2 == 0 else reversed(order):
                self.found.setdefault(way, []).append(side())

    def lines(self) -> Iterator[str]:
        """Yield what was found, as lines of the table."""
        yield self.job
        for way in self.sides:
            samples = self.found[way]
            took = [us for s in samples for us in s.took]
            p50, p99 = np.percentile(took, [50, 99])
            shown = "".join(_shown(of, samples) for of in ("caller", "server"))
            lane = _median("by_lane", samples)
            ends = "" if math.isnan(lane) else f"{lane:>8.0%}"
            rate = _median("rate", samples)
            ends += "" if math.isnan(rate) else f"  {rate:,.0f} a second"
            yield f"  {way:<34}{p50:>10,.0f}{p99:>10,.0f}{shown}{ends}"
        for bar in self.bars:
            found = bar.verdict(self.found)
            low, high = found["range"]
            sign = ">=" if bar.at_least else "<="
            kept = "kept" if found["kept"] else "MISSED"
            yield (
                f"    {found['what']}: {found['ratio']:.3g} ({low:.3g}-{high:.3g}), "
                f"bar {sign} {bar.limit:g}: {kept}"
            )

    def plain(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        found = {
            way: [vars(sample) for sample in samples]
            for way, samples in self.found.items()
        }
        bars = [bar.verdict(self.found) for bar in self.bars]
        return {"job": self.job, "samples": found, "bars": bars}


HEADER = (
    f"  {'way':<34}{'p50 us':>10}{'p99 us':>10}{'CPU us':>9}{'server':>9}{'by lane':>8}"
)


def _median(of: str, samples: Sequence[WaySample]) -> float:
    return float(np.median([getattr(sample, of) for sample in samples]))


def _shown(of: str, samples: Sequence[WaySample]) -> str:
    median = _median(of, samples)
    return f"{'':>9}" if math.isnan(median) else f"{median:>9,.0f}"
