"""How stores and parameters show themselves, without asking anybody."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dask.utils import format_bytes
from dask.widgets.widgets import TEMPLATE_PATHS, get_template

from daskps.layout import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.meta import Meta
    from daskps.layout import Layout

_TEMPLATES = str(Path(__file__).parent / "widgets")
if _TEMPLATES not in TEMPLATE_PATHS:
    TEMPLATE_PATHS.append(_TEMPLATES)
#: Rows of a table before it is cut.
MOST_ROWS = 30


def store_line(name: str, meta: Meta | None) -> str:
    """Return the one-line form of a store."""
    if meta is None:
        return f"<daskps.ParameterStore {name!r}>"
    layout = meta.layout
    n, k, w = len(layout.parameters), layout.n_shards, len(set(meta.owners))
    return (
        f"<daskps.ParameterStore {name!r}: {counted(n, 'parameter')}, "
        f"{format_bytes(layout.nbytes)}, {counted(k, 'shard')} on "
        f"{counted(w, 'worker')}>"
    )


def snapshot_line(name: str, version: int, layout: Layout) -> str:
    """Return the one-line form of a snapshot."""
    n = len(layout.parameters)
    return (
        f"<daskps.Snapshot of store {name!r} at version {version}: "
        f"{counted(n, 'parameter')}, {format_bytes(layout.nbytes)}>"
    )


def store_html(name: str, meta: Meta | None, versions: Sequence[int]) -> str:
    """Return the table of a store's parameters and shards."""
    if meta is None:
        return get_template("daskps_store.html.j2").render(
            name=name, parameters=[], shards=[], more=0, line=store_line(name, None)
        )
    layout = meta.layout
    parameters = [
        {
            "name": p.name,
            "shape": p.shape,
            "dtype": p.dtype,
            "nbytes": format_bytes(p.nbytes),
            "optimizer": meta.optimizers.get(p.index, "none"),
        }
        for p in layout.parameters[:MOST_ROWS]
    ]
    shards = [
        {
            "index": i,
            "worker": owner,
            "nbytes": format_bytes(layout.shard_nbytes(i)),
            "version": versions[i] if i < len(versions) else "not asked yet",
        }
        for i, owner in enumerate(meta.owners[:MOST_ROWS])
    ]
    return get_template("daskps_store.html.j2").render(
        name=name,
        line=store_line(name, meta),
        parameters=parameters,
        shards=shards,
        more=max(0, len(layout.parameters) - MOST_ROWS, layout.n_shards - MOST_ROWS),
    )


def array_html(array: Any, store: str) -> str:
    """Return the table of one parameter."""
    return get_template("daskps_array.html.j2").render(
        name=array.name,
        shape=array.shape,
        dtype=str(array.dtype),
        nbytes=format_bytes(array.nbytes),
        store=store,
    )
