"""Private names of other objects in tests: how many there are may only fall.

What is inside an object gets another name whenever its room is rebuilt. A test that
names it has to follow, so few of them should: `tests/seams.py` has what several need.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
#: How many there are in each folder of the tests; a change writes smaller numbers only.
ALLOWED = {
    ".": 36,
    "benchmarks": 1,
    "checkpoint": 3,
    "cluster": 14,
    "cluster/caller": 13,
    "cluster/directory": 4,
    "cluster/host": 5,
    "cluster/sockets": 61,
    "cluster/machine": 7,
    "cluster/runs": 3,
    "cluster/protocol": 1,
    "compat": 4,
    "kernels": 1,
    "shards": 7,
    "shards/memory": 1,
    "shards/rounds": 5,
    "simulator": 12,
    "store": 5,
    "training": 11,
    "training/overlap": 1,
}
#: What users may call, although its name begins with an underscore.
DOCUMENTED = {"_asdict", "_fields", "_make", "_replace", "_repr_html_"}


def uses(text: str) -> Iterator[str]:
    """Give the private attributes of other objects that a module names."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            of = ast.unparse(node.value)
            if of not in ("self", "cls", "super()") and (of, node.attr) != (
                "os",
                "_exit",
            ):
                yield f"{of}.{node.attr}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED


def test_no_more_private_names_are_used() -> None:
    found: Counter[str] = Counter()
    for path in TESTS.rglob("*.py"):
        folder = path.parent.relative_to(TESTS).as_posix()
        found[folder] += len([*uses(path.read_text())])
    assert {folder: n for folder, n in sorted(found.items()) if n} == ALLOWED


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("shard._planner._rules[0]", ["shard._planner._rules", "shard._planner"]),
        ("link()._background = 1", ["link()._background"]),
        ("self._mine, cls._ours, super()._theirs()", []),
        ("a.__dict__, step._replace(clock=1), os._exit(1)", []),
        ("from x import _y\n_y.z", []),
    ],
)
def test_a_private_name_is_found(text: str, found: list[str]) -> None:
    assert [*uses(text)] == found
