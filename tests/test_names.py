"""A name of a type has one meaning in the whole package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import daskps

ROOT = Path(daskps.__file__).parent
#: Two things of users, in modules of their own.
PUBLIC = {"constant"}


def types_of(source: str) -> Iterator[tuple[str, str]]:
    """Give the public types that a module defines, and what aliases stand for."""
    body = ast.parse(source).body
    for node in [*body, *(n for i in body if isinstance(i, ast.If) for n in i.body)]:
        match node:
            case ast.ClassDef(name=name):
                yield name, f"a class of its own, line {node.lineno}"
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                if is_type(name):
                    yield name, ast.unparse(value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                if is_type(name) and "TypeAlias" in ast.unparse(node.annotation):
                    yield name, ast.unparse(value)


def is_type(name: str) -> bool:
    """Tell a type's name from that of a constant or of a type variable."""
    return name[0].isupper() and not name.isupper()


def ambiguous(sources: dict[str, str]) -> list[str]:
    """Return the names of types that mean different things in two modules."""
    known: dict[str, dict[str, str]] = {}
    for where, source in sources.items():
        for name, meaning in types_of(source):
            if not name.startswith("_") and name not in PUBLIC:
                if meaning.startswith("a class"):
                    meaning = f"{where}: {meaning}"
                known.setdefault(name, {})[meaning] = where
    return [
        f"{name}: {', '.join(sorted(of.values()))}"
        for name, of in sorted(known.items())
        if len(of) > 1
    ]


def test_no_name_of_a_type_has_two_meanings() -> None:
    sources = {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for path in sorted(ROOT.rglob("*.py"))
    }
    assert ambiguous(sources) == []


def test_a_name_of_two_meanings_is_found() -> None:
    one, alias = "class Place: ...", "Place = tuple[int, int]"
    assert ambiguous({"a.py": one, "b.py": one}) == ["Place: a.py, b.py"]
    assert ambiguous({"a.py": one, "b.py": alias}) == ["Place: a.py, b.py"]
    assert ambiguous({"a.py": alias, "b.py": alias}) == []
    assert ambiguous({"a.py": "class _Place: ...", "b.py": one}) == []
    late = "if TYPE_CHECKING:\n    Place: TypeAlias = int"
    assert ambiguous({"a.py": late, "b.py": alias}) == ["Place: a.py, b.py"]
