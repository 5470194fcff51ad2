"""`daskps.aio` and its stub have the names of the synchronous form, and no others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import daskps
from daskps import aio

STUB = ast.parse(Path(str(aio.__file__)).with_suffix(".pyi").read_text())
CLASSES = {
    "AsyncParameterArray": daskps.ParameterArray,
    "AsyncParameterStore": daskps.ParameterStore,
    "AsyncParameterTable": daskps.ParameterTable,
    "AsyncReplica": daskps.Replica,
}
#: Verbs that are spelled by signs.
SIGNS = {"__aenter__", "__contains__", "__getitem__", "__iter__", "__len__"}
#: For errors that say what to write instead.
REFUSES = {("AsyncParameterTable", "__getitem__")}


def bound(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr | None]]:
    """Give the names that are defined, each with its value."""
    for node in body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield name, value
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, None
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                yield name, None
            case ast.AsyncFunctionDef(name=name):
                yield name, None


def is_shown(name: str) -> bool:
    return name in SIGNS or not name.startswith("_")


def of_class(name: str) -> dict[str, ast.expr | None]:
    """Return what the stub of a class defines."""
    [found] = [n for n in STUB.body if isinstance(n, ast.ClassDef) and n.name == name]
    return {n: value for n, value in bound(found.body) if is_shown(n)}


def test_stub_has_the_functions_that_there_are() -> None:
    names = vars(aio)["__all__"]
    assert sorted(n for n, _ in bound(STUB.body) if is_shown(n)) == names
    for name in names:
        synchronous = CLASSES.get(name) or getattr(daskps, name)
        assert getattr(aio, name) is synchronous


@pytest.mark.parametrize("name", CLASSES)
def test_stub_has_the_verbs_that_there_are(name: str) -> None:
    there = {
        attribute
        for attribute in dir(CLASSES[name])
        if is_shown(attribute) and (name, attribute) not in REFUSES
    }
    there |= {"uid", "name"} if name == "AsyncParameterStore" else set()
    assert of_class(name).keys() == there


@pytest.mark.parametrize("name", [*CLASSES, None])
def test_verbs_have_the_parameters_of_their_own(name: str | None) -> None:
    """As `pull = _awaited(ParameterStore.pull)`, and of no other verb."""
    verbs = dict(bound(STUB.body)) if name is None else of_class(name)
    of = "daskps" if name is None else CLASSES[name].__name__
    calls = {n: value for n, value in verbs.items() if isinstance(value, ast.Call)}
    given = {n: ast.unparse(call.args[0]) for n, call in calls.items() if is_shown(n)}
    assert given == {n: f"{of}.{n}" for n in given}
    assert len(given) > 2
