"""Whether all tests that were chosen also ran, as the last line of a run of the tests.

A test process that dies, or an error inside pytest, ends a run early, and pytest's own
closing line counts what had passed until then: it reads like success.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest


class Completeness:
    """Counts, in the process that reports, the tests chosen and those that ended."""

    def __init__(self) -> None:
        self.chosen: set[str] = set()
        self.ended: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note the tests of a run in one process."""
        self.chosen.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Note the tests that the processes of a shared run have found."""
        self.chosen.update(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that ended, whatever came of it."""
        if report.when == "teardown":
            self.ended.add(report.nodeid)

    @property
    def missing(self) -> int:
        """Number of tests that did not run, or not to their end."""
        return len(self.chosen - self.ended)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run that was not complete, unless it only looked for the tests."""
        asked = session.config.option
        if not asked.collectonly and self.missing and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Say it after everything else."""
        if not config.option.collectonly and self.chosen:
            sys.stdout.write(f"{self.said}\n")
            sys.stdout.flush()

    @property
    def said(self) -> str:
        """The last line of the run."""
        n = len(self.chosen)
        if not self.missing:
            return f"daskps: all {n} tests ran"
        return (
            f"daskps: INCOMPLETE, {self.missing} of {n} tests did not run to their end"
        )
