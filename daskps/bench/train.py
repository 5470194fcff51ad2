"""Training: logistic regression, steps per second beside other systems.

65,536 weights and a batch of 64 rows per trainer and step, BSP: pull, gradient, push.
The batch is the same at every step, so that reading data is no part of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.bench import command
from daskps.bench.jobs import WEIGHTS, StepJob
from daskps.bench.options import beside_peers, number
from daskps.bench.report import Report

if TYPE_CHECKING:
    from argparse import Namespace

OPTIONS = (*beside_peers(pairs=7), number("--weights", WEIGHTS))


def run(options: Namespace) -> None:
    """Measure and print."""
    jobs = [StepJob("train", 4 * options.weights, n, n) for n in (1, 2)]
    report = Report("train", options)
    command.compare(options, jobs, report)
    report.end()
