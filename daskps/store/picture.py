"""The picture of a store as a graph: its source in the DOT language, and its drawing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dask.dot import graphviz_to_file
from dask.utils import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

#: The shape of what a node is.
_SHAPES = {"array": "box", "table": "folder", "shard": "ellipse", "worker": "component"}
#: Where the source alone is written, for which nothing need be installed.
_SOURCES = (".dot", ".gv")
#: What no line of a picture has, and no XML: shown by its code.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def dot_source(graph: Mapping[str, Any]) -> str:
    """Return a graph in the DOT language.

    Parameters
    ----------
    graph : mapping
        As `node_link` returns it.

    Returns
    -------
    str
        The text, parameters at the left and workers at the right.
    """
    lines = [f"digraph {_quoted(graph['graph']['name'])} {{", "  rankdir=LR"]
    for node in graph["nodes"]:
        label, shape = _shown("\n".join(_label(node))), _SHAPES[node["kind"]]
        lines.append(f"  {_quoted(node['id'])} [label={label} shape={shape}]")
    for edge in graph["edges"]:
        line = f"  {_quoted(edge['source'])} -> {_quoted(edge['target'])}"
        if "start" in edge:
            line += f' [label="{edge["start"]}:{edge["stop"]}"]'
        lines.append(line)
    return "\n".join([*lines, "}", ""])


def draw(graph: Mapping[str, Any], filename: str) -> Any:
    """Draw a graph by graphviz into a file, as Dask draws its own.

    Returns what IPython shows of it, None without IPython or for a source alone.

    Raises
    ------
    ImportError
        Where graphviz is not installed; TypeError for a name that is no text.
    """
    if not isinstance(filename, str):
        raise TypeError(
            f"filename is a text such as 'store.svg', found {filename!r:.60}"
        )
    source = dot_source(graph)
    if filename.lower().endswith(_SOURCES):
        Path(filename).write_text(source, encoding="utf-8")
        return None
    advice = f"visualize({str(Path(filename).with_suffix('.dot'))!r}) needs neither"
    try:
        import graphviz
    except ImportError as error:
        raise ImportError(
            f"ParameterStore.visualize needs graphviz, the package for Python and the "
            f"program: conda install python-graphviz, or pip install graphviz and the "
            f"program `dot` by the system's packages; {advice}"
        ) from error
    try:
        return graphviz_to_file(  # type: ignore[no-untyped-call] # Dask has no types
            graphviz.Source(source), filename, None
        )
    except graphviz.ExecutableNotFound as error:
        raise ImportError(
            f"ParameterStore.visualize found the package graphviz, but not its program "
            f"`dot` ({error}): install that by the system's packages or conda; {advice}"
        ) from error


def _label(node: Mapping[str, Any]) -> Iterator[str]:
    """Give the lines of a node."""
    kind = node["kind"]
    if kind == "worker":
        yield node["worker"]
        return
    yield f"shard {node['shard']}" if kind == "shard" else node["name"]
    if kind == "array":
        yield f"{tuple(node['shape'])} {node['dtype']}"
    elif kind == "table":
        rows = "any ids" if node["rows"] is None else f"{node['rows']} rows"
        yield f"{rows} of {node['dim']} {node['dtype']}"
    if "nbytes" in node:
        yield format_bytes(node["nbytes"])


def _shown(text: str) -> str:
    """Return what is shown of a text: there `&` and a backslash begin escapes."""
    return _quoted(text.replace("&", "&amp;"), code=r"\\x{:02x}")


def _quoted(text: str, code: str = r"\x{:02x}") -> str:
    """Return a text as a string of the DOT language; no two texts become one."""
    escaped = text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return '"' + _CONTROL.sub(lambda at: code.format(ord(at[0])), escaped) + '"'
