"""Programs of users, right ones and wrong ones, as type checkers see and Python runs them.

A line with a mistake says so at its end, with a part of what mypy has to say of it. Of
pyright only the line is compared.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any
from unittest import mock

import pytest
from distributed import Client

from tests.support import PATIENCE, gen_cluster
from tests.test_library import written

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
EXPECTED = re.compile(r"  # error: (.*)$")
FOUND = re.compile(r"^(?:.*/)?(\w+\.py):(\d+): error: (.*)$", re.MULTILINE)

#: By the name of a file and the number of a line, what is said of it.
Errors = dict[tuple[str, int], str]


def expected() -> Errors:
    """Return the errors that the programs announce."""
    return {
        (path.name, number): found[1]
        for path in PROGRAMS.glob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (found := EXPECTED.search(line))
    }


def said(command: Sequence[object], folder: Path) -> str:
    """Return the output of a type checker that nobody has configured."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1",
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_mypy_finds_the_mistakes_and_no_others(tmp_path: Path) -> None:
    quiet = "--hide-error-context", "--no-error-summary", "--no-pretty", "--no-color"
    library = written(tmp_path)[0]
    text = said(["mypy", "--strict", *quiet, PROGRAMS, library], tmp_path)
    found: Errors = {}
    for file, number, error in FOUND.findall(text):
        found.setdefault((file, int(number)), error)
    wanted = expected()
    assert found.keys() == wanted.keys()
    assert not [(at, found[at]) for at, part in wanted.items() if part not in found[at]]


def test_pyright_finds_the_mistakes_and_no_others(tmp_path: Path) -> None:
    pytest.importorskip("pyright")
    settings: dict[str, Any] = {"include": ["programs"], "extraPaths": [str(ROOT)]}
    settings |= {"reportUnusedExpression": False, "reportUnusedCoroutine": False}
    shutil.copytree(PROGRAMS, tmp_path / "programs")
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    text = said(["pyright", "--outputjson", "--pythonpath", sys.executable], tmp_path)
    found = {
        (Path(one["file"]).name, one["range"]["start"]["line"] + 1): one["message"]
        for one in json.loads(text)["generalDiagnostics"]
    }
    assert found.keys() == expected().keys(), found


def test_both_forms_of_mistakes_are_announced() -> None:
    files = {file for file, _ in expected()}
    assert files == {"wrong.py", "wrong_async.py"}
    assert {path.name for path in PROGRAMS.glob("right*.py")} == {
        "right.py",
        "right_async.py",
    }


# -- the right ones at work --------------------------------------------------------------


def is_one(value: Any, form: Any) -> bool:
    """Return whether a value is what it is said to be, but for what is in it."""
    if form is None or form is Any:
        return form is Any or value is None
    origin = typing.get_origin(form)
    if origin is UnionType:
        return any(is_one(value, part) for part in typing.get_args(form))
    return isinstance(value, origin or form)


def imported(name: str) -> ModuleType:
    """Import a program, whose statements on types are then checked as it runs."""

    def checked(value: Any, form: Any) -> Any:
        assert is_one(value, form), (value, form)
        return value

    spec = importlib.util.spec_from_file_location(name, PROGRAMS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(typing, "assert_type", checked):
        spec.loader.exec_module(module)
    return module


def test_types_are_those_that_a_program_meets(client: Client, tmp_path: Path) -> None:
    imported("right").main(str(tmp_path))


@gen_cluster(client=True)
async def test_types_are_those_that_an_asynchronous_one_meets(c, s, a, b) -> None:
    await imported("right_async").main(c, "memory://typed")


def test_another_type_is_found() -> None:
    assert is_one(3, int | None)
    assert is_one(None, int | None)
    assert is_one({}, dict[str, int])
    assert not is_one([], dict[str, int])
    assert not is_one("3", int | None)
    assert not is_one(3, None)
