"""The arrays of a checkpoint: which there are, and what their elements are of.

Every parameter has an array in ``weights`` and one for each slot of its rule in
``slots``, every table arrays in ``tables``: rows, slots, and where it is unbounded also
these, in order of their hashes, when they were pushed last, and the ids that are only
counted. Where there are many small ones of parameters and bounded tables, these lie one
behind the other in arrays of ``packed``, for otherwise ten thousand of them were sixty
thousand files.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from daskps.checkpoint.grid import Grid, chunk_shape
from daskps.layout.slots import slot_dtype, width
from daskps.layout.spans import (
    CANDIDATES,
    COUNTS,
    IDS,
    ROWS,
    TOUCHED,
    WEIGHTS,
    slot_area,
)
from daskps.layout.tables import UnboundedTable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from daskps.checkpoint.grid import GridChunk
    from daskps.layout.arrays import Layout
    from daskps.layout.tables import Table

#: First values of the slots of each parameter and table that has a rule, by its index;
#: they say how wide a slot is (:mod:`daskps.layout.slots`).
Slots: TypeAlias = Mapping[int, Sequence[float]]

#: An array with fewer bytes may be packed, and is where more of its area are so small.
PACKED_NBYTES: Final = 2**16
MOST_ALONE: Final = 64
#: Rows of an unbounded table in a chunk at most: a restore reads whole ones.
CHUNK_ROWS: Final = 2**16


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of unbounded tables that only their shards know, by table index."""

    #: How many rows each shard has, in order.
    rows: Mapping[int, Sequence[int]] = field(default_factory=dict)
    #: How many ids each shard counts that have no row.
    candidates: Mapping[int, Sequence[int]] = field(default_factory=dict)

    @classmethod
    def by_shard(
        cls,
        tables: Sequence[Table],
        rows: Sequence[Sequence[int]],
        candidates: Sequence[Sequence[int]],
    ) -> Counts:
        """Return the numbers that each shard has of each unbounded table, in order."""

        def by_table(counts: Sequence[Sequence[int]]) -> dict[int, list[int]]:
            return {t.index: [of[i] for of in counts] for i, t in enumerate(tables)}

        return cls(by_table(rows), by_table(candidates))

    def of(self, table: Table, area: str) -> Sequence[int]:
        """Return how many rows or candidates of a table each shard has."""
        found = self.candidates if area in (CANDIDATES, COUNTS) else self.rows
        return found.get(table.index, ())


@dataclass(frozen=True, slots=True)
class Member:
    """The elements of an array that belong to one parameter or table."""

    #: Of the parameter or table.
    index: int
    #: Elements of the array.
    start: int
    stop: int
    #: Elements of a row, of a table; 1 of a parameter.
    width: int = 1


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array of a checkpoint."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    #: Of the memory of shards, see :mod:`daskps.layout.spans`.
    area: str
    #: One, or of a packed one several, in order.
    members: tuple[Member, ...]
    #: The attributes in its metadata.
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def grid(self) -> Grid:
        """How it is cut."""
        return Grid(self.shape, self.chunk)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return np.dtype(self.dtype).itemsize

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of the file of a chunk; all have as many."""
        return self.grid.chunk_size * self.itemsize

    def path_of(self, chunk: GridChunk) -> str:
        """Return the path of a chunk's file, as zarr has it."""
        return "/".join([self.path, "c", *map(str, chunk.place)])


def stored_arrays(
    layout: Layout, slots: Slots, counts: Counts | None = None
) -> list[StoredArray]:
    """Return the arrays of a state.

    Parameters
    ----------
    layout : Layout
        Of the store; into how many shards it is cut plays no part.
    slots : mapping of int to sequence of float
        First values of the slots by index, as the rules have them.
    counts : Counts, optional
        Of unbounded tables: how many rows there are, over all shards.

    Returns
    -------
    list of StoredArray
        Of parameters by area, of bounded tables by area, then of unbounded tables.
    """
    counts, together = counts or Counts(), dict[str, list[_Piece]]()
    for piece in _pieces(layout, slots):
        together.setdefault(piece.packed, []).append(piece)
    found = [_of_kind(pieces) for pieces in together.values()]
    found += [
        [*_of_unbounded(table, slots, counts)]
        for table in layout.tables
        if isinstance(table, UnboundedTable)
    ]
    return [*chain.from_iterable(found)]


@dataclass(frozen=True, slots=True)
class _Piece:
    """The elements of a parameter or bounded table in one area; they may be packed."""

    index: int
    name: str
    area: str
    path: str
    #: Where it is packed with others, but for the dtype.
    packed: str
    shape: tuple[int, ...]
    dtype: str
    width: int = 1

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_small(self) -> bool:
        return self.size * np.dtype(self.dtype).itemsize < PACKED_NBYTES


