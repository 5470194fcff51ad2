"""Dask's own helpers for tests find nothing left behind by what they test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests import library

ROOT = Path(__file__).parents[1]


def test_tests_of_a_library_pass(tmp_path):
    """Threads that outlive the last client of a test would fail it."""
    # Elsewhere: the fixtures here are not those of others.
    shutil.copy(library.__file__, tmp_path / "test_it.py")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-qq", "-Werror", "--show-capture=no"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not ran.returncode, ran.stdout
