"""``python -m tests.mutants``: whether the tests catch what they must."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.mutants.mutant import Mutant
from tests.mutants.running import Ground, survey
from tests.mutants.table import MUTANTS, ROOMS

ROOT = Path(__file__).parents[2]
#: Mutants at a time: one for each core of a small machine.
JOBS = 2


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def check(ground: Ground, mutants: Sequence[Mutant], jobs: int) -> bool:
    """Run the tests without and with each mutant; return whether all were caught."""
    began = time.monotonic()
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    ran = ground.baseline(tests)
    if ran.code != 0:
        say(ran.output)
        say(f"{len(ran.failed)} of {len(tests)} tests fail without any mutant")
        return False
    say(f"{len(tests)} tests pass without mutants in {ran.seconds:.0f} s")
    n_caught, width = 0, max(len(mutant.name) for mutant in mutants)
    for mutant, outcome in survey(ground, mutants, jobs):
        n_caught += outcome.is_caught
        say(f"{mutant.name:<{width}}  {outcome.seconds:5.1f} s  {outcome.said}")
    seconds = time.monotonic() - began
    say(f"{n_caught} of {len(mutants)} mutants caught in {seconds:.0f} s")
    return n_caught == len(mutants)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 where every mutant was caught."""
    parser = argparse.ArgumentParser("python -m tests.mutants", description=__doc__)
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="rooms or parts of names"
    )
    parser.add_argument("--jobs", type=int, default=JOBS, help="mutants at a time")
    parser.add_argument("--list", action="store_true", help="run nothing")
    asked = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if _is_asked(m, asked.only)]
    if not chosen:
        parser.error(f"no mutant has {asked.only} in its name; rooms: {[*ROOMS]}")
    if asked.list:
        for mutant in chosen:
            say(f"{mutant.name}: {mutant.where}")
        return 0
    with TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        ground = Ground(ROOT, "daskps", Path(scratch))
        return 0 if check(ground, chosen, max(1, asked.jobs)) else 1


def _is_asked(mutant: Mutant, only: Sequence[str] | None) -> bool:
    return not only or any(
        text in mutant.name or mutant in ROOMS.get(text, ()) for text in only
    )


if __name__ == "__main__":
    sys.exit(main())
