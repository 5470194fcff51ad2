"""A run of the tests that ends early says so, in its last line and exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.completeness import Completeness
from tests.support import PATIENCE

ROOT = Path(__file__).parent.parent
TESTS = "def test_a(): pass\ndef test_b(): pass\ndef test_c(): pass\n"
#: What a broken plugin does, and a test that brings its process down.
BREAKS = """
from tests.completeness import Completeness
def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Completeness())
def pytest_runtest_makereport(item, call):
    if item.name == "test_b" and {breaks}:
        raise RuntimeError("cannot be rendered")
"""


def run(folder: Path, breaks: bool, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(TESTS)
    (folder / "conftest.py").write_text(BREAKS.format(breaks=breaks))
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", *options]
    return subprocess.run(
        [*command, f"--rootdir={folder}", "-p", "no:cacheprovider", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "shared"])
def test_error_inside_pytest_is_not_a_green_run(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    done = run(tmp_path, True, *options)
    assert "INTERNALERROR" in done.stdout + done.stderr
    assert done.returncode != 0
    last = done.stdout.splitlines()[-1]
    assert last == "daskps: INCOMPLETE, 2 of 3 tests did not run to their end"


def test_whole_run_says_so(tmp_path: Path) -> None:
    done = run(tmp_path, False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "daskps: all 3 tests ran"


@pytest.mark.parametrize(("ended", "status"), [("a", 1), ("ab", 0)])
def test_missing_test_fails_a_run_that_passed(ended: str, status: int) -> None:
    option = SimpleNamespace(collectonly=False)
    session = SimpleNamespace(config=SimpleNamespace(option=option), exitstatus=0)
    found = Completeness()
    found.pytest_xdist_node_collection_finished(["a", "b"])
    for name in ended:
        for when in ("setup", "call", "teardown"):
            report = SimpleNamespace(when=when, nodeid=name)
            found.pytest_runtest_logreport(report)  # type: ignore[arg-type]  # a stand-in
    found.pytest_sessionfinish(session)  # type: ignore[arg-type]  # a stand-in
    assert session.exitstatus == status
