"""What shards say of their tables, put together by table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from daskps.layout.arrays import Layout


def counted_tables(
    layout: Layout, shards: Iterable[Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return what is known of each table.

    Parameters
    ----------
    layout : Layout
        The store's layout.
    shards : iterable of mapping
        A row of counters per shard; one that has not answered has no "tables".

    Returns
    -------
    dict of str to dict
        By name: rows, dim, dtype, nbytes of all rows, and steps; of a table of any ids
        also how many ids are counted without a row, how many were given one, and how
        many lost it to others.
    """
    answered = [of for row in shards if (of := row.get("tables")) is not None]
    found: dict[str, dict[str, Any]] = {}
    for t in layout.tables:
        steps = max((of[t.name]["steps"] for of in answered), default=None)
        there = sum(of[t.name]["rows"] for of in answered)
        rows = t.rows if t.is_bounded else there
        found[t.name] = {
            "rows": rows,
            "dim": t.dim,
            "dtype": t.dtype,
            "nbytes": rows * t.row_nbytes,
            "steps": steps,
        }
        if not t.is_bounded:
            for what in ("candidates", "admissions", "evictions"):
                found[t.name][what] = sum(of[t.name][what] for of in answered)
    return found
