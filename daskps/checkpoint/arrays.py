"""The arrays of a checkpoint: which there are, and what their elements are of.

Every parameter has an array in ``weights`` and one for each slot of its rule in ``slots``;
where there are many small ones, these lie one behind the other in arrays of ``packed``,
for otherwise ten thousand of them were sixty thousand files. Every table has arrays in
``tables``: rows, slots, and where it has any ids also these, in order of their hashes,
when they were pushed last, and the ids that are only counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from daskps.checkpoint.grid import Grid, chunk_shape
from daskps.checkpoint.names import key
from daskps.layout.arrays import Parameter, compute_dtype
from daskps.layout.slots import width
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
#: Rows of a table of any ids in a chunk at most: a restore reads whole ones.
CHUNK_ROWS: Final = 2**16


@dataclass(frozen=True, slots=True)
class Counts:
    """What nobody knows of tables of any ids but their shards: by the table's index."""

    #: How many rows each shard has, in order.
    rows: Mapping[int, Sequence[int]] = field(default_factory=dict)
    #: How many ids each shard counts that have no row.
    candidates: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def of(self, table: Table, area: str) -> Sequence[int]:
        """Return how many rows or candidates of a table each shard has."""
        found = self.candidates if area in (CANDIDATES, COUNTS) else self.rows
        return found.get(table.index, ())


@dataclass(frozen=True, slots=True)
class Member:
    """What some elements of an array are: those of one parameter or table."""

    #: Of the parameter or table.
    index: int
    #: Elements of the array.
    start: int
    stop: int


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
    #: Elements of a row, of a table; 1 of a parameter.
    width: int = 1
    #: What its metadata says of it.
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
        Of tables of any ids: how many rows there are, over all shards.

    Returns
    -------
    list of StoredArray
        Weights, then each slot, then tables.
    """
    counts = counts or Counts()
    most = max((len(slots.get(p.index, ())) for p in layout.parameters), default=0)
    found = _of_parameters(layout.parameters, WEIGHTS)
    for slot in range(most):
        having = [p for p in layout.parameters if len(slots.get(p.index, ())) > slot]
        found += _of_parameters(having, slot_area(slot), slot)
    of_tables = (_of_table(t, slots.get(t.index, ()), counts) for t in layout.tables)
    return [*found, *chain.from_iterable(of_tables)]


def _of_parameters(
    parameters: Sequence[Parameter], area: str, slot: int | None = None
) -> list[StoredArray]:
    small: dict[str, list[Parameter]] = {}
    for p in parameters:
        dtype = p.dtype if slot is None else compute_dtype(p.dtype)
        if p.size * np.dtype(dtype).itemsize < PACKED_NBYTES:
            small.setdefault(dtype, []).append(p)
    packed = sum(map(len, small.values())) > MOST_ALONE
    found = [_packed(ps, area, dtype) for dtype, ps in small.items()] if packed else []
    gone = {p.index for ps in small.values() for p in ps} if packed else set()
    alone = (p for p in parameters if p.index not in gone)
    return [*(_alone(p, area, slot) for p in alone), *found]


def _alone(p: Parameter, area: str, slot: int | None) -> StoredArray:
    dtype = p.dtype if slot is None else compute_dtype(p.dtype)
    path = f"weights/{key(p.name)}" if slot is None else f"slots/{key(p.name)}.{slot}"
    chunk = chunk_shape(p.shape, np.dtype(dtype).itemsize)
    members, said = (Member(p.index, 0, p.size),), {"name": p.name, "area": area}
    return StoredArray(path, p.shape, dtype, chunk, area, members, attributes=said)


def _packed(parameters: Sequence[Parameter], area: str, dtype: str) -> StoredArray:
    stops = [*accumulate(p.size for p in parameters)]
    members = tuple(
        Member(p.index, stop - p.size, stop)
        for p, stop in zip(parameters, stops, strict=True)
    )
    told = [
        {"name": p.name, "start": s.start, "shape": list(p.shape)}
        for p, s in zip(parameters, members, strict=True)
    ]
    shape, path = (stops[-1],), f"packed/{area}.{dtype}"
    chunk = chunk_shape(shape, np.dtype(dtype).itemsize)
    said = {"area": area, "members": told}
    return StoredArray(path, shape, dtype, chunk, area, members, attributes=said)


def _of_table(
    table: Table, slots: Sequence[float], counts: Counts
) -> Iterator[StoredArray]:
    computed = compute_dtype(table.dtype)
    rows = [(ROWS, table.dtype, table.dim)]
    rows += [(slot_area(j), computed, width(v, table.dim)) for j, v in enumerate(slots)]
    if not isinstance(table, UnboundedTable):
        for area, dtype, wide in rows:
            yield _of_rows(table, area, dtype, (table.rows, wide))
        return
    n, of = sum(counts.of(table, ROWS)), table.of
    yield _of_rows(table, IDS, "int64", (n,))
    for area, dtype, wide in rows:
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
    most = None if table.is_bounded else CHUNK_ROWS
    chunk = chunk_shape(shape, np.dtype(dtype).itemsize, most)
    wide = shape[1] if len(shape) > 1 else 1
    return StoredArray(
        path=f"tables/{key(table.name)}.{area}",
        shape=shape,
        dtype=dtype,
        chunk=chunk,
        area=area,
        members=(Member(table.index, 0, shape[0] * wide),),
        width=wide,
        attributes={"name": table.name, "area": area},
    )
