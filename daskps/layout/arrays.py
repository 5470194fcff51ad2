"""The place of every element of every parameter: a pure function of names and shapes.

The parameters of one dtype form one flat vector, in the order they were given; shard
*i* of *k* owns slice *i* of every dtype's vector, cut like ``np.array_split``. Those
that are placed on some of the shards form vectors of their own, which are cut over
these alone (:mod:`daskps.layout.vectors`). One parameter therefore meets a shard in at
most one contiguous run, a *piece*. Tables are cut apart from them, see
:mod:`daskps.layout.tables`.
"""

from __future__ import annotations

import difflib
import reprlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.errors import LayoutError, UnknownParameterError
from daskps.layout.parameters import Parameter, Piece
from daskps.layout.tables import (
    Table,
    TablePiece,
    TableShape,
    UnboundedIds,
    UnboundedTable,
)
from daskps.layout.vectors import Vector, VectorPart, by_index, parts_of, placed_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

#: Dtypes a store can hold. Float parameters take gradients, the others `add`, `assign`.
FLOATS = ("float16", "float32", "float64")
DTYPES = (
    *FLOATS,
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "bool",
)
ALIGN_NBYTES = 64


def compute_dtype(dtype: str) -> str:
    """Return the dtype updates of a float `dtype` are computed in."""
    return "float32" if dtype == "float16" else dtype


