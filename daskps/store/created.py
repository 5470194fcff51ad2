"""What a store is made of that is made from arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.caller.creation import Blueprint
from daskps.errors import LayoutError
from daskps.layout.arrays import DTYPES
from daskps.layout.tables import AnyIds
from daskps.layout.trees import flatten, is_tree
from daskps.limits import check_parameters
from daskps.store.arguments import checked_name, encoded, flag, whole
from daskps.store.array_spec import ArraySpec
from daskps.store.first_rows import first_rows
from daskps.store.intake import cast, spec_of
from daskps.store.rules import rules_of, with_masters
from daskps.store.servers import checked_placement, checked_servers, checked_shards
from daskps.store.table_spec import TableSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskps.layout.tables import TableShape
    from daskps.store.servers import Wanted
    from daskps.typing import Array


def blueprint(
    params: Any,
    *,
    name: str | None,
    optimizer: Any,
    where: Wanted,
    seed: int,
    overwrite: bool,
) -> Blueprint:
    """Check everything `create` was given, without the cluster.

    Raises
    ------
    LayoutError, TypeError, ValueError
        For what no store can be made of.
    """
    is_empty = isinstance(params, (list, tuple)) and not params
    if not is_tree(params) and not is_empty:
        raise TypeError(
            f"params must be a mapping of names to arrays, or a list or tuple of arrays, "
            f"found {type(params).__name__}; pass {{'w': array}}"
        )
    flat = {} if is_empty else flatten(params)
    if not flat:
        raise LayoutError("params is empty; a store needs at least one parameter")
    number = checked_shards(where.shards)
    # Before anything of their number is made; once more when their shapes are known.
    check_parameters((), len(flat), number or 1)
    values = _Values()
    of_tables = {n: v for n, v in flat.items() if isinstance(v, TableSpec)}
    dense = {n: v for n, v in flat.items() if n not in of_tables}
    shapes = values.take_all(dense)
    seed = whole(seed, "seed", least=0)
    tables = {n: _shape_of(n, t, seed) for n, t in of_tables.items()}
    check_parameters(
        ((key, shape, dtype) for key, (shape, dtype) in shapes.items()),
        len(shapes),
        number or 1,
        [(key, most_rows(of), *of[1:3]) for key, of in tables.items()],
    )
    for index, (key, spec) in enumerate(of_tables.items(), len(dense)):
        encoded(key, "table name", LayoutError)
        if spec.rows is not None:
            values.take_table(index, key, spec)
    rules = rules_of(optimizer, {n: d for n, (_, d) in shapes.items()}, tables)
    masters = {
        i: n for i, (n, v) in enumerate(dense.items()) if getattr(v, "master", None)
    }
    return Blueprint(
        name=None if name is None else checked_name(name),
        shapes=shapes,
        tables=tables,
        arrays=values.arrays,
        collections=values.collections,
        initializers=values.initializers,
        rules=with_masters(rules, masters),
        shards=number,
        servers=checked_servers(where.servers),
        placement=checked_placement(where.placement, [*shapes, *tables]),
        seed=seed,
        overwrite=flag(overwrite, "overwrite"),
    )


def _shape_of(name: str, spec: TableSpec, seed: int) -> TableShape:
    """Return what a table is in a layout."""
    if spec.rows is not None:
        return spec.rows, spec.dim, spec.dtype
    first = first_rows(spec.init, name=name, dtype=spec.dtype)
    policy = spec.max_rows or 0, spec.ttl or 0, spec.admit_after
    return 0, spec.dim, spec.dtype, AnyIds(first, seed, 0, *policy)


def most_rows(shape: TableShape) -> int:
    """Return for how many rows of a table memory is taken at once."""
    rows, _, _, *any_ids = shape
    return any_ids[0].max_rows if any_ids else rows


@dataclass(frozen=True, slots=True)
class _Values:
    """Where initial values come from, by the index of a parameter or table."""

    arrays: dict[int, Array] = field(default_factory=dict)
    collections: dict[int, Any] = field(default_factory=dict)
    initializers: dict[int, Any] = field(default_factory=dict)

    def take_all(
        self, dense: Mapping[str, Any]
    ) -> dict[str, tuple[tuple[int, ...], str]]:
        """Take the values of all parameters; return shapes and dtypes."""
        shapes = {}
        for index, (key, value) in enumerate(dense.items()):
            encoded(key, "parameter name", LayoutError)
            if isinstance(value, ArraySpec):
                shapes[key] = value.shape, value.dtype
                self.initializers[index] = value.init
            else:
                shapes[key] = self.take(index, key, value)
        return shapes

    def take(self, index: int, key: str, value: Any) -> tuple[tuple[int, ...], str]:
        """Take values in an array or a dask array; return shape and dtype."""
        if hasattr(value, "__dask_graph__"):
            about, self.collections[index] = _collection(key, value)
            return about
        array = spec_of(value, key)
        self.arrays[index] = np.ascontiguousarray(array).reshape(-1)
        return array.shape, array.dtype.name

    def take_table(self, index: int, key: str, spec: TableSpec) -> None:
        """Take what the rows of a table are at first."""
        if not spec.has_values:
            self.initializers[index] = spec.init
            return
        rows = spec.init
        shape, dtype = self.take(index, key, rows)
        if shape != (spec.rows, spec.dim) or not np.can_cast(
            dtype, spec.dtype, "same_kind"
        ):
            raise LayoutError(
                f"init of table {key[:60]!r} has shape {shape} and dtype {dtype}, the "
                f"table ({spec.rows}, {spec.dim}) and {spec.dtype}; make them equal"
            )
        if index in self.arrays and dtype != spec.dtype:
            of = f"the table {spec.dtype}"
            self.arrays[index] = cast(
                self.arrays[index],
                spec.dtype,
                f"init of table {key[:60]!r}",
                of=of,
                given=rows,
            )


def _collection(key: str, value: Any) -> tuple[tuple[tuple[int, ...], str], Any]:
    # By type: a Delayed has every attribute one asks for.
    if not isinstance(getattr(value, "chunks", None), tuple):
        raise LayoutError(
            f"parameter {key!r} is a {type(value).__name__}; of dask collections a "
            f"store takes arrays, use .to_dask_array(lengths=True)"
        )
    if any(np.isnan(n) for n in value.shape):
        raise LayoutError(
            f"parameter {key!r} is a dask array of unknown chunk sizes; call "
            f".compute_chunk_sizes() on it first"
        )
    dtype = value.dtype.name
    if dtype not in DTYPES:
        raise LayoutError(
            f"parameter {key!r} has dtype {value.dtype}, which a store cannot hold; "
            f"use one of {', '.join(DTYPES)}"
        )
    checked = value.map_blocks(
        _checked_chunk,
        key,
        dtype=value.dtype,
        meta=np.empty((0,) * value.ndim, dtype),
        # Ours, so that what fails in it is told once, where `create` was called.
        token="daskps-checked",
    )
    return (tuple(int(n) for n in value.shape), dtype), checked


def _checked_chunk(chunk: Any, key: str, block_info: Any = None) -> Array:
    """Return a chunk that is what its dask array says; runs on the workers."""
    array = spec_of(chunk, key)
    said = block_info[None]
    shape, dtype = tuple(said["chunk-shape"]), np.dtype(said["dtype"])
    if array.shape != shape or not np.can_cast(array.dtype, dtype, "same_kind"):
        raise LayoutError(
            f"a chunk of parameter {key[:60]!r} has shape {array.shape} and dtype "
            f"{array.dtype}, but its dask array says {shape} and {dtype}; give the "
            f"function that made it the right chunks= and dtype="
        )
    return array
