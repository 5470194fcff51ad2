"""All that a store is made of, from arrays or from a checkpoint, checked by its caller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.backend import checked
from daskps.cluster.caller.creation import Blueprint
from daskps.errors import LayoutError
from daskps.layout.arrays import DTYPES, FLOATS
from daskps.layout.tables import UnboundedIds
from daskps.layout.trees import flatten, is_tree
from daskps.limits import check_parameters, check_shards
from daskps.optim import Function, Rule, WithMaster, resolve
from daskps.optim.patterns import first_matches
from daskps.store.arguments import checked_name, encoded, flag, whole
from daskps.store.specs import ArraySpec, TableSpec, first_rows
from daskps.store.values import cast, spec_of
from daskps.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.checkpoint.listing import CheckpointTarget
    from daskps.layout.tables import TableShape
    from daskps.typing import Array


_MOST_COPIES = 2


@dataclass(frozen=True, slots=True)
class Wanted:
    """The name of a store and its place, as its user says them."""

    shards: Any
    servers: Any
    placement: Any
    name: Any = None
    overwrite: Any = False
    #: Where it is to be restored from once a shard of it is lost.
    recover_from: CheckpointTarget | None = None
    device: Any = None
    copies: Any = 1

    @property
    def n_shards(self) -> int | None:
        """The number of shards, None for one of each server."""
        if self.shards is None:
            return None
        number = whole(self.shards, "shards")
        check_shards(number)
        return number

    def blueprint(
        self, values: Values, rules: Mapping[int, Rule], **more: Any
    ) -> Blueprint:
        """Return what a store of these arrays and tables is made of."""
        device, names = checked(self.device), [*values.shapes, *values.tables]
        copies = whole(self.copies, "copies", least=1)
        if copies > _MOST_COPIES:
            raise ValueError(f"copies must be 1 or {_MOST_COPIES}, not {copies}")
        if device:
            _check_on_device(device, values.tables, copies)
        return Blueprint(
            device=device,
            copies=copies,
            name=None if self.name is None else checked_name(self.name),
            shapes=values.shapes,
            tables=values.tables,
            arrays=values.arrays,
            collections=values.collections,
            initializers=values.initializers,
            rules=with_masters(rules, values.masters),
            shards=self.n_shards,
            servers=_checked_servers(self.servers),
            placement=_checked_placement(self.placement, names),
            overwrite=flag(self.overwrite, "overwrite"),
            recover_from=self.recover_from,
            **more,
        )


def _check_on_device(
    device: str, tables: Mapping[str, TableShape], copies: int
) -> None:
    """Refuse what no shard on a device takes."""
    if copies > 1:
        raise LayoutError(
            f"shards on device={device!r} have no second copy: they go with their process; "
            f"create the store without copies=, and with recover_from="
        )
    for name, table in tables.items():
        if len(table) > 3:
            raise LayoutError(
                f"table {name[:60]!r} of any ids cannot be on device={device!r}: such tables "
                f"are in host memory; make a second store for it, without device=, or give "
                f"it a number of rows"
            )


def blueprint(
    params: Any,
    *,
    optimizer: Any,
    where: Wanted,
    seed: int,
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
    number = where.n_shards
    # Before anything of their number is made; once more when their shapes are known.
    check_parameters((), len(flat), number or 1)
    values, seed = Values(), whole(seed, "seed", least=0)
    values.take_all(flat, number, seed=seed)
    dtypes = {n: dtype for n, (_, dtype) in values.shapes.items()}
    rules = rules_of(optimizer, dtypes, values.tables)
    return where.blueprint(values, rules, seed=seed)


def _shape_of(name: str, spec: TableSpec, seed: int) -> TableShape:
    """Return what a table is in a layout."""
    if spec.rows is not None:
        return spec.rows, spec.dim, spec.dtype
    first = first_rows(spec.init, name=name, dtype=spec.dtype)
    policy = spec.max_rows or 0, spec.ttl or 0, spec.admit_after
    return 0, spec.dim, spec.dtype, UnboundedIds(first, seed, 0, *policy)


def _most_rows(shape: TableShape) -> int:
    """Return for how many rows of a table memory is taken at once."""
    rows, _, _, *unbounded = shape
    return unbounded[0].max_rows if unbounded else rows


@dataclass(frozen=True, slots=True)
class Values:
    """All parameters and tables, and sources of initial values by their index."""

    shapes: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    tables: dict[str, TableShape] = field(default_factory=dict)
    arrays: dict[int, Array] = field(default_factory=dict)
    collections: dict[int, Any] = field(default_factory=dict)
    initializers: dict[int, Any] = field(default_factory=dict)
    #: Names of the parameters with a full-precision copy.
    masters: dict[int, str] = field(default_factory=dict)

    def take_all(
        self, given: Mapping[str, Any], shards: int | None, *, seed: int
    ) -> None:
        """Take new parameters and tables, behind those that are there already.

        Parameters
        ----------
        given : mapping of str to object
            Arrays and specifications.
        shards : int, optional
            How many the store is to have.
        seed : int
            The store's.

        Raises
        ------
        LayoutError, TypeError
            For what no store can be made of.
        """
        shapes, tables = self.shapes, self.tables
        specs = {n: v for n, v in given.items() if isinstance(v, TableSpec)}
        dense = {n: v for n, v in given.items() if n not in specs}
        for index, (key, value) in enumerate(dense.items(), len(shapes)):
            encoded(key, "parameter name", LayoutError)
            if isinstance(value, ArraySpec):
                shapes[key] = value.shape, value.dtype
                self.initializers[index] = value.init
                if value.master:
                    self.masters[index] = key
            else:
                shapes[key] = self.take(index, key, value)
        first = len(shapes) + len(tables)
        tables |= {n: _shape_of(n, spec, seed) for n, spec in specs.items()}
        check_parameters(
            ((name, *of) for name, of in shapes.items()),
            len(shapes),
            shards or 1,
            [(name, _most_rows(of), *of[1:3]) for name, of in tables.items()],
        )
        for index, (key, spec) in enumerate(specs.items(), first):
            encoded(key, "table name", LayoutError)
            if spec.rows is not None:
                self.take_table(index, key, spec)

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


def layout_wanted(
    shards: Any, servers: Any
) -> tuple[int | None, str | list[str] | None]:
    """Return the shards and servers that a store is to have from now on, or refuse."""
    wanted = Wanted(shards, servers, None)
    return wanted.n_shards, None if servers is None else _checked_servers(servers)


def _checked_servers(servers: Any) -> str | list[str]:
    """Return which servers are meant, or refuse what can be none."""
    if not isinstance(servers, str):
        found = _addresses(servers)
        if not found:
            raise TypeError(
                f"servers is 'auto', 'all', 'resource:NAME' or a list of worker "
                f"addresses, found {servers!r}"
            )
        return found
    encoded(servers, "servers", ValueError)
    if servers in ("auto", "all") or servers.removeprefix("resource:") != servers:
        return servers
    raise ValueError(
        f"servers={servers!r} is not known; choose 'auto', 'all', 'resource:NAME' or "
        f"a list of worker addresses"
    )


def _checked_placement(
    placement: Any, names: Sequence[str]
) -> list[tuple[list[str], list[int]]]:
    """Return servers, and the indices of what is placed on them.

    Parameters
    ----------
    placement : mapping of str to str or sequence of str, or None
        As `create` takes it.
    names : sequence of str
        Of the arrays and then of the tables.

    Raises
    ------
    TypeError, ValueError
        For what names no servers.
    LayoutError
        If a pattern matches nothing.
    """
    if placement is None:
        return []
    if not isinstance(placement, Mapping):
        raise TypeError(
            f"placement is a mapping of patterns of names to worker addresses, such as "
            f"{{'emb*': 'tcp://host:1234'}}, found {type(placement).__name__}"
        )
    servers: dict[str, list[str]] = {}
    for pattern, given in placement.items():
        one = [given] if isinstance(given, str) else given
        if not isinstance(pattern, str) or not (found := _addresses(one)):
            raise TypeError(
                f"placement[{pattern!r:.60}] is a worker address or a list of them, and "
                f"its key a pattern of names, found {given!r:.80}"
            )
        servers[pattern] = found
    by_pattern: dict[str, list[int]] = {}
    for index, pattern in enumerate(first_matches(servers, names, "placement")):
        if pattern is not None:
            by_pattern.setdefault(pattern, []).append(index)
    return [(servers[pattern], indices) for pattern, indices in by_pattern.items()]


def _addresses(given: Any) -> list[str]:
    """Return addresses of workers; none for what has no such."""
    found = list(given) if isinstance(given, Iterable) else []
    if not all(isinstance(one, str) for one in found):
        return []
    for server in found:
        encoded(server, "server", ValueError)
    return found


def rules_of(
    optimizer: Any,
    arrays: Mapping[str, str],
    tables: Mapping[str, TableShape],
) -> dict[int, Rule]:
    """Return the rules by index, that of the arrays first and then of the tables."""
    if optimizer is None:
        return {}
    dtypes = {**arrays, **{n: shape[2] for n, shape in tables.items()}}
    floats = [n for n, dtype in dtypes.items() if dtype in FLOATS]
    if not floats and isinstance(optimizer, Rule):
        raise LayoutError(
            "the store has no float parameter, so an optimizer has nothing to do; "
            "leave optimizer= out"
        )
    resolved = resolve(optimizer, floats)
    for name, rule in resolved.items():
        if isinstance(rule, Function) and name in tables:
            raise LayoutError(
                f"the optimizer of table {name[:60]!r} is {rule!r}, which takes whole "
                f"arrays; give tables another one by their names, such as "
                f"optimizer={{{name[:60]!r}: Adagrad(0.1), '*': Function(f)}}"
            )
        with user_code("the optimizer"):
            of_rows, of_ranks = rule.row_mean is not None, bool(rule.rank_slots)
        if of_ranks and name in tables:
            raise LayoutError(
                f"the optimizer of table {name[:60]!r} is {rule!r}, which keeps state for "
                f"each trainer, of arrays only; give tables another one by their names, "
                f"such as optimizer={{{name[:60]!r}: Adagrad(0.1), '*': DCASGD(0.1, ranks=2)}}"
            )
        if of_rows and name in arrays:
            raise LayoutError(
                f"the optimizer of parameter {name[:60]!r} is {rule!r}, which needs the "
                f"rows of a table, and {name[:60]!r} is an array; give arrays another one "
                f"by their names, such as optimizer={{'emb': Adagrad(0.1, rowwise=True), "
                f"'*': Adagrad(0.1)}}"
            )
    return {i: resolved[n] for i, n in enumerate(dtypes) if n in resolved}


def with_masters(
    rules: Mapping[int, Rule], masters: Mapping[int, str]
) -> dict[int, Rule]:
    """Return rules by index, those of parameters with masters, by name, around these.

    Raises
    ------
    LayoutError
        For a parameter without a rule, and for functions.
    """
    # Parameters that share a rule share its loops.
    made: dict[int, Rule] = {}
    found = dict(rules)
    for index, name in masters.items():
        if (rule := rules.get(index)) is None:
            raise LayoutError(
                f"{name[:60]!r} has a master, which is what an optimizer updates, and no "
                f"optimizer; give it one with create(optimizer=...), or leave master= out"
            )
        if isinstance(rule, Function):
            raise LayoutError(
                f"the optimizer of {name[:60]!r} is {rule!r}, which is given the weights "
                f"and returns them: it has no use for a master; leave master= out"
            )
        found[index] = made.setdefault(id(rule), WithMaster(rule))
    return found
