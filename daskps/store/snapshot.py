"""A store at one moment: copies on the owners, seen as dask arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from dask.tokenize import tokenize

from daskps.layout.chunks import chunks_of, chunks_of_table
from daskps.layout.spans import IDS, ROWS, WEIGHTS
from daskps.store.repr import snapshot_html, snapshot_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from daskps.cluster.caller.snapshots import Taken
    from daskps.cluster.host.snapshot_copies import CopyGroup
    from daskps.layout.arrays import Layout
    from daskps.layout.chunks import Chunk
    from daskps.layout.parameters import Parameter
    from daskps.layout.spans import Span
    from daskps.layout.tables import Table
    from daskps.typing import Array
    from daskps.version import Version


class Snapshot(Mapping[str, Any]):
    """The parameters of a store at one moment, as dask arrays.

    Made by :meth:`ParameterStore.snapshot`. Each array is cut along its first axis
    near the borders of the shards; its chunks are on the workers that own them.
    Nothing that happens to the store changes a snapshot, and it outlives the store.
    The memory is freed when neither the snapshot nor an array made of it is left.

    Parameters
    ----------
    taken : Taken
        The copies.

    Notes
    -----
    Two snapshots of one store at the same versions have the same token, and their
    arrays the same names. A part that is lost with its worker cannot be computed
    again: computations that need it raise SnapshotLostError.

    Examples
    --------
    >>> store = daskps.create({"w": np.arange(4.0)}, optimizer=daskps.optim.SGD(0.1))
    >>> snap = store.snapshot()
    >>> _ = store.assign({"w": np.zeros(4)})
    >>> list(snap), snap.version, float(snap["w"].sum().compute())
    (['w'], 0, 6.0)
    """

    def __init__(self, taken: Taken) -> None:
        self._taken = taken
        self._arrays: dict[str, Any] = {}

    @property
    def version(self) -> Version:
        """Largest version of the shards, with the version of each.

        Examples
        --------
        >>> store = daskps.create({"w": np.zeros(4)})
        >>> _ = store.add({"w": np.ones(4)})
        >>> store.snapshot().version
        1
        """
        return self._taken.version

    @property
    def layout(self) -> Layout:
        """Names, shapes, dtypes and how they are cut into shards.

        Examples
        --------
        >>> store = daskps.create({"w": np.zeros(4)}, shards=2)
        >>> store.snapshot().layout.n_shards
        2
        """
        return self._taken.layout

    def __getitem__(self, name: str) -> Any:
        if name not in self._arrays:
            taken, table = self._taken, self.layout.table_by_name.get(name)
            self._arrays[name] = (
                dask_array(taken, self.layout[name])
                if table is None
                else dask_table(taken, table)
            )
        return self._arrays[name]

    def __contains__(self, name: object) -> bool:
        return name in self.layout.by_name or name in self.layout.table_by_name

    def __iter__(self) -> Iterator[str]:
        return iter([*self.layout.by_name, *self.layout.table_by_name])

    def __len__(self) -> int:
        return len(self.layout.parameters) + len(self.layout.tables)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Snapshot):
            return NotImplemented
        return bool(self.__dask_tokenize__() == other.__dask_tokenize__())

    def __hash__(self) -> int:
        return hash(self.__dask_tokenize__())

    def __dask_tokenize__(self) -> Any:
        taken = self._taken
        return type(self).__name__, taken.uid, taken.version.pairs

    def __reduce__(self) -> Any:
        return type(self), (self._taken,)

    def __repr__(self) -> str:
        return snapshot_line(*self._about)

    def _repr_html_(self) -> str:
        return snapshot_html(*self._about)

    @property
    def _about(self) -> tuple[str, int, Layout, dict[int, int]]:
        taken = self._taken
        n_rows = {index: sum(of.values()) for index, of in taken.n_rows.items()}
        return taken.name, int(taken.version), taken.layout, n_rows


def dask_array(taken: Taken, parameter: Parameter, *, alone: bool = False) -> Any:
    """Return one parameter of a snapshot as a dask array.

    Parameters
    ----------
    taken : Taken
        The copies.
    parameter : Parameter
        One of the store's.
    alone : bool
        Whether only this parameter was copied.

    Returns
    -------
    dask.array.Array
        A small layer of tasks over the futures of the copies.
    """
    about = _About(WEIGHTS, parameter.index, parameter.shape, parameter.dtype)
    return _array_of(taken, about, chunks_of(taken.layout, parameter), alone=alone)


def dask_table(taken: Taken, table: Table, *, alone: bool = False) -> Any:
    """Return one table of a snapshot as a dask array; see :func:`dask_array`.

    Of one that is unbounded it is a pair: the ids, and the array of their rows.
    """
    if table.is_bounded:
        chunks = chunks_of_table(taken.layout, table)
        about = _About(ROWS, table.index, (table.rows, table.dim), table.dtype)
        return _array_of(taken, about, chunks, alone=alone)
    n_rows = taken.n_rows[table.index]
    n = sum(n_rows.values())
    return tuple(
        _array_of(
            taken,
            about,
            chunks_of_table(taken.layout, table, n_rows, about.area),
            alone=alone,
        )
        for about in (
            _About(IDS, table.index, (n,), "int64"),
            _About(ROWS, table.index, (n, table.dim), table.dtype),
        )
    )


class _About(NamedTuple):
    """An array of a snapshot: elements of an area of one parameter or table."""

    area: str
    #: Of the parameter or table.
    position: int
    shape: tuple[int, ...]
    dtype: str


def _array_of(
    taken: Taken, about: _About, chunks: Sequence[Chunk], *, alone: bool
) -> Any:
    """Return chunks as an array; what they hold follows from the versions of shards."""
    import dask.array as da
    from dask._task_spec import Task, TaskRef
    from dask.highlevelgraph import HighLevelGraph

    area, position, shape, dtype = about
    if not chunks:
        return da.zeros(shape, dtype=dtype, chunks=shape)
    versions = dict(taken.version.pairs)
    shards = dict.fromkeys(shard for chunk in chunks for shard, _ in chunk.parts)
    told = [(shard, versions[shard]) for shard in shards]
    token = tokenize(taken.uid, area, position, told, alone)
    name = f"daskps-snapshot-array-{token}"
    layer: dict[Any, Any] = {}
    base: dict[Any, Any] = {}
    for i, chunk in enumerate(chunks):
        key = (name, i, *(0,) * (len(shape) - 1)) if shape else (name,)
        wanted = (chunk.rows, *shape[1:]) if shape else ()
        home, refs = taken.futures[chunk.home], []
        base[home.key] = home
        for shard, span in chunk.parts:
            # A row that ends in another group: a task there gives what is missing, so
            # that nothing else of the group travels.
            if (other := taken.futures[shard]).key != home.key:
                edge = (f"{name}-edge", i, shard)
                base[other.key] = other
                layer[edge] = Task(edge, _take_edge, shard, span, TaskRef(other.key))
                refs.append(TaskRef(edge))
        layer[key] = Task(key, _assemble, chunk.parts, wanted, TaskRef(home.key), *refs)
    graph = HighLevelGraph(
        {f"copies-{name}": base, name: layer},
        {f"copies-{name}": set(), name: {f"copies-{name}"}},
    )
    along = (tuple(chunk.rows for chunk in chunks),) if shape else ()
    rest = tuple((n,) for n in shape[1:])
    array: Any = da.Array
    return array(graph, name, along + rest, dtype=np.dtype(dtype))


def _assemble(
    parts: Sequence[tuple[int, Span]],
    shape: tuple[int, ...],
    copies: CopyGroup,
    *edges: Array,
) -> Array:
    """Put a chunk together out of the copies of its home, and the parts of other groups.

    A single part is a view of a copy, which nobody may write to.
    """
    others = iter(edges)
    arrays = [
        copies.get(shard, span) if shard in copies else next(others)
        for shard, span in parts
    ]
    whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    found: Array = whole.reshape(shape)
    return found


def _take_edge(shard: int, span: Span, copies: CopyGroup) -> Array:
    """Return the elements of a row that ends in another group of copies."""
    return np.array(copies.get(shard, span))
