"""The simulator: it repeats itself, finds nothing in good code, and bites."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.simulator import simulate
from tests.simulator.known_bad import VARIANTS

#: Much of it is processor time, of which a busy machine gives little.
pytestmark = pytest.mark.timeout(600)
#: Seeds that must be without a finding; of the last ones the traces are compared.
FIRST, N_GOOD, N_REPEATED = 13, 6, 3
#: It took three courses in four where attempts to connect were given up in the order of the
#: addresses of functions.
SCATTERED = 27
#: Where compiled loops are kept, below the home directory.
KEPT = ".cache/daskps/kernels"
#: Where the search for what is wrong begins, if few seeds find it: its course may change
#: with every line that sends a message, and then the search takes longer.
BEGIN = {
    "adopter-forgets-who-has-scaled": 2,
    "adopter-knows-nothing-of-delays": 2,
    "adopter-starts-at-the-wrong-round": 6,
    "answered-before-backed": 6,
    "changes-forget-a-producer": 2,
    "copy-hears-of-no-withdrawal": 671,
    "cut-holds-nothing": 26,
    "deliveries-stay-behind": 57,
    "fence-forgets-a-shard": 2,
    "former-owner-goes-on": 100,
    "former-owner-is-followed": 225,
    "half-of-a-log-put-back": 2,
    "incomplete-copy-takes-over": 312,
    "last-state-before-the-owner-stops": 100,
    "manifest-first": 105,
    "owner-goes-on-alone": 90,
    "reads-of-rounds-that-a-copy-lacks-wait": 81,
    "stale-generation-accepted": 35,
    "states-forget-producers": 2,
}


def simulated(*commands: str) -> tuple[int, list[dict[str, Any]]]:
    """Return the exit status of one process, and what came of each seed.

    To start one takes as long as to simulate two seeds.
    """
    lines = [simulate.line([*argv.split(), "--json"]) for argv in commands]
    with simulate.start(subprocess.PIPE) as process:
        said, _ = process.communicate("".join(lines))
    return process.returncode, [json.loads(line) for line in said.splitlines()]


@functools.cache
def good() -> tuple[int, list[dict[str, Any]]]:
    """Return what came of the seeds that must be without a finding, and of `SCATTERED`."""
    return simulated(
        f"--first {FIRST} --seeds {N_GOOD}", f"--replay {SCATTERED} --repeat 4"
    )


def test_good_code_has_no_findings() -> None:
    status, reports = good()[0], good()[1][:N_GOOD]
    assert [r["finding"] for r in reports] == [""] * N_GOOD
    assert status == 0
    # Faults there were, and calls that went well all the same.
    assert sum(r["n_lost"] for r in reports) > 50
    assert sum(len(r["happened"]) for r in reports) > 20
    assert sum(r["outcomes"].get("ok", 0) for r in reports) > 10 * N_GOOD
    assert sum(r["n_restored"] for r in reports) > 2 * N_GOOD
    assert sum(r["n_moved"] for r in reports) > 2 * N_GOOD
    # Second copies have taken over, also in runs, which went on.
    assert sum(r["n_promoted"] for r in reports) > N_GOOD
    assert sum(r["n_gone_on"] for r in reports) > 0


def test_seeds_repeat_message_by_message_whatever_ran_before_them() -> None:
    last = FIRST + N_GOOD - 1
    before = good()[1][N_GOOD - N_REPEATED : N_GOOD]
    traces = [(r["trace"], r["seconds"], r["n_sent"]) for r in before]
    again = simulated(
        f"--first {last - N_REPEATED + 1} --seeds {N_REPEATED - 1}",
        # To show what is logged changes nothing.
        f"--replay {last} --log",
    )[1]
    assert [(r["trace"], r["seconds"], r["n_sent"]) for r in again] == traces
    assert len(set(traces)) == N_REPEATED


def test_a_course_follows_from_no_address() -> None:
    """Else it would follow from the path of the code: that is in memory, too."""
    reports = good()[1][N_GOOD:]
    assert len(reports) == 4
    assert len({report["trace"] for report in reports}) == 1


def test_a_course_is_the_same_where_loops_are_compiled_meanwhile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """To compile asks for the time, and for names of files, which are chance."""
    good()
    # What is kept, but for some: to compile all of it takes ten times as long.
    lacking = shutil.ignore_patterns("*.take-*", "*.hashed-*")
    shutil.copytree(Path.home() / KEPT, tmp_path / KEPT, ignore=lacking)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not any(tmp_path.rglob("*.take-*.nbc"))
    first, then = simulated(f"--replay {FIRST} --repeat 2")[1]
    assert any(tmp_path.rglob("*.take-*.nbc"))
    assert first["trace"] == then["trace"]


@pytest.fixture(scope="module")
def simulator() -> Iterator[subprocess.Popen[str]]:
    """A process that imports once for many simulations; it ends with status 1."""
    with simulate.start(subprocess.PIPE) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == 1


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_known_bad_code_is_found(
    variant: str, simulator: subprocess.Popen[str]
) -> None:
    first = str(BEGIN.get(variant, 0))
    argv = ["--first", first, "--seeds", "60", "--known-bad", variant, "--json"]
    assert simulator.stdin is not None
    assert simulator.stdout is not None
    simulator.stdin.write(simulate.line(argv))
    simulator.stdin.flush()
    reports = (json.loads(line) for line in simulator.stdout)
    assert any(report["finding"] for report in islice(reports, 60))
