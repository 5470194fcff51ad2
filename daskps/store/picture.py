"""A store as a graph of parameters, shards and workers, and the drawing of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dask.dot import graphviz_to_file
from dask.utils import format_bytes

from daskps.layout.tables import UnboundedTable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from daskps.layout.arrays import Layout

#: The shape of what a node is.
_SHAPES = {"array": "box", "table": "folder", "shard": "ellipse", "worker": "component"}
#: Where the source alone is written, for which nothing need be installed.
_SOURCES = (".dot", ".gv")
#: Characters that neither a line of a picture nor XML may hold: shown by their codes.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def node_link(layout: Layout, owners: Sequence[str], name: str) -> dict[str, Any]:
    """Return a directed graph in the node-link form.

    Parameters
    ----------
    layout : Layout
        The store's layout.
    owners : sequence of str
        Address of the worker of each shard.
    name : str
        Name of the store.

    Returns
    -------
    dict
        Plain values; a shard has one edge to its worker, and one from each parameter
        and table that it has any of.
    """
    nodes = [
        *_parameters(layout),
        *(
            _node(f"shard:{i}", "shard", shard=i, nbytes=layout.shard_nbytes(i))
            for i in range(layout.n_shards)
        ),
        *(
            _node(f"worker:{worker}", "worker", worker=worker)
            for worker in dict.fromkeys(owners)
        ),
    ]
    owned = [
        {"source": f"shard:{shard}", "target": f"worker:{worker}", "kind": "owner"}
        for shard, worker in enumerate(owners)
    ]
    return {
        "directed": True,
        "multigraph": False,
        "graph": {"name": name},
        "nodes": nodes,
        "edges": [*_pieces(layout), *owned],
    }


def _node(key: str, kind: str, **of: Any) -> dict[str, Any]:
    return {"id": key, "kind": kind, **of}


def _parameters(layout: Layout) -> Iterator[dict[str, Any]]:
    for p in layout.parameters:
        of = {"dtype": p.dtype, "nbytes": p.nbytes}
        name = f"parameter:{p.name}"
        yield _node(name, "array", name=p.name, shape=list(p.shape), **of)
    for t in layout.tables:
        rows = t.rows if t.is_bounded else None
        of = {"rows": rows, "dim": t.dim, "dtype": t.dtype}
        yield _node(f"parameter:{t.name}", "table", name=t.name, **of)


def _pieces(layout: Layout) -> Iterator[dict[str, Any]]:
    """Give which elements, or rows, of what are in which shard."""
    for p in layout.parameters:
        for piece in layout.pieces_of[p.index]:
            yield _edge(p.name, piece.shard, start=piece.start, stop=piece.stop)
    for shard, pieces in enumerate(layout.table_pieces):
        for of in pieces:
            table = of.table
            if isinstance(table, UnboundedTable):
                if table.shards is None or shard in table.shards:
                    yield _edge(table.name, shard)
            elif of.n_rows:
                stop = of.first_row + of.n_rows
                yield _edge(table.name, shard, start=of.first_row, stop=stop)


def _edge(name: str, shard: int, **where: int) -> dict[str, Any]:
    source, target = f"parameter:{name}", f"shard:{shard}"
    return {"source": source, "target": target, "kind": "piece", **where}


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
        rows = "unbounded" if node["rows"] is None else f"{node['rows']} rows"
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
