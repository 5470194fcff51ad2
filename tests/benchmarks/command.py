"""The command line, and what a benchmark is: a function that yields what it measures.

It gets the options and yields jobs, which `report` measures, lines to print, verdicts, and
plain values for the file of ``--json``.
"""

from __future__ import annotations

import argparse
import importlib
import math
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import tests.benchmarks
from tests.benchmarks import report

#: A flag, and what argparse is told of it.
Option: TypeAlias = tuple[str, dict[str, Any]]
Measures: TypeAlias = Callable[[argparse.Namespace], Iterator[report.Found]]


class Benchmark(NamedTuple):
    """A registered benchmark."""

    measure: Measures
    about: str
    options: tuple[Option, ...]


#: By name; `load` fills it.
BENCHMARKS: dict[str, Benchmark] = {}


def benchmark(
    name: str, about: str, *options: Option, pairs: int = 7
) -> Callable[[Measures], Measures]:
    """Register a function as a benchmark; `pairs` is how often each job is measured."""
    common = (
        number("--pairs", pairs, "samples of each side"),
        ("--job", {"default": "", "help": "only jobs whose title contains this"}),
        (
            "--json",
            {"metavar": "FILE", "type": _file, "help": "write all samples, too"},
        ),
    )

    def register(measure: Measures) -> Measures:
        BENCHMARKS[name] = Benchmark(measure, about, (*common, *options))
        return measure

    return register


def load() -> None:
    """Import all modules here, so that their benchmarks are registered."""
    package = tests.benchmarks
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark that a command line names; return its exit status."""
    load()
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        description="Measure daskps, and what is set beside it, side by side.",
        epilog="NAME --help tells the options of each.",
    )
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, (_, about, options) in sorted(BENCHMARKS.items()):
        one = names.add_parser(name, help=about, description=f"Measure {about}.")
        for flag, how in options:
            one.add_argument(flag, **how)
    given = parser.parse_args(argv)
    return report.run(given, BENCHMARKS[given.name].measure)


def number(flag: str, default: int | None = None, what: str = "") -> Option:
    """Return an option that takes a whole number, at least 1."""
    return _option(flag, _count, default, what)


def numbers(flag: str, default: list[int], what: str = "") -> Option:
    """Return an option that takes such numbers with commas in between."""
    kind = _listed(_count)
    return _option(flag, kind, default, f"{what}, N,...".removeprefix(", "))


def duration(flag: str, default: float, what: str = "") -> Option:
    """Return an option that takes seconds, above 0."""
    return _option(flag, _duration, default, what)


def switch(flag: str, what: str) -> Option:
    """Return an option that is given or not."""
    return flag, {"action": "store_true", "help": what}


def parts(names: Sequence[str]) -> Option:
    """Return an option that chooses some of the parts of a benchmark."""

    def one(text: str) -> str:
        if text not in names:
            said = f"there is no part {text}; there are {', '.join(names)}"
            raise argparse.ArgumentTypeError(said)
        return text

    return _option("--only", _listed(one), [*names], "parts, NAME,...")


def _option(flag: str, kind: Callable[[str], Any], default: Any, what: str) -> Option:
    shown = "" if default is None else " [%(default)s]"
    return flag, {"type": kind, "default": default, "help": f"{what}{shown}".strip()}


def _listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(one) for one in text.split(",")]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        said = f"{text!r} is no whole number that is at least 1"
        raise argparse.ArgumentTypeError(said)
    return int(text)


def _duration(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return found


def _file(path: str) -> str:
    # Not after minutes of measuring.
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {folder}")
    return path
