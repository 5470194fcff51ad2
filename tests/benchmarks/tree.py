"""Steps of this checkout beside those of another one, in alternating samples.

Each side is a process with a cluster of two workers of its own, which waits while the
other one is measured.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import daskps
from tests.benchmarks.command import benchmark
from tests.benchmarks.samples import Job

if TYPE_CHECKING:
    from collections.abc import Iterator

STEPS = Path(__file__).with_name("steps_here.py")


#: The carriers that are closed for a job to go by one, under all their names.
CLOSED = {
    "nearest": (),
    "socket": ("ways.process", "carriers.process", "ways.machine", "carriers.machine"),
}
CLOSED["message"] = (*CLOSED["socket"], "ways.lane", "carriers.socket")


class Checkout:
    """The jobs of one checkout, whose calls go by one way to the shards."""

    def __init__(self, tree: Path, way: str) -> None:
        env = {**os.environ, "PYTHONPATH": str(tree)}
        for other in CLOSED[way]:
            env[f"DASK_DASKPS__{other.replace('.', '__').upper()}"] = "false"
        #: By job the ways that its last step said it took.
        self.carriers: dict[str, list[str]] = {}
        pipe = subprocess.PIPE
        command = [sys.executable, "-P", str(STEPS)]
        self._process = subprocess.Popen(
            command, cwd=tree, env=env, stdin=pipe, stdout=pipe, text=True
        )
        self.jobs = self._answer().split("\t")

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("a side ended; see above")
        return answer.rstrip("\n")

    def measure(self, job: str) -> float:
        """Return the seconds of one step."""
        assert self._process.stdin is not None
        print(job, file=self._process.stdin, flush=True)
        seconds, *self.carriers[job] = self._answer().split("\t")
        return float(seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Its input ends, and it with that.
        self._process.__exit__(None, None, None)


def _checkout(text: str) -> Path:
    tree = Path(text).resolve()
    if not (tree / "daskps" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is no checkout of daskps")
    return tree


@benchmark(
    "tree",
    "steps of this checkout, beside those of another one",
    ("tree", {"type": _checkout, "help": "the other checkout"}),
    (
        "--way",
        {"choices": [*CLOSED], "default": "nearest", "help": "how calls go to shards"},
    ),
    pairs=41,
)
def tree(options: argparse.Namespace) -> Iterator[Job]:
    """Yield a job for each kind of step."""
    here, there = Path(daskps.__file__).parents[1], options.tree
    with ExitStack() as stack:
        ours, theirs = (
            stack.enter_context(Checkout(tree, options.way)) for tree in (here, there)
        )
        for job in ours.jobs:
            sides = {"here": ours, there.name or "there": theirs}
            measured = {name: partial(of.measure, job) for name, of in sides.items()}
            yield Job(job, measured, warm=1)
            carriers = [side.carriers.get(job) for side in (ours, theirs)]
            if carriers[0] != carriers[1]:
                print(f"{job}: the two sides took other ways: {carriers}")
