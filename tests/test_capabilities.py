"""The page of capabilities has every row, and every row a test that exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "capabilities.md"
ROW = re.compile(r"^\| \**(\d+)\** \|.*\| `([^`]+)` \|$", re.MULTILINE)


@cache
def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    kinds = ast.FunctionDef, ast.AsyncFunctionDef
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


ROWS = ROW.findall(PAGE.read_text(encoding="utf-8"))


def test_no_row_is_missing():
    assert [int(number) for number, _ in ROWS] == [*range(1, 68)]


@pytest.mark.parametrize(("number", "name"), ROWS)
def test_a_row_names_a_test_that_exists(number, name):
    path, _, test = name.partition("::")
    assert test in names_in(path), f"row {number}"


def test_what_is_otherwise_is_told():
    """A bold number is one of those the last section has a reason for."""
    text = PAGE.read_text(encoding="utf-8")
    bold = set(re.findall(r"^\| \*\*(\d+)\*\* \|", text, re.MULTILINE))
    told = re.findall(r"^- \*\*([\d, ]+)\*\*", text, re.MULTILINE)
    assert bold
    assert bold <= {n for group in told for n in group.split(", ")}
