"""Counts of the package from its source alone: lines, statements, names, imports, words."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import daskps

ROOT = Path(daskps.__file__).parent
#: No code: comments, and tokens that have no text.
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (ast.Module, ast.ClassDef, *_FUNCTIONS)
#: A relative clause where a sentence has its subject; no question.
_RIDDLE = re.compile(
    r"(?:^|[.:;!]\s+)(?:Who|Whoever|Whose|What|Which)\b[^.?!]*(?=[.!]|$)"
)
_OPENING = re.compile(r"(What|Who|Whoever|Whose|Which|How|Where|Whether)\b")


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    name: str
    path: Path
    source: str = field(repr=False)

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed source."""
        return ast.parse(self.source)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All that is in it."""
        return [*ast.walk(self.tree)]

    @cached_property
    def tokens(self) -> list[tokenize.TokenInfo]:
        """What its lines consist of."""
        return [*tokenize.generate_tokens(io.StringIO(self.source).readline)]

    @property
    def room(self) -> str:
        """The folder it lies in, "." for the package itself."""
        parts = self.path.relative_to(ROOT).parts
        return parts[0] if len(parts) > 1 else "."

    @cached_property
    def docstrings(self) -> list[ast.Expr]:
        """The docstrings of the module, its classes and functions."""
        nodes = [n for n in self.nodes if isinstance(n, _DOCUMENTED) and n.body]
        firsts = [node.body[0] for node in nodes]
        return [
            first
            for first in firsts
            if isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        ]

    @property
    def code_lines(self) -> int:
        """Lines without comments, docstrings and blanks."""
        lines = set[int]()
        for token in self.tokens:
            if token.type not in _NO_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
        for doc in self.docstrings:
            lines.difference_update(range(doc.lineno, (doc.end_lineno or 0) + 1))
        return len(lines)

    @property
    def statements(self) -> int:
        """Statements, docstrings among them."""
        return sum(isinstance(node, ast.stmt) for node in self.nodes)

    @property
    def longest_function(self) -> int:
        """Lines of the longest function, without its signature and docstring."""
        docs = {id(doc) for doc in self.docstrings}
        longest = 0
        for node in self.nodes:
            if isinstance(node, _FUNCTIONS):
                first = node.body[id(node.body[0]) in docs and len(node.body) > 1]
                longest = max(longest, (node.end_lineno or 0) - first.lineno + 1)
        return longest

    @property
    def publics(self) -> set[str]:
        """Public names that the module defines."""
        found = set[str]()
        for node in self.tree.body:
            if isinstance(node, (ast.ClassDef, *_FUNCTIONS)):
                found.add(node.name)
            elif isinstance(node, ast.Assign):
                found |= {t.id for t in node.targets if isinstance(t, ast.Name)}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
        return {name for name in found if not name.startswith("_")}

    @property
    def opens_with_a_riddle(self) -> bool:
        """Whether its docstring begins with a relative or interrogative word."""
        return bool(_OPENING.match(ast.get_docstring(self.tree) or ""))

    @property
    def riddles(self) -> int:
        """Sentences of docstrings, comments and texts with a clause as subject."""
        return sum(len(_RIDDLE.findall(text)) for text in self._prose())

    def _prose(self) -> Iterator[str]:
        comments, line = list[str](), 0
        for token in self.tokens:
            if token.type == tokenize.COMMENT:
                if token.start[0] != line + 1 and comments:
                    yield " ".join(comments)
                    comments = []
                comments.append(token.string.lstrip("#: "))
                line = token.start[0]
        yield " ".join(comments)
        for node in self.nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from re.split(r"\n\s*\n", node.value.strip())


def _read() -> dict[str, Module]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("daskps", *path.relative_to(ROOT).with_suffix("").parts)
        name = ".".join(parts).removesuffix(".__init__")
        found[name] = Module(name, path, path.read_text("utf-8"))
    return found


class House:
    """All modules of the package, and what they take from each other."""

    @cached_property
    def modules(self) -> dict[str, Module]:
        """All modules by name."""
        return _read()

    @cached_property
    def taken(self) -> dict[str, set[tuple[str, str]]]:
        """By module the (module, name) pairs that it takes; "" is the module itself."""
        return {name: {*self._uses(m)} for name, m in self.modules.items()}

    def room(self, name: str) -> list[Module]:
        """Return the modules of a folder."""
        return [m for m in self.modules.values() if m.room == name]

    def rooms(self) -> dict[str, tuple[int, int]]:
        """Return code lines and statements of each folder."""
        found: dict[str, tuple[int, int]] = {}
        for module in self.modules.values():
            lines, statements = found.get(module.room, (0, 0))
            counts = lines + module.code_lines, statements + module.statements
            found[module.room] = counts
        return found

    def shared(self, of: str) -> set[tuple[str, str]]:
        """Return the names of a part that other modules use, by where they are made.

        An alias, a name that is passed on, and an attribute of an imported module count
        as the name itself.
        """
        taken = {pair for pairs in self.taken.values() for pair in pairs if pair[1]}
        resolved = {self._origin(*pair) for pair in taken}
        return {pair for pair in resolved if pair[0].startswith(of)}

    def longest_chain(self, of: str = "daskps") -> list[str]:
        """Return the longest chain of imports below a part."""
        graph = {
            name: {
                of_name
                for of_name, _ in pairs
                if of_name.startswith(of)
                and of_name != name
                and not (self._is_package(of_name) and name.startswith(f"{of_name}."))
            }
            for name, pairs in self.taken.items()
            if name.startswith(of)
        }
        chains: dict[str, list[str]] = {}

        def longest(name: str) -> list[str]:
            if name not in chains:
                chains[name] = []  # no circle: tests/test_layers.py
                below = (longest(other) for other in sorted(graph[name]))
                chains[name] = [name, *max(below, key=len, default=[])]
            return chains[name]

        return max((longest(name) for name in graph), key=len)

    def users(self, names: set[str], attributes: set[str], of: str) -> list[str]:
        """Return the modules of a part that use some names, or attributes so called."""
        found = []
        for name, module in self.modules.items():
            if name.startswith(of):
                taken = {self._origin(*pair)[1] for pair in self.taken[name]}
                called = {
                    node.attr
                    for node in module.nodes
                    if isinstance(node, ast.Attribute)
                }
                if taken & names or called & attributes:
                    found.append(name)
        return found

    def _is_package(self, name: str) -> bool:
        return self.modules[name].path.name == "__init__.py"

    def _uses(self, module: Module) -> Iterator[tuple[str, str]]:
        bound: dict[str, str] = {}
        for node in module.nodes:
            if isinstance(node, ast.ImportFrom):
                base = self._base(module, node)
                for alias in node.names:
                    if f"{base}.{alias.name}" in self.modules:
                        bound[alias.asname or alias.name] = f"{base}.{alias.name}"
                    elif base in self.modules:
                        yield base, alias.name
            elif isinstance(node, ast.Import):
                names = (alias.name for alias in node.names)
                yield from ((name, "") for name in names if name in self.modules)
        yield from ((name, "") for name in bound.values())
        yield from _attributes(module, bound)

    def _base(self, module: Module, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = self._is_package(module.name)
        parts = module.name.split(".")
        up = len(parts) - node.level + is_package
        return ".".join([*parts[:up], *filter(None, [node.module])])

    def _origin(self, module: str, name: str) -> tuple[str, str]:
        """Return where a name is made that a module may only pass on."""
        for base, passed in self._passed(module).get(name, ()):
            return self._origin(base, passed)
        return module, name

    def _passed(self, module: str) -> dict[str, list[tuple[str, str]]]:
        found: dict[str, list[tuple[str, str]]] = {}
        of = self.modules[module]
        for node in of.tree.body:
            if isinstance(node, ast.ImportFrom):
                base = self._base(of, node)
                if base in self.modules:
                    for alias in node.names:
                        pair = base, alias.name
                        found.setdefault(alias.asname or alias.name, []).append(pair)
        return found


def _attributes(module: Module, bound: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Give what is used of modules, by the names that these have in a module."""
    for node in module.nodes:
        is_use = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if is_use and (of := bound.get(node.value.id)):  # type: ignore[attr-defined]
            yield of, node.attr  # type: ignore[attr-defined]


HOUSE = House()
