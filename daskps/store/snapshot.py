"""A store at one moment: copies on the owners, seen as dask arrays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from dask.tokenize import tokenize

from daskps.cluster.caller import snapshots
from daskps.layout.spans import WEIGHTS, Span
from daskps.store.repr import snapshot_html, snapshot_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.snapshots import Taken
    from daskps.cluster.host.snapshot_copies import CopyGroup, Edges
    from daskps.cluster.wire.deadline import Deadline
    from daskps.layout.arrays import Layout, Parameter, Piece
    from daskps.store.handle import Handle
    from daskps.typing import Array
    from daskps.version import Version


def taken_by(
    store: Handle,
    index: int | None,
    make: Callable[[Taken], Any],
    *,
    what: str,
    timeout: Any,
) -> Any:
    """Take a snapshot through a handle and make something of it."""

    async def work(shards: ShardClient, deadline: Deadline) -> Any:
        return make(await snapshots.take_snapshot(shards, index, deadline))

    return store._with_shards(work, timeout, what, beside=True)


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
    again: what needs it raises SnapshotLostError.

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
            parameter = self._taken.layout[name]
            self._arrays[name] = dask_array(self._taken, parameter)
        return self._arrays[name]

    def __contains__(self, name: object) -> bool:
        return name in self._taken.layout.by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self._taken.layout.by_name)

    def __len__(self) -> int:
        return len(self._taken.layout.parameters)

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
        taken = self._taken
        return snapshot_line(taken.name, int(taken.version), taken.layout)

    def _repr_html_(self) -> str:
        taken = self._taken
        return snapshot_html(taken.name, int(taken.version), taken.layout)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some rows of a parameter, and where their elements are."""

    rows: int
    #: Shard and span of each part, in order.
    parts: tuple[tuple[int, Span], ...]

    @property
    def home(self) -> int:
        """Shard of the largest part, on whose owner the chunk is put together."""
        return max(self.parts, key=lambda part: part[1].stop - part[1].start)[0]


def chunks_of(layout: Layout, parameter: Parameter) -> list[Chunk]:
    """Cut a parameter that is not empty into whole rows near its shards' borders."""
    pieces, shape = layout.pieces_of[parameter.index], parameter.shape
    rows = shape[0] if shape else 1
    width = pieces[-1].stop // rows
    found, first = [], 0
    for piece in pieces:
        last = rows if piece is pieces[-1] else round(piece.stop / width)
        if last > first:
            parts = _parts(layout, pieces, first * width, last * width)
            found.append(Chunk(last - first, parts))
            first = last
    return found


def _parts(
    layout: Layout, pieces: Sequence[Piece], start: int, stop: int
) -> tuple[tuple[int, Span], ...]:
    parts = []
    for piece in pieces:
        a, b = max(start, piece.start), min(stop, piece.stop)
        if a < b:
            position = layout.positions[piece.shard, piece.parameter.index]
            span = Span(WEIGHTS, position, a - piece.start, b - piece.start)
            parts.append((piece.shard, span))
    return tuple(parts)


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
    import dask.array as da
    from dask._task_spec import Task, TaskRef
    from dask.highlevelgraph import HighLevelGraph

    pieces, shape = taken.layout.pieces_of[parameter.index], parameter.shape
    if not pieces:
        return da.zeros(shape, dtype=parameter.dtype, chunks=shape)
    chunks = chunks_of(taken.layout, parameter)
    versions = dict(taken.version.pairs)
    told = [(piece.shard, versions[piece.shard]) for piece in pieces]
    token = tokenize(taken.uid, parameter.index, told, alone)
    name = f"daskps-snapshot-array-{token}"
    sources = _sources(taken, chunks)
    layer: dict[Any, Any] = {}
    for i, (chunk, futures) in enumerate(zip(chunks, sources, strict=True)):
        used = list({future.key: None for future in futures})
        refs = [TaskRef(key) for key in used]
        where = [used.index(future.key) for future in futures]
        key = (name, i, *(0,) * (len(shape) - 1)) if shape else (name,)
        wanted = (chunk.rows, *shape[1:]) if shape else ()
        parts = list(zip(where, chunk.parts, strict=True))
        layer[key] = Task(key, assemble, parts, wanted, *refs)
    base = {future.key: future for futures in sources for future in futures}
    graph = HighLevelGraph(
        {f"copies-{name}": base, name: layer},
        {f"copies-{name}": set(), name: {f"copies-{name}"}},
    )
    along = (tuple(chunk.rows for chunk in chunks),) if shape else ()
    rest = tuple((n,) for n in shape[1:])
    array: Any = da.Array
    return array(graph, name, along + rest, dtype=np.dtype(parameter.dtype))


def _sources(taken: Taken, chunks: Sequence[Chunk]) -> list[list[Any]]:
    """Return for each chunk of a parameter the future that each part is taken from.

    Where the largest part of a chunk is, it is put together; parts of the same group
    are taken out of it there. The others are cut out by their owners, into futures of
    their own: as tasks of the array they would be fused with the chunk, and the whole
    copies would travel. What one group gets from another is one future.
    """
    futures = taken.futures

    def way(chunk: Chunk, shard: int) -> tuple[Any, Any]:
        return futures[shard].key, futures[chunk.home].key

    parts = defaultdict(list)
    for chunk in chunks:
        for shard, span in chunk.parts:
            parts[way(chunk, shard)].append((shard, span))
    found = {}
    for (group, home), spans in parts.items():
        future = futures[spans[0][0]]
        stays = group == home
        found[group, home] = (
            future if stays else snapshots.submit_edges(taken, future, spans)
        )
    return [[found[way(chunk, shard)] for shard, _ in chunk.parts] for chunk in chunks]


def assemble(
    parts: Sequence[tuple[int, tuple[int, Span]]],
    shape: tuple[int, ...],
    *sources: CopyGroup | Edges,
) -> Array:
    """Put a chunk together: of each part its source, and where it is in that.

    A single part is a view of the copy, which nobody may write to.
    """
    arrays = [sources[i].get(shard, span) for i, (shard, span) in parts]
    whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    found: Array = whole.reshape(shape)
    return found
