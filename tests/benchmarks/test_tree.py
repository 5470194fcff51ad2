"""The benchmark of two checkouts: what is timed in each, and what is refused."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.benchmarks import command, steps_here

if TYPE_CHECKING:
    from pathlib import Path

    from distributed import Client


def test_each_job_gives_seconds(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps_here, "CALLS", 40)
    monkeypatch.setattr(steps_here, "WARM_SECONDS", 0)
    with ExitStack() as stack:
        jobs = steps_here.jobs(client, stack)
        found = {name: job() for name, job in jobs.items()}
    assert len(found) == 26
    assert all(seconds > 0 for seconds, _ in found.values())
    ways = {way for _, ways in found.values() for way in ways}
    assert ways <= {"process", "machine", "socket", "message"}


def test_a_folder_that_is_no_checkout_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["tree", str(tmp_path)])
    assert "is no checkout of daskps" in capsys.readouterr().err
