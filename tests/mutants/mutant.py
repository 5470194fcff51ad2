"""One break of the code: where it is, what it changes, and which tests must see it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import TypeAlias

Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class UnfitError(Exception):
    """A mutant that says nothing: its line or one of its tests is not there."""


@dataclass(frozen=True)
class Mutant:
    """A break of one line.

    Parameters
    ----------
    name : str
        What is broken, in a few words with hyphens.
    where : str
        Module and function, as in "package.module:Class.method".
    line : str
        The line as it stands, without the blanks around it; once in the function.
    becomes : str
        The line that takes its place.
    tests : tuple of str
        The tests that must catch it, as pytest names them, the cheapest ones.
    """

    name: str
    where: str
    line: str
    becomes: str
    tests: tuple[str, ...]

    def file(self, root: Path) -> Path:
        """Return the file that it changes, below a folder with the package in it."""
        module = self.where.partition(":")[0]
        folder = root.joinpath(*module.split("."))
        package = folder / "__init__.py"
        return package if package.is_file() else folder.with_suffix(".py")

    def broken(self, root: Path) -> str:
        """Return the text of that file with the break in it.

        Raises
        ------
        UnfitError
            If the line does not stand once in the function, or the text that comes
            of it is no Python.
        """
        file = self.file(root)
        if not file.is_file():
            raise UnfitError(f"{self.name}: there is no {file.relative_to(root)}")
        text = file.read_text()
        lines = text.splitlines(keepends=True)
        start, stop = self._span(_parsed(text))
        at = [i for i in range(start, stop) if lines[i].strip() == self.line]
        if len(at) != 1:
            raise UnfitError(
                f"{self.name}: {self.line!r} stands {len(at)} times in {self.where}"
            )
        [number] = at
        indent = lines[number][: -len(lines[number].lstrip())]
        lines[number] = f"{indent}{self.becomes}\n"
        try:
            # All of it would take ten times as long.
            ast.parse(dedent("".join(lines[start:stop])))
        except SyntaxError as error:
            raise UnfitError(f"{self.name}: makes no Python: {error}") from error
        return "".join(lines)

    def _span(self, found: ast.Module | Definition) -> tuple[int, int]:
        """Return the lines [start, stop) of the function in a module."""
        for name in self.where.partition(":")[2].split("."):
            below = [d for d in definitions(found) if d.name == name]
            if len(below) != 1:
                raise UnfitError(f"{self.name}: {self.where} stands {len(below)} times")
            [found] = below
        if isinstance(found, ast.Module):
            raise UnfitError(f"{self.name}: {self.where} names no function")
        return found.lineno - 1, found.end_lineno or found.lineno

    def missing(self, root: Path) -> list[str]:
        """Return those of its tests that are not there; nothing is imported."""
        return [test for test in self.tests if not _is_there(root, test)]


@cache
def _parsed(text: str) -> ast.Module:
    """Return a module as a tree; many mutants are of one."""
    return ast.parse(text)


def definitions(tree: ast.AST) -> list[Definition]:
    """Return the functions and classes right inside of something."""
    found: list[Definition] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _DEFINITIONS):
            found.append(node)
        elif not isinstance(node, ast.expr):
            # In a branch or another block.
            found += definitions(node)
    return found


def _is_there(root: Path, test: str) -> bool:
    name, *within = test.partition("[")[0].split("::")
    file = root / name
    if not file.is_file() or not within:
        return False
    tree: ast.AST = _parsed(file.read_text())
    for part in within:
        below = [d for d in definitions(tree) if d.name == part]
        # As a class that Hypothesis makes: `TestShard = Machine.TestCase`.
        if not below:
            return part == within[-1] and part in _assigned(tree)
        [tree] = below
    return True


def _assigned(tree: ast.AST) -> set[str]:
    targets = (
        target
        for node in ast.iter_child_nodes(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
    )
    return {target.id for target in targets if isinstance(target, ast.Name)}
