"""Flat vectors of parameters, and which part of them each shard has.

All parameters of one dtype that are cut over the same shards form one flat vector, in
the order they were given. It is cut over these like ``np.array_split``. A shard has its
parts of the vectors of one dtype in one run of its memory, one part behind the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from daskps.errors import LayoutError
from daskps.layout.bounds import bounds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Vector(NamedTuple):
    """The parameters that form a flat vector."""

    dtype: str
    #: The shards that it is cut over, ascending; None for all.
    shards: tuple[int, ...] | None = None


class VectorPart(NamedTuple):
    """The elements [start, stop) of a vector that one shard has."""

    shard: int
    start: int
    stop: int
    #: Where they begin in what the shard has of the dtype.
    local: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def parts_of(
    vectors: Mapping[Vector, int], n_shards: int
) -> dict[Vector, tuple[VectorPart, ...]]:
    """Cut vectors over their shards.

    Parameters
    ----------
    vectors : mapping of Vector to int
        Number of elements of each, in their order.
    n_shards : int
        Number of all shards.

    Returns
    -------
    dict of Vector to tuple of VectorPart
        For each vector the part of each of its shards, in order; it may be empty.
    """
    found: dict[Vector, tuple[VectorPart, ...]] = {}
    ends: dict[str, dict[int, int]] = {}
    for vector, n in vectors.items():
        over = range(n_shards) if vector.shards is None else vector.shards
        at, parts = ends.setdefault(vector.dtype, {}), []
        for i, shard in enumerate(over):
            part = VectorPart(shard, *bounds(n, len(over), i), at.get(shard, 0))
            parts.append(part)
            at[shard] = part.local + part.size
        found[vector] = tuple(parts)
    return found


def by_index(
    placed: Sequence[tuple[Sequence[int], Sequence[int]]], n: int, n_shards: int
) -> dict[int, tuple[int, ...]]:
    """Return over which shards each of some parameters and tables is cut.

    Parameters
    ----------
    placed : sequence of (shards, indices)
        Shards, and the parameters and tables that are cut over them.
    n : int
        Number of parameters and tables.
    n_shards : int
        Number of shards.

    Returns
    -------
    dict of int to tuple of int
        Shards by index; those that are not in it are cut over all.

    Raises
    ------
    LayoutError
        For shards or indices that are not there, or not in order.
    """
    found: dict[int, tuple[int, ...]] = {}
    for shards, indices in placed:
        over = tuple(shards)
        is_fine = over and list(over) == sorted(set(over))
        if not is_fine or over[0] < 0 or over[-1] >= n_shards:
            raise LayoutError(
                f"something is cut over shards {shards!r:.60} of {n_shards}; name some "
                f"of them, in ascending order"
            )
        for index in indices:
            if index in found or not 0 <= index < n:
                raise LayoutError(
                    f"number {index!r:.60} of {n} parameters and tables is placed, and "
                    f"is not there, or twice"
                )
            found[index] = over
    return found


def placed_of(parts: Sequence[Any]) -> list[tuple[list[int], list[int]]]:
    """Return what :func:`by_index` takes, of parameters and tables with their shards."""
    found: dict[tuple[int, ...], list[int]] = {}
    for one in parts:
        if one.shards is not None:
            found.setdefault(one.shards, []).append(one.index)
    return [(list(shards), indices) for shards, indices in found.items()]
