"""Training: logistic regression, steps per second beside other systems.

65,536 weights and a batch of 64 rows per trainer and step, BSP: pull, gradient, push.
The batch is the same at every step, so that reading data is no part of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.bench import command
from daskps.bench.jobs import WEIGHTS, StepJob

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print.

    Parameters
    ----------
    argv : sequence of str, optional
        Command line without the program's name.

    Returns
    -------
    int
        Exit status: 0, whatever was measured.
    """
    parser = command.parser("train", pairs=7, peers=True)
    add = parser.add_argument
    add("--weights", type=command.count, default=WEIGHTS, help="[%(default)s]")
    options = parser.parse_args(argv)
    jobs = [StepJob("train", 4 * options.weights, n, n) for n in (1, 2)]
    with command.reported("train", options) as report:
        command.compare(options, jobs, report)
    return 0
