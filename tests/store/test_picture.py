"""A store as a picture: its source, and what it takes to draw it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import daskps
from daskps.layout.arrays import Layout
from daskps.store.picture import dot_source, draw, node_link
from tests import inprocess

OWNERS = ("tcp://a:1", "tcp://b:2")
LAYOUT = Layout.build({'a"\\b\n': ((3,), "float32")}, 2, {"emb": (4, 3, "float64")})
GRAPH = node_link(LAYOUT, OWNERS, "my store")
SOURCE = r"""digraph "my store" {
  rankdir=LR
  "parameter:a\"\\b\n" [label="a\"\\b\n\n(3,) float32\n12 B" shape=box]
  "parameter:emb" [label="emb\n4 rows of 3 float64" shape=folder]
  "shard:0" [label="shard 0\n56 B" shape=ellipse]
  "shard:1" [label="shard 1\n52 B" shape=ellipse]
  "worker:tcp://a:1" [label="tcp://a:1" shape=component]
  "worker:tcp://b:2" [label="tcp://b:2" shape=component]
  "parameter:a\"\\b\n" -> "shard:0" [label="0:2"]
  "parameter:a\"\\b\n" -> "shard:1" [label="2:3"]
  "parameter:emb" -> "shard:0" [label="0:2"]
  "parameter:emb" -> "shard:1" [label="2:4"]
  "shard:0" -> "worker:tcp://a:1"
  "shard:1" -> "worker:tcp://b:2"
}
"""


def test_source() -> None:
    """Names with quotes, backslashes and ends of lines stay one string each."""
    assert dot_source(GRAPH) == SOURCE


@pytest.mark.parametrize(
    ("name", "node", "shown"),
    [
        # As graphviz 16.1 reads them; it shows `&amp;` as `&`, and `\\\\x01` as `\\x01`.
        ("&lt;", "&lt;", "&amp;lt;"),
        ("<b>", "<b>", "<b>"),
        ("a\rb", r"a\x0db", r"a\\x0db"),
        ("\x01\x7f\t", "\\x01\\x7f\t", "\\\\x01\\\\x7f\t"),
        (r"a\x0db", r"a\\x0db", r"a\\x0db"),
        ("a\\", r"a\\", r"a\\"),
        ("x" * 10_000, "x" * 10_000, "x" * 10_000),
    ],
)
def test_no_name_is_taken_for_something_else(name, node, shown) -> None:
    layout = Layout.build({name: ((3,), "float32")}, 1)
    lines = dot_source(node_link(layout, OWNERS[:1], "s")).splitlines()
    assert lines[2].startswith(f'  "parameter:{node}" [label="{shown}\\n(3,)')


@pytest.mark.parametrize("ending", [".dot", ".gv", ".DOT"])
def test_source_is_written_without_graphviz(tmp_path, ending) -> None:
    file = tmp_path / f"store{ending}"
    with mock.patch.dict(sys.modules, graphviz=None):
        draw(GRAPH, str(file))
    assert file.read_text(encoding="utf-8") == SOURCE


def test_without_the_package_it_says_what_to_install(tmp_path) -> None:
    with (
        mock.patch.dict(sys.modules, graphviz=None),
        pytest.raises(ImportError, match="conda install python-graphviz"),
    ):
        draw(GRAPH, str(tmp_path / "store.svg"))
    assert not [*tmp_path.iterdir()]


class Drawn(SimpleNamespace):
    """What graphviz makes of a source."""

    def pipe(self, **options):
        return f"{options['format']}: {self.source}".encode()


class NoProgramError(RuntimeError):
    """What graphviz raises without its program."""


class Undrawn(SimpleNamespace):
    """What it makes of it without the program that draws."""

    def pipe(self, **options):
        raise NoProgramError("no dot")


def package(made) -> ModuleType:
    """A package graphviz that makes this of a source."""
    found = ModuleType("graphviz")
    vars(found).update(
        ExecutableNotFound=NoProgramError, Source=lambda source: made(source=source)
    )
    return found


@pytest.mark.parametrize(("filename", "written"), [("s.svg", "s.svg"), ("s", "s.png")])
def test_it_is_drawn_as_dask_draws(tmp_path, filename, written) -> None:
    # What IPython shows of it would parse the file.
    with mock.patch.dict(sys.modules, graphviz=package(Drawn), IPython=None):
        draw(GRAPH, str(tmp_path / filename))
    [file] = tmp_path.iterdir()
    assert file.name == written
    assert file.read_text() == f"{written.partition('.')[2]}: {SOURCE}"


def test_without_the_program_it_says_what_to_install(tmp_path) -> None:
    with (
        mock.patch.dict(sys.modules, graphviz=package(Undrawn)),
        pytest.raises(ImportError, match=r"program `dot` \(no dot\)"),
    ):
        draw(GRAPH, str(tmp_path / "store.svg"))


def test_of_a_store(tmp_path) -> None:
    with inprocess.cluster(1), daskps.create({"w": np.zeros(3)}, name="m") as store:
        store.visualize(str(tmp_path / "m.dot"))
        nothing: Any = 3
        with pytest.raises(TypeError, match=r"a text such as 'store\.svg', found 3"):
            store.visualize(nothing)
        store.delete()
        with pytest.raises(daskps.StoreClosedError):
            store.visualize(str(tmp_path / "n.dot"))
    assert (tmp_path / "m.dot").read_text().startswith('digraph "m" {\n')
    assert not (tmp_path / "n.dot").exists()