def align(nbytes: int, to: int = ALIGN_NBYTES) -> int:
    """Round `nbytes` up to the next multiple of `to`, 64 by default."""
    return -(-nbytes // to) * to


def counted(n: int, thing: str) -> str:
    """Return a number of things as text: "1 shard", "2 shards"."""
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"


@dataclass(frozen=True)
class Layout:
    """Names, shapes, dtypes and the number of shards; everything else follows."""

    parameters: tuple[Parameter, ...]
    n_shards: int
    tables: tuple[Table, ...] = ()

    @classmethod
    def build(
        cls,
        shapes: Mapping[str, tuple[tuple[int, ...], str]],
        n_shards: int,
        tables: Mapping[str, TableShape] | None = None,
        placed: Sequence[tuple[Sequence[int], Sequence[int]]] = (),
    ) -> Layout:
        """Lay parameters and tables out over `n_shards` shards.

        `shapes` has the shape and dtype of each parameter, `tables` the number of rows,
        their length and the dtype of each table, both by name. An unbounded table has 0
        rows, and what they begin with. `placed` has shards, and the indices of the
        parameters and tables that are cut over these alone.
        """
        if n_shards < 1:
            raise ValueError(f"shards must be at least 1, found {n_shards}")
        tables = tables or {}
        over = by_index(placed, len(shapes) + len(tables), n_shards)
        ends: dict[Vector, int] = {}
        parameters = []
        for index, (name, (shape, dtype)) in enumerate(shapes.items()):
            _check_dtype("parameter", name, dtype)
            offset = ends.get(vector := Vector(dtype, over.get(index)), 0)
            parameter = Parameter(index, name, shape, dtype, offset, vector.shards)
            ends[vector] = offset + parameter.size
            parameters.append(parameter)
        return cls(tuple(parameters), n_shards, _tables(tables, parameters, over))

    @cached_property
    def by_name(self) -> dict[str, Parameter]:
        """Parameters by name."""
        return {p.name: p for p in self.parameters}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names by index: of the parameters, and then of the tables."""
        return (*(p.name for p in self.parameters), *(t.name for t in self.tables))

    @cached_property
    def table_by_name(self) -> dict[str, Table]:
        """Tables by name."""
        return {t.name: t for t in self.tables}

    @cached_property
    def grows(self) -> bool:
        """Whether shards grow with new rows: those of an unbounded table do."""
        return not all(table.is_bounded for table in self.tables)

    def dtype_of(self, index: int) -> str:
        """Return the dtype of the parameter or table of an index."""
        n = len(self.parameters)
        return (self.parameters[index] if index < n else self.tables[index - n]).dtype

    @cached_property
    def lengths(self) -> dict[str, int]:
        """Elements of all parameters of each dtype, in order of appearance."""
        lengths: dict[str, int] = {}
        for vector, n in self.vectors.items():
            lengths[vector.dtype] = lengths.get(vector.dtype, 0) + n
        return lengths

    @cached_property
    def vectors(self) -> dict[Vector, int]:
        """Elements of each flat vector, in order of appearance."""
        vectors: dict[Vector, int] = {}
        for p in self.parameters:
            vectors[p.vector] = vectors.get(p.vector, 0) + p.size
        return vectors

    @cached_property
    def parts(self) -> dict[Vector, tuple[VectorPart, ...]]:
        """For each flat vector the part of each shard that it is cut over."""
        return parts_of(self.vectors, self.n_shards)

    def __getitem__(self, name: str) -> Parameter:
        try:
            return self.by_name[name]
        except (KeyError, TypeError):
            raise self._unknown(name) from None

    def _unknown(self, name: object) -> UnknownParameterError | TypeError:
        """Return what to say of a name that is none, or of what is no name."""
        if not isinstance(name, str):
            return TypeError(
                f"parameter names are str, found {reprlib.repr(name)[:60]}; to read several "
                f"parameters use store.pull([...])"
            )
        if name in self.table_by_name:
            return UnknownParameterError(
                f"{name[:60]!r} is a table, not an array; read rows of it with "
                f"pull(rows={{{name[:60]!r}: ids}}) or store[{name[:60]!r}].pull(ids)"
            )
        said = f"no parameter {name[:60]!r} in this store; it holds"
        if below := [n for n in self.by_name if n.startswith(f"{name}/")]:
            return UnknownParameterError(
                f"{said} {_shortened(below)}: nested names are joined with '/'"
            )
        said = f"{said} {_shortened(self.names)}"
        if (one := name.rpartition("/")[0]) in self.by_name:
            return UnknownParameterError(
                f"{said}, and {one[:60]!r} is one array; a mapping or a list of arrays "
                f"names several, pass numpy.stack(...) of them if they are one"
            )
        near = difflib.get_close_matches(name[:60], self.names[:1000], 1)
        return UnknownParameterError(
            f"{said}; did you mean {near[0]!r}?" if near else said
        )

    @cached_property
    def n_elements(self) -> tuple[dict[str, int], ...]:
        """For each shard how many elements of arrays it has of each dtype."""
        found = [dict.fromkeys(self.lengths, 0) for _ in range(self.n_shards)]
        for vector, parts in self.parts.items():
            for part in parts:
                found[part.shard][vector.dtype] += part.size
        return tuple(found)

    def shard_nbytes(self, shard: int) -> int:
        """Return the bytes of one copy of a shard's values, rows among them."""
        of_tables = sum(piece.nbytes for piece in self.table_pieces[shard])
        return self.dense_nbytes(shard) + of_tables

    def dense_nbytes(self, shard: int) -> int:
        """Return the bytes of one copy of what a shard has of arrays."""
        return sum(np.dtype(d).itemsize * n for d, n in self.n_elements[shard].items())

    @cached_property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """For each shard its non-empty pieces, in order of the parameters."""
        found: list[list[Piece]] = [[] for _ in range(self.n_shards)]
        for p in self.parameters:
            for piece in self._cut(p):
                found[piece.shard].append(piece)
        return tuple(map(tuple, found))

    @cached_property
    def table_pieces(self) -> tuple[tuple[TablePiece, ...], ...]:
        """For each shard its piece of every table, of no rows where none fall there."""
        return tuple(
            tuple(table.cut(self.n_shards, shard) for table in self.tables)
            for shard in range(self.n_shards)
        )

    def table_position(self, shard: int, index: int) -> int:
        """Return the position of a table's piece within a shard: they follow the arrays'."""
        return len(self.pieces[shard]) + index - len(self.parameters)

    @cached_property
    def pieces_of(self) -> dict[int, tuple[Piece, ...]]:
        """For each parameter index its non-empty pieces, in order of the shards."""
        return {p.index: tuple(self._cut(p)) for p in self.parameters}

    @cached_property
    def positions(self) -> dict[tuple[int, int], int]:
        """Position of each parameter's piece within each shard, by shard and index."""
        return {
            (shard, piece.parameter.index): position
            for shard, pieces in enumerate(self.pieces)
            for position, piece in enumerate(pieces)
        }

    def _cut(self, p: Parameter) -> Iterator[Piece]:
        parts = self.parts[p.vector]
        size, longer = divmod(self.vectors[p.vector], len(parts))
        if p.size == 0:
            return
        # The first shard that can hold element `offset`, found by arithmetic: with
        # 10,000 shards a scan per parameter would dominate `create`.
        edge = longer * (size + 1)
        i = (
            p.offset // (size + 1)
            if p.offset < edge
            else longer + (p.offset - edge) // max(size, 1)
        )
        at = p.offset
        while at < p.offset + p.size:
            shard, start, stop, local = parts[i]
            end = min(stop, p.offset + p.size)
            if end > at:
                yield Piece(p, shard, at - p.offset, end - p.offset, local + at - start)
                at = end
            i += 1

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one copy of all values."""
        dense = sum(p.nbytes for p in self.parameters)
        return dense + sum(table.nbytes for table in self.tables)

    def to_wire(self) -> dict[str, Any]:
        """Return the layout as plain lists and strings."""
        arrays = [(p.name, list(p.shape), p.dtype) for p in self.parameters]
        wire = {"parameters": arrays, "shards": self.n_shards}
        if self.tables:
            wire["tables"] = [(t.name, t.rows, t.dim, t.dtype) for t in self.tables]
        unbounded = [t for t in self.tables if isinstance(t, UnboundedTable)]
        if unbounded:
            wire["unbounded"] = [(t.name, *t.of.to_wire()) for t in unbounded]
        if placed := placed_of([*self.parameters, *self.tables]):
            wire["placed"] = placed
        return wire

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Layout:
        """Rebuild a layout from :meth:`to_wire`."""
        shapes = {n: (tuple(s), d) for n, s, d in wire["parameters"]}
        unbounded = {
            n: UnboundedIds.from_wire(*of) for n, *of in wire.get("unbounded", ())
        }
        tables: dict[str, TableShape] = {
            n: (rows, dim, d, unbounded[n]) if n in unbounded else (rows, dim, d)
            for n, rows, dim, d in wire.get("tables", ())
        }
        return cls.build(shapes, wire["shards"], tables, wire.get("placed", ()))


def _tables(
    tables: Mapping[str, TableShape],
    parameters: Sequence[Parameter],
    over: Mapping[int, tuple[int, ...]],
) -> tuple[Table, ...]:
    """Return tables, numbered after the parameters; refuse what no store holds."""
    names = {p.name for p in parameters}
    found: list[Table] = []
    for index, (name, shape) in enumerate(tables.items(), len(names)):
        rows, dim, dtype, *unbounded = shape
        _check_dtype("table", name, dtype)
        if name in names:
            raise LayoutError(
                f"{name!r} is the name of an array and of a table; rename one of them"
            )
        if (rows < 1 and not unbounded) or dim < 1:
            raise LayoutError(
                f"table {name!r} has {counted(rows, 'row')} of {counted(dim, 'number')}; "
                f"it needs at least one of each"
            )
        about, on = (index, name, rows, dim, dtype), over.get(index)
        if unbounded:
            found.append(UnboundedTable(*about, unbounded[0], shards=on))
        else:
            found.append(Table(*about, shards=on))
    return tuple(found)


def _check_dtype(kind: str, name: str, dtype: str) -> None:
    if dtype not in DTYPES:
        raise LayoutError(
            f"{kind} {name!r} has dtype {dtype}, which a store cannot hold; use one of "
            f"{', '.join(DTYPES)}"
        )


def _shortened(names: Sequence[str], most: int = 8) -> str:
    """Return names for a message, cut after `most`."""
    shown, more = [name[:40] for name in names[:most]], len(names) - most
    return f"{shown}" + (f" and {more} more" if more > 0 else "")
