"""Dask's own helpers for tests find nothing left behind by what they test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests import library
from tests.test_readme import blocks

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "library-authors.md"


def test_tests_of_a_library_pass(tmp_path):
    """Threads that outlive the last client of a test would fail it."""
    # Elsewhere: the fixtures here are not those of others.
    shutil.copy(library.__file__, tmp_path / "test_it.py")
    passes(tmp_path)


def passes(folder: Path) -> None:
    """Run the tests in a folder as its author does."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-qq", "-Werror", "--show-capture=no"],
        cwd=folder,
        # Workers import the library too.
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not ran.returncode, ran.stdout


def written(folder: Path) -> list[str]:
    """Write the files that the page for library authors shows."""
    names = []
    for text in blocks(PAGE, "py"):
        names.append(text.partition("\n")[0].removeprefix("# "))
        (folder / names[-1]).write_text(text)
    return names


def test_library_of_the_page_passes_its_tests(tmp_path):
    assert written(tmp_path) == ["kmeans.py", "conftest.py", "test_kmeans.py"]
    passes(tmp_path)


def test_library_of_the_page_is_small(tmp_path):
    lines = (tmp_path / written(tmp_path)[0]).read_text().splitlines()
    assert 80 <= len(lines) <= 110
