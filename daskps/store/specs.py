"""What a store can be made of, besides arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.caller.creation import Blueprint
from daskps.errors import LayoutError
from daskps.layout.arrays import DTYPES, FLOATS
from daskps.layout.slots import MASTERS
from daskps.layout.tables import AnyIds
from daskps.layout.trees import Leaf, flatten, is_tree
from daskps.limits import STORE_NAME_NBYTES, check_parameters, check_shards
from daskps.optim import Function, Rule, WithMaster, resolve
from daskps.optim.patterns import first_matches
from daskps.store.arguments import flag, whole
from daskps.store.first_rows import first_rows
from daskps.store.intake import cast, spec_of
from daskps.store.table_spec import TableSpec
from daskps.usercode import user_code

if TYPE_CHECKING:
    from daskps.layout.tables import TableShape
    from daskps.typing import Array


@dataclass(frozen=True)
class ArraySpec(Leaf):
    """A parameter that its owners make themselves; nothing travels.

    Parameters
    ----------
    shape : tuple of int
        Shape of the parameter.
    dtype : dtype, default "float32"
        A float, integer or bool dtype.
    init : number or callable, default 0
        A number, an initializer of :mod:`daskps.init`, or a function
        ``(shape, dtype, rng) -> ndarray`` that is called with ``shape=(n,)``,
        n ≤ 65,536, for one block of the parameter's elements after the other.
    master : {"float32", "float64"}, optional
        Keep the weights once more, in this dtype, beside the optimizer state: float32 for
        float16, float64 for float32. Updates are computed in it, and applied to it;
        the weights are what it is rounded to, so that steps which are smaller than
        their spacing are not lost.

    Raises
    ------
    LayoutError
        For a dtype that no store holds, and a master that is not the next wider one.
    TypeError
        For a shape of anything but whole numbers.

    Examples
    --------
    >>> import daskps
    >>> ArraySpec((1000, 10), "float32", daskps.init.normal(std=0.01)).shape
    (1000, 10)

    Steps of 0.0001 from 1.0, where float16 has no number between 1 and 0.9995:

    >>> params = {"w": ArraySpec(1, "float16", 1.0, master="float32")}
    >>> store = daskps.create(params, optimizer=daskps.optim.SGD(1e-4))
    >>> for _ in range(20):
    ...     _ = store.push({"w": np.ones(1)})
    >>> store["w"].pull()
    array([0.998], dtype=float16)
    """

    shape: Any
    dtype: Any = "float32"
    init: Any = 0
    master: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        given: Any = self.shape
        shape = (given,) if isinstance(given, int) else tuple(given)
        if any(
            isinstance(n, bool) or not isinstance(n, (int, np.integer)) for n in shape
        ):
            raise TypeError(f"shape is a tuple of int, found {self.shape!r}")
        if any(n < 0 for n in shape):
            raise LayoutError(f"shape {shape} has a negative length")
        name = np.dtype(self.dtype).name
        if name not in DTYPES:
            raise LayoutError(
                f"dtype {name} cannot be held by a store; use one of {', '.join(DTYPES)}"
            )
        object.__setattr__(self, "shape", tuple(int(n) for n in shape))
        object.__setattr__(self, "dtype", name)
        if self.master is not None:
            object.__setattr__(self, "master", _checked_master(name, self.master))


def _checked_master(dtype: str, master: Any) -> str:
    """Return the dtype of a master, or refuse what is none of weights of a dtype."""
    try:
        name = str(np.dtype(master).name)
    except TypeError:
        name = repr(master)[:60]
    if MASTERS.get(dtype) != name:
        known = " or ".join(f"{wide} for {of}" for of, wide in MASTERS.items())
        raise LayoutError(
            f"master={name} is no master of {dtype} weights; it is {known}, or None"
        )
    return name


@dataclass(frozen=True, slots=True)
class Wanted:
    """Into how many shards a store is cut and where these are, as its user says it."""

    shards: Any
    servers: Any
    placement: Any


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
    if not is_tree(params):
        raise TypeError(
            f"params must be a mapping of names to arrays, or a list or tuple of arrays, "
            f"found {type(params).__name__}; pass {{'w': array}}"
        )
    flat = flatten(params)
    if not flat:
        raise LayoutError("params is empty; a store needs at least one parameter")
    number = checked_shards(where.shards)
    # Before anything of their number is made; once more when their shapes are known.
    check_parameters((), len(flat), number or 1)
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    values = _Values()
    of_tables = {n: v for n, v in flat.items() if isinstance(v, TableSpec)}
    dense = {n: v for n, v in flat.items() if n not in of_tables}
    for index, (key, value) in enumerate(dense.items()):
        _encoded(key, "parameter name", LayoutError)
        if isinstance(value, ArraySpec):
            shapes[key] = (value.shape, value.dtype)
            values.initializers[index] = value.init
        else:
            shapes[key] = values.take(index, key, value)
    seed = whole(seed, "seed", least=0)
    tables = {n: _shape_of(n, t, seed) for n, t in of_tables.items()}
    check_parameters(
        ((key, shape, dtype) for key, (shape, dtype) in shapes.items()),
        len(shapes),
        number or 1,
        [(key, most_rows(of), *of[1:3]) for key, of in tables.items()],
    )
    for index, (key, spec) in enumerate(of_tables.items(), len(dense)):
        _encoded(key, "table name", LayoutError)
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


def checked_name(name: Any) -> str:
    """Return the name of a store, or refuse what can be none."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a store is a str, found {name!r:.60}")
    if not name:
        raise ValueError("name is empty; create a store without name= for a session")
    nbytes = len(_encoded(name, "name", ValueError))
    if nbytes > STORE_NAME_NBYTES:
        raise ValueError(
            f"name has {nbytes} bytes, at most {STORE_NAME_NBYTES} are "
            f"allowed; choose a shorter one"
        )
    return name


def _encoded(name: str, what: str, error: type[ValueError]) -> bytes:
    """Return a name as it travels."""
    try:
        return name.encode()
    except UnicodeEncodeError:
        raise error(
            f"{what} {name[:60]!r} has half of a character (a lone surrogate) and "
            f"cannot be sent; decode it with errors='replace' where it comes from"
        ) from None


def checked_shards(shards: Any) -> int | None:
    """Return a number of shards, or refuse what can be none."""
    if shards is None:
        return None
    number = whole(shards, "shards")
    check_shards(number)
    return number


def checked_servers(servers: Any) -> str | list[str]:
    """Return which servers are meant, or refuse what can be none."""
    if not isinstance(servers, str):
        found = _addresses(servers)
        if not found:
            raise TypeError(
                f"servers is 'auto', 'all', 'resource:NAME' or a list of worker "
                f"addresses, found {servers!r}"
            )
        return found
    _encoded(servers, "servers", ValueError)
    if servers in ("auto", "all") or servers.removeprefix("resource:") != servers:
        return servers
    raise ValueError(
        f"servers={servers!r} is not known; choose 'auto', 'all', 'resource:NAME' or "
        f"a list of worker addresses"
    )


def checked_placement(
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
        _encoded(server, "server", ValueError)
    return found
