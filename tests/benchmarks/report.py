"""The one runner and the one report: a table of jobs, JSON, and the machine of both."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from tests.benchmarks.samples import Job, LeftOutError

if TYPE_CHECKING:
    from argparse import Namespace

#: Packages whose versions decide what is measured.
_PACKAGES = ("daskps", "dask", "distributed", "numpy", "numba", "torch", "zarr")
HEADER = f"{'job':<48}{'beside':<24}{'ours':>10}{'other':>10}  other / ours"


class Verdict(NamedTuple):
    """A line about something that must hold."""

    text: str
    is_kept: bool


#: Of what benchmarks yield: a dict goes to the file of ``--json`` alone.
Found: TypeAlias = Job | str | Verdict | dict[str, Any]


def run(options: Namespace, measure: Callable[[Namespace], Iterator[Found]]) -> int:
    """Measure and print all that a benchmark yields; return 1 if something did not hold."""
    report = _Report(options)
    try:
        for found in measure(options):
            report.add(found)
    except LeftOutError as error:
        report.add(f"left out the rest: {error}")
    return report.end()


class _Report:
    """The jobs and lines of one benchmark; prints the machine and the table's head."""

    def __init__(self, options: Namespace) -> None:
        self._options, self._load = options, os.getloadavg()[0]
        self._jobs: list[Job] = []
        self._content: dict[str, Any] = {"notes": [], "verdicts": []}
        print(f"{machine(self._load)}\n{HEADER}")

    def add(self, found: Found) -> None:
        """Measure a job whose title was asked for; print what there is to say."""
        if isinstance(found, dict):
            self._content |= found
        elif isinstance(found, Verdict):
            self._content["verdicts"].append([*found])
            print(f"{found.text}: {'kept' if found.is_kept else 'MISSED'}", flush=True)
        elif isinstance(found, str):
            self._content["notes"].append(found)
            print(found, flush=True)
        elif self._options.job in found.title:
            try:
                found.measure(self._options.pairs)
            except LeftOutError as error:
                said = f"{error}".strip().splitlines()[-1]
                self.add(f"left out {found.title}: {said}")
                return
            self._jobs.append(found)
            print("\n".join(lines(found)), flush=True)

    def end(self) -> int:
        """Write the file of ``--json``; return the exit status."""
        bars = [bar.is_kept(job.found) for job in self._jobs for bar in job.bars]
        if bars:
            print(f"{sum(bars)} bars of {len(bars)} kept")
        if not (self._jobs or self._content["notes"] or self._content["verdicts"]):
            print("nothing was measured: no job is left by these options")
        if self._options.json:
            about = {
                "machine": {
                    "cores": os.cpu_count(),
                    "processor": _processor(),
                    "load": self._load,
                    "versions": versions(),
                },
                "options": vars(self._options),
                "jobs": [job.plain() for job in self._jobs],
            }
            text = json.dumps(about | self._content, indent=1, default=str)
            Path(self._options.json).write_text(text + "\n", encoding="utf-8")
        return 0 if all(kept for _, kept in self._content["verdicts"]) else 1


def lines(job: Job) -> Iterator[str]:
    """Yield the lines of a job: one for each side beside ours, and one for each bar."""
    ours, *others = job.found
    shown = rate if job.is_rate else duration
    first = shown(job.median(ours))
    if not others:
        every = sorted(sample.seconds for sample in job.found[ours])
        ends = f"({shown(every[0])} to {shown(every[-1])})"
        yield f"{job.title:<47} {'':<24}{first:>10}  {ends}{_more(job, ours)}"
    for name in others:
        ratios = job.ratios(name)
        median, low, high = map(
            _ratio, (statistics.median(ratios), min(ratios), max(ratios))
        )
        yield (
            f"{job.title:<47} {name:<23} {first:>10}{shown(job.median(name)):>10}"
            f"  {median} ({low}-{high}){_more(job, ours, name)}"
        )
    for bar in job.bars:
        reached = bar.reached(job.found)
        sides = (bar.beside, bar.side) if bar.at_least else (bar.side, bar.beside)
        what = " / ".join(filter(None, sides)) + (f", {bar.of}" if bar.of else "")
        yield (
            f"    {what}: {statistics.median(reached):.3g} ({min(reached):.3g}-"
            f"{max(reached):.3g}), bar {'>=' if bar.at_least else '<='} {bar.limit:.3g}: "
            f"{'kept' if bar.is_kept(job.found) else 'MISSED'}"
        )


def _more(job: Job, *sides: str) -> str:
    """Return the other figures of sides, as far as they have them."""
    names = dict.fromkeys(name for side in sides for name in job.found[side][0].more)
    found = []
    for name in names:
        shown = SHOWN.get(name, duration)
        each = [
            shown(job.median(side, name)) if name in job.found[side][0].more else "-"
            for side in sides
        ]
        found.append(f"  {name} {', '.join(each)}")
    return ";".join(found)


def _ratio(number: float) -> str:
    return f"{number:.2f}" if number >= 0.1 else f"{number:.2g}"


def rate(seconds: float) -> str:
    """Return steps a second."""
    return f"{1 / seconds:,.0f}/s"


def duration(seconds: float) -> str:
    """Return seconds with the unit that suits them."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e9:.3g} ns"


#: Figures of samples that are no seconds.
SHOWN: dict[str, Callable[[float], str]] = {
    "by socket": "{:.0%}".format,
    "a second": "{:,.0f}".format,
    "messages": "{:.2f}".format,
    "faults": "{:.0f}".format,
    "GB/s": "{:.2f}".format,
    "of the bytes": "{:.4f}".format,
}


def machine(load: float) -> str:
    """Return the machine, its load and the versions, in two lines."""
    found = ", ".join(f"{name} {version}" for name, version in versions().items())
    return (
        f"{os.cpu_count()} cores ({_processor()}), load {load:.2f}\n"
        f"Python {platform.python_version()}, {found}"
    )


def versions() -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    names = (
        s.partition(":")[2].strip() for s in text.splitlines() if "model name" in s
    )
    return next(names, platform.processor() or platform.machine())
