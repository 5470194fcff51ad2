"""Counts how often the rule of each piece was applied."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from daskps.shards.arrays.planning import Operations
    from daskps.typing import Array


def count(planned: Operations, counts: Array) -> None:
    """Note the optimizer steps of planned operations, one per piece they touch."""
    seen = set()
    for position, operation in planned:
        if operation.binding is not None and position not in seen:
            seen.add(position)
            counts[position] += 1
