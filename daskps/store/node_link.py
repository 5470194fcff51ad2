"""A store as a graph: parameters, the shards that have them, the workers of these."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daskps.layout.tables import UnboundedTable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from daskps.layout.arrays import Layout


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
        Plain values; a shard has one edge to its worker, and one from each parameter and
        table that it has any of.
    """
    nodes = [
        *_parameters(layout),
        *(
            {
                "id": f"shard:{shard}",
                "kind": "shard",
                "shard": shard,
                "nbytes": layout.shard_nbytes(shard),
            }
            for shard in range(layout.n_shards)
        ),
        *(
            {"id": f"worker:{worker}", "kind": "worker", "worker": worker}
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


def _parameters(layout: Layout) -> Iterator[dict[str, Any]]:
    for p in layout.parameters:
        yield {
            "id": f"parameter:{p.name}",
            "kind": "array",
            "name": p.name,
            "shape": list(p.shape),
            "dtype": p.dtype,
            "nbytes": p.nbytes,
        }
    for table in layout.tables:
        yield {
            "id": f"parameter:{table.name}",
            "kind": "table",
            "name": table.name,
            "rows": table.rows if table.is_bounded else None,
            "dim": table.dim,
            "dtype": table.dtype,
        }


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