def _pieces(layout: Layout, slots: Slots) -> Iterator[_Piece]:
    for p in layout.parameters:
        of, dtype, area = key(p.name), p.dtype, WEIGHTS
        at = area, f"weights/{of}", f"packed/{area}"
        yield _Piece(p.index, p.name, *at, p.shape, dtype)
        first = slots.get(p.index, ())
        dtype = slot_dtype(dtype, first)
        for j in range(len(first)):
            area = slot_area(j)
            at = area, f"slots/{of}.{j}", f"packed/{area}"
            yield _Piece(p.index, p.name, *at, p.shape, dtype)
    for t in layout.tables:
        for area, dtype, wide in _areas(t, slots) if t.is_bounded else ():
            at = area, f"tables/{key(t.name)}.{area}", f"packed/tables.{area}"
            yield _Piece(t.index, t.name, *at, (t.rows, wide), dtype, wide)


def _areas(table: Table, slots: Slots) -> Iterator[tuple[str, str, int]]:
    """Give what rows of a table have: area, dtype, and elements of a row."""
    yield ROWS, table.dtype, table.dim
    values = slots.get(table.index, ())
    for j, first in enumerate(values):
        yield slot_area(j), slot_dtype(table.dtype, values), width(first, table.dim)


def _of_kind(pieces: Sequence[_Piece]) -> list[StoredArray]:
    """Return the arrays of one area, the small ones of a dtype together where all are many."""
    small: dict[str, list[_Piece]] = {}
    for piece in pieces:
        if piece.is_small:
            small.setdefault(piece.dtype, []).append(piece)
    if sum(map(len, small.values())) <= MOST_ALONE:
        return [*map(_alone, pieces)]
    alone = (piece for piece in pieces if not piece.is_small)
    return [*map(_alone, alone), *map(_packed, small.values())]


def _alone(of: _Piece) -> StoredArray:
    chunk = chunk_shape(of.shape, np.dtype(of.dtype).itemsize)
    members = (Member(of.index, 0, of.size, of.width),)
    said = {"name": of.name, "area": of.area}
    return StoredArray(of.path, of.shape, of.dtype, chunk, of.area, members, said)


def _packed(pieces: Sequence[_Piece]) -> StoredArray:
    stops = [*accumulate(piece.size for piece in pieces)]
    pairs = [*zip(pieces, stops, strict=True)]
    members = tuple(Member(p.index, stop - p.size, stop, p.width) for p, stop in pairs)
    told = [
        {"name": p.name, "start": stop - p.size, "shape": list(p.shape)}
        for p, stop in pairs
    ]
    area, dtype, shape = pieces[0].area, pieces[0].dtype, (stops[-1],)
    path = f"{pieces[0].packed}.{dtype}"
    chunk = chunk_shape(shape, np.dtype(dtype).itemsize)
    said = {"area": area, "members": told}
    return StoredArray(path, shape, dtype, chunk, area, members, said)


def _of_unbounded(
    table: UnboundedTable, slots: Slots, counts: Counts
) -> Iterator[StoredArray]:
    n, of = sum(counts.of(table, ROWS)), table.of
    yield _of_rows(table, IDS, "int64", (n,))
    for area, dtype, wide in _areas(table, slots):
        yield _of_rows(table, area, dtype, (n, wide))
    if of.max_rows or of.ttl:
        yield _of_rows(table, TOUCHED, "int64", (n,))
    if of.admit_after > 1:
        m = sum(counts.of(table, CANDIDATES))
        yield _of_rows(table, CANDIDATES, "int64", (m,))
        yield _of_rows(table, COUNTS, "int64", (m,))


def _of_rows(
    table: Table, area: str, dtype: str, shape: tuple[int, ...]
) -> StoredArray:
    chunk = chunk_shape(shape, np.dtype(dtype).itemsize, CHUNK_ROWS)
    wide = shape[1] if len(shape) > 1 else 1
    members = (Member(table.index, 0, shape[0] * wide, wide),)
    path, said = f"tables/{key(table.name)}.{area}", {"name": table.name, "area": area}
    return StoredArray(path, shape, dtype, chunk, area, members, said)


#: Longest name that stays as it is, and what is kept of others.
_MOST, _KEPT = 64, 40
_PLAIN = re.compile(r"(?!__)[a-z0-9_]([a-z0-9_.-]*[a-z0-9_-])?")
#: The end of a name with a hash; no other name ends so.
_HASHED = re.compile(r"\.[0-9a-f]{20}")
#: Zarr's own name for the metadata of a node.
_RESERVED = "zarr.json"


def key(name: str) -> str:
    """Return the name of a parameter's folder.

    Parameters
    ----------
    name : str
        Any name of a parameter or table.

    Returns
    -------
    str
        At most 64 characters of ASCII, another one for each name, also where case is
        not told apart.

    Examples
    --------
    >>> key("layer1.weight")
    'layer1.weight'
    >>> key("../W")
    'W.4d7045e4c3d50b0e1725'
    """
    is_taken = name == _RESERVED or _HASHED.fullmatch(name[-21:])
    if len(name) <= _MOST and _PLAIN.fullmatch(name) and not is_taken:
        return name
    told = name.encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(told, digest_size=10).hexdigest()
    readable = re.sub(r"[^A-Za-z0-9_-]+", "_", name[:_KEPT]).strip("_-")
    return f"{readable or 'x'}.{digest}"
