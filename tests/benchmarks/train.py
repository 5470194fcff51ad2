"""Training: logistic regression, steps per second beside other systems.

65,536 weights and a batch of 64 rows per trainer and step, BSP: pull, gradient, push.
The batch is the same at every step, so that reading data is no part of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.benchmarks import command
from tests.benchmarks.jobs import WEIGHTS, StepJob
from tests.benchmarks.options import beside_peers, number
from tests.benchmarks.report import Report

if TYPE_CHECKING:
    from argparse import Namespace

OPTIONS = (*beside_peers(pairs=7), number("--weights", WEIGHTS))


def run(options: Namespace) -> None:
    """Measure and print."""
    jobs = [StepJob("train", 4 * options.weights, n, n) for n in (1, 2)]
    report = Report("train", options)
    command.compare(options, jobs, report)
    report.end()
