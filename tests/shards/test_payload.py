"""The modules that touch payload: weights, slots and what comes for them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import daskps

ROOT = Path(daskps.__file__).parent
#: Functions of NumPy, and methods of arrays, that another kind of memory has not.
FUNCTIONS = {"copyto", "add", "isfinite"}
METHODS = {"copy", "fill", "tobytes"}
#: Where they are at home.
HOMES = ("shards/arrays/", "cluster/protocol/")
#: Everything else that has one, and why.
ALLOWED = {
    # Host memory: what a caller gave or gets, never a segment's.
    "cluster/caller/row_reads.py": "rows that nobody has, in the caller's arrays",
    "cluster/caller/allreduce.py": "what trainers combined, kept for others of them",
    "cluster/caller/device_arrays.py": "what was read goes to the caller's arrays",
    "cluster/caller/client.py": "prepared reads are filled",
    "cluster/caller/remote.py": "what a message brought goes to the caller's arrays",
    "cluster/caller/row_routes.py": "the caller's rows, kept a while, and its ids, to compare",
    "cluster/caller/session.py": "prepared reads are filled",
    "cluster/caller/targets.py": "what was read goes to the caller's arrays",
    "cluster/caller/trainer_step.py": "the caller's gradients, which it may change",
    "cluster/caller/uncommitted.py": "the caller's gradients, kept for another owner",
    "cluster/host/contributions.py": "contributions of the task graph",
    "cluster/host/partial_sums.py": "rows of them",
    "cluster/runs/graph/tasks.py": "weights that a task has read",
    # Reads of a segment's memory into the caller's, past the caches where that pays.
    "cluster/caller/call_template.py": "versions that are waited for, as bytes",
    "cluster/sockets/frames.py": "the last bytes of an answer",
    # Arithmetic of sums, and what is kept of a step before its tick, in the mailboxes'
    # memory: beside the segment, and the host's.
    "shards/rounds/arena.py": "rows of a round, in the memory of mailboxes",
    "shards/rounds/unticked.py": "keeps what came before the tick",
    # The segment's own copy.
    "shards/frozen.py": "a copy of a segment",
    # No payload.
    "shards/installation.py": "fills the index of unbounded rows",
    "shards/cuts/cut.py": "rows of a report",
    "cluster/machine/leases.py": "a set of blocks",
}


def uses(source: str) -> Iterator[str]:
    """Give what a module uses of what is banned."""
    for node in ast.walk(ast.parse(source)):
        name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if name.startswith("np.") and name[3:] in FUNCTIONS:
            yield name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = node.func.value
            is_payload = isinstance(of, ast.Attribute) and of.attr == "payload"
            if node.func.attr in METHODS and not is_payload:
                yield f".{node.func.attr}"


def found() -> dict[str, set[str]]:
    by_module = {}
    for package in ("shards", "cluster"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(HOMES) and (used := set(uses(path.read_text()))):
                by_module[name] = used
    return by_module


def test_payload_is_touched_by_the_functions_of_its_segment() -> None:
    assert found().keys() == ALLOWED.keys()


@pytest.mark.parametrize(
    ("source", "used"),
    [
        ("np.copyto(a, b)", ["np.copyto"]),
        ("apply(np.add, (a, b, c))", ["np.add"]),
        ("np.isfinite(g).all()", ["np.isfinite"]),
        ("w.copy()", [".copy"]),
        ("segment.weights[0][1].tobytes()", [".tobytes"]),
        ("slots[0].fill(0)", [".fill"]),
        ("self.segment.payload.copy(a, b)", []),
        ("record.copy_from(other)", []),
        ("add(a, b)", []),
    ],
)
def test_a_use_is_found(source: str, used: list[str]) -> None:
    assert list(uses(source)) == used
