"""The simulator: it repeats itself, finds nothing in good code, and bites."""

from __future__ import annotations

import functools
import json
import subprocess
from typing import Any

import pytest

from daskps.testing import simulate
from daskps.testing.known_bad import VARIANTS

#: Much of it is processor time, of which a busy machine gives little.
pytestmark = pytest.mark.timeout(600)
#: Seeds that must be without a finding; of the first ones the traces are compared.
N_GOOD, N_REPEATED = 10, 5


def simulated(*argv: str) -> tuple[int, list[dict[str, Any]]]:
    """Return the exit status and what came of each seed."""
    done = subprocess.run(
        [*simulate.command(argv), "--json"],
        env=simulate.environment(),
        stdout=subprocess.PIPE,
        check=False,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@functools.cache
def good() -> tuple[int, list[dict[str, Any]]]:
    return simulated("--seeds", str(N_GOOD))


def test_good_code_has_no_findings() -> None:
    status, reports = good()
    assert [r["finding"] for r in reports] == [""] * N_GOOD
    assert status == 0
    # Faults there were, and calls that went well all the same.
    assert sum(r["n_lost"] for r in reports) > 50
    assert sum(len(r["happened"]) for r in reports) > 20
    assert all(r["outcomes"]["ok"] > 10 for r in reports)


def test_seeds_repeat_message_by_message() -> None:
    again = simulated("--seeds", str(N_REPEATED))[1]
    first = good()[1][:N_REPEATED]
    traces = [(r["trace"], r["seconds"], r["n_sent"]) for r in first]
    assert [(r["trace"], r["seconds"], r["n_sent"]) for r in again] == traces
    assert len(set(traces)) == N_REPEATED


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_known_bad_code_is_found(variant: str) -> None:
    status, reports = simulated("--seeds", "60", "--known-bad", variant)
    assert status == 1
    *before, found = reports
    assert found["finding"]
    assert not any(r["finding"] for r in before)
