"""Calls between machines: by lane and by message, beside bare sockets and other systems.

Ways alternate within one run. Memory that is shared on one machine is closed: what a
worker reaches without a message is in its own process, as between machines.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed import Client

from tests.benchmarks import clusters, report
from tests.benchmarks.between import bars, namespaces, tables
from tests.benchmarks.between.calls import Pair
from tests.benchmarks.between.crowd import CrowdError
from tests.benchmarks.between.rows import HEADER, Row
from tests.benchmarks.options import JSON, duration, number

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterable, Iterator

#: Rows by the name that chooses them, in the order of the table.
ROWS: dict[str, Callable[[Pair, Namespace], Iterable[Row | str]]] = {
    "small": bars.small,
    "step": bars.steps,
    "peers": bars.peers,
    "large": bars.large,
    "rows": tables.rows,
    "busy": bars.busy_server,
    "many": bars.many,
    "tls": bars.tls,
}
NETWORK = "network"
NAMES = [*ROWS, NETWORK]
#: Rounds there: what a rate lets through scatters less, and takes longer.
MOST_ROUNDS = 3
#: Open files that a thousand connections need, at both ends.
FILES = 8192


@contextmanager
def _local(*, tls: bool) -> Iterator[Pair]:
    """Start two workers that share no memory."""
    options: dict[str, Any] = {}
    if tls:
        from distributed.security import Security

        options = {"security": Security.temporary(), "protocol": "tls"}
    with clusters.local(2, close=["machine"], **options) as client:
        yield Pair.of(client, tls=tls)


def _room() -> None:
    """Let this process and its workers open so many files, where they may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FILES:
        most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class _Table:
    """Measures rows and prints them."""

    def __init__(self, options: Namespace) -> None:
        self._options = options
        #: What was measured, and what there is to say besides: also what was left out.
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def add(self, found: Iterable[Row | str]) -> None:
        """Measure and print rows, and lines between them."""
        try:
            for row in found:
                if isinstance(row, str):
                    self.say(row)
                    continue
                row.measure(self._options.rounds)
                print("\n".join(row.lines()), flush=True)
                self.rows.append(row.plain())
        except CrowdError as error:
            self.say(f"left out the rest of these rows: {error}")

    def say(self, line: str) -> None:
        """Print a line that is none of a row."""
        self.notes.append(line)
        print(line, flush=True)

    def network(self) -> None:
        """Measure between two network namespaces, in processes of their own."""
        options = self._options
        if reason := namespaces.missing():
            self.say(f"left out two network namespaces: {reason}")
            return
        print(f"between two network namespaces, {options.rate}:", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows"
            rounds = min(options.rounds, MOST_ROUNDS)
            given = [f"--rounds={rounds}", f"--calls={options.calls}"]
            status = namespaces.run(options.rate, ["wire", *given, "--json", str(file)])
            if status or not file.exists():
                self.say(f"left out the rest of these: they ended with {status}")
                return
            found = json.loads(file.read_text("utf-8"))
        self.rows += [row | {"rate": options.rate} for row in found["rows"]]
        self.notes += found["notes"]

    def end(self) -> None:
        """Print how many bars are kept."""
        kept = [bar["kept"] for row in self.rows for bar in row["bars"]]
        print(f"{sum(kept)} bars of {len(kept)} kept")


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(NAMES):
        raise argparse.ArgumentTypeError(
            f"no rows {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}"
        )
    return names


OPTIONS = (
    number("--rounds", 5),
    number("--calls", 400, "of one sample, fewer of large arrays"),
    duration("--seconds", 1.0, "of a sample of many connections"),
    ("--only", {"type": _names, "default": NAMES, "help": f"of {', '.join(NAMES)}"}),
    ("--rate", {"default": "1gbit", "help": "between namespaces [%(default)s]"}),
    ("--scheduler", {"metavar": "ADDRESS", "help": "two workers of your own cluster"}),
    JSON,
)


def run(options: Namespace) -> None:
    """Measure and print."""
    load, table = os.getloadavg()[0], _Table(options)
    if options.scheduler is not None:
        with Client(options.scheduler) as client:
            table.add(bars.between(Pair.of(client), options))
    else:
        _room()
        print(f"{report.machine(load)}\n{HEADER}")
        for tls in (False, True):
            names = [name for name in options.only if name in ROWS]
            names = [name for name in names if (name == "tls") is tls]
            if names:
                with _local(tls=tls) as pair:
                    for name in names:
                        table.add(ROWS[name](pair, options))
        if NETWORK in options.only:
            table.network()
        table.end()
    report.write("wire", options, load, rows=table.rows, notes=table.notes)
