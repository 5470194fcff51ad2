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
from typing import Self

import daskps
from tests.benchmarks.clusters import WAYS
from tests.benchmarks.options import number, switch
from tests.benchmarks.pairs import Comparison, alternate
from tests.benchmarks.report import line

STEPS = Path(__file__).with_name("steps_here.py")


class Checkout:
    """The jobs of one checkout; with `messages` its other ways are closed."""

    def __init__(self, tree: Path, *, messages: bool) -> None:
        env = {**os.environ, "PYTHONPATH": str(tree)}
        for way in WAYS if messages else ():
            env[f"DASK_DASKPS__WAYS__{way.upper()}"] = "false"
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
        return float(self._answer())

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


OPTIONS = (
    ("tree", {"type": _checkout, "help": "the other checkout"}),
    number("--pairs", 41),
    ("--job", {"default": "", "help": "only jobs whose name contains this"}),
    switch("--messages", "close all other ways to the shards"),
)


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    here, there = Path(daskps.__file__).parents[1], options.tree
    with ExitStack() as stack:
        ours, theirs = (
            stack.enter_context(Checkout(tree, messages=options.messages))
            for tree in (here, there)
        )
        for job in ours.jobs:
            if options.job in job:
                ours.measure(job), theirs.measure(job)  # warm
                found = alternate(
                    partial(ours.measure, job),
                    partial(theirs.measure, job),
                    options.pairs,
                )
                print(line(Comparison(job, there.name, *found)))
