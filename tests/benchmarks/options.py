"""Options of benchmarks: a flag, and what argparse is told of it."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tests.benchmarks import against, clusters

if TYPE_CHECKING:
    from collections.abc import Callable

Option: TypeAlias = tuple[str, dict[str, Any]]


def number(flag: str, default: int | None = None, what: str = "") -> Option:
    """Return an option that takes a whole number, at least 1."""
    return _option(flag, _count, default, what)


def numbers(flag: str, default: list[int], what: str = "") -> Option:
    """Return an option that takes such numbers with commas in between."""
    return _option(flag, _counts, default, f"{what}, N,...".removeprefix(", "))


def duration(flag: str, default: float, what: str = "") -> Option:
    """Return an option that takes seconds, above 0."""
    return _option(flag, _duration, default, what)


def switch(flag: str, what: str) -> Option:
    """Return an option that is given or not."""
    return flag, {"action": "store_true", "help": what}


def reported(pairs: int) -> tuple[Option, ...]:
    """Return the options of a benchmark that ends in a report."""
    ways = "close a way to the shards; may be given several times"
    return (
        number("--pairs", pairs),
        JSON,
        ("--scheduler", {"metavar": "ADDRESS", "help": "of your own cluster"}),
        (
            "--close",
            {"action": "append", "default": [], "choices": clusters.WAYS, "help": ways},
        ),
    )


def beside_peers(pairs: int) -> tuple[Option, ...]:
    """Return the options of a benchmark that sets jobs against the peers."""
    names = f"of {', '.join(against.PEERS)} [all that are installed]"
    return (
        *reported(pairs),
        ("--peers", {"metavar": "NAME,...", "type": _peers, "help": names}),
        duration("--seconds", 0.3, "of a sample"),
        ("--job", {"default": "", "help": "only jobs whose title contains this"}),
    )


def _option(
    flag: str, kind: Callable[[str], Any], default: object, what: str
) -> Option:
    shown = "" if default is None else " [%(default)s]"
    return flag, {"type": kind, "default": default, "help": f"{what}{shown}".strip()}


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no whole number that is at least 1"
        )
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(one) for one in text.split(",")]


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


def _peers(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(against.PEERS):
        raise argparse.ArgumentTypeError(
            f"no peer {', '.join(sorted(unknown))}; there are {', '.join(against.PEERS)}"
        )
    return names


JSON: Option = (
    "--json",
    {"metavar": "FILE", "type": _file, "help": "write all samples, too"},
)
