"""From the data a user gives to one part per trainer, where it is if it can be."""

from __future__ import annotations

import asyncio
import bisect
import heapq
import itertools
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from dask.base import is_dask_collection
from dask.delayed import Delayed

from daskps.cluster import upstream
from daskps.cluster.runs.parts import (
    DataPart,
    beside,
    computed,
    is_elsewhere,
    placed,
    places,
    workers_of,
)
from daskps.training.data.dataframes import LazyTable, are_alike
from daskps.training.data.listed import check_listed, from_list, listed
from daskps.training.data.rows import (
    NOT_ALIKE,
    check_lengths,
    check_some,
    is_column,
    n_rows,
    no_column,
    row_numbers,
    rows,
    split_batch,
    take_rows,
    why_unusable,
)
from daskps.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.caller.link import Link
    from daskps.cluster.runs.parts import DataPlaces

__all__ = ["DataPart", "check", "parts_of"]


def check(X: Any, y: Any, trainers: int | None, split: Mapping[str, Any]) -> None:
    """Refuse data that `parts_of` would, as far as it can be known before it runs.

    Raises
    ------
    ValueError
        If `X` has no rows, `X` and `y` differ in length, `y` is of shape (n, 1), chunk
        sizes are unknown, `trainers`, scheme or weights do not fit.
    TypeError
        If `X` or `y` has no rows, or is a list that holds futures and other things.
    """
    if listed(X) is not None or listed(y) is not None:
        check_listed(X, y, trainers, split)
        return
    for name, array in (("X", X), ("y", y)):
        if isinstance(array, (str, bytes)):
            raise TypeError(
                f"{name} is the {type(array).__name__} {array!r:.60}; pass the rows "
                f"themselves, such as frame[{array!r:.60}]"
            )
        if isinstance(array, Delayed) or upstream.is_future(array):
            raise TypeError(
                f"{name} is one {type(array).__name__}, whose rows are unknown here; "
                f"give a list with one for each trainer, or a dask array"
            )
        if why := why_unusable(array):
            raise TypeError(f"{name} {why}")
    if is_column(y.meta if isinstance(y, LazyTable) else y):
        raise no_column("y")
    if not isinstance(X, LazyTable) and not isinstance(y, LazyTable):
        check_some(check_lengths(X, y))
    weights = split["weights"]
    # Of no rows: the arguments are checked, and nothing is shuffled for it.
    rows(0, trainers or 1 if weights is None else len(weights), **split)


def is_computed_first(*data: Any) -> bool:
    """Whether something of it is lazy: its rows are there when Dask has computed them."""
    return any(
        isinstance(one, LazyTable) or _is_lazy(one) or listed(one) is not None
        for one in data
    )


async def parts_of(
    link: Link,
    X: Any,
    y: Any,
    *,
    trainers: int | None,
    split: Mapping[str, Any],
    only: Sequence[str] = (),
) -> list[DataPart]:
    """Cut the data into one part per trainer; what is lazy is computed, by Dask, once.

    Parameters
    ----------
    link : Link
        The client's way to the cluster.
    X, y
        As in `train`.
    trainers : int, optional
        Number of parts. By default one per part of a list, else one per worker but
        no more than there are chunks to follow.
    split : mapping
        `scheme`, `weights` and `seed` of `partition`.
    only : sequence of str
        The workers that parts may be for; all, where it names none.

    Returns
    -------
    list of Part
        In rank order. The data stay on the cluster as long as a caller holds the list.

    Raises
    ------
    ValueError, TypeError
        As `check`, and if parts of a list have no rows or differ from their labels'.
    Exception
        The error of a task that computes the data.
    """
    X, y = await _counted(link, X, y)
    check(X, y, trainers, split)
    if (given := listed(X)) is not None:
        return await from_list(link, given, listed(y), only)
    workers = await workers_of(link, only)
    chunked = [array for array in (X, y) if _has_chunks(array)]
    follows = split["scheme"] == "contiguous" and split["weights"] is None
    if chunked and follows:
        heights = chunked[0].chunks[0]
        size = trainers or min(len(workers), len(_full_chunks(heights)))
        parts = await _from_chunks(link, X, y, runs_of_chunks(heights, size))
        return await placed(link, parts, only)
    size = trainers or len(workers)
    homes = [workers[i % len(workers)] for i in range(size)]
    return await _dealt(link, X, y, workers=homes, split=split)


async def _counted(link: Link, *data: Any) -> list[Any]:
    """Return dask arrays in place of lazy tables, all of which are computed together."""
    tables = [one for one in data if isinstance(one, LazyTable)]
    stored = upstream.persist(link.client, [table.partitions for table in tables])
    made = [
        of.map_partitions(itemgetter(i), meta=meta, token="daskps-rows")
        for of, table in zip(stored, tables, strict=True)
        for i, meta in enumerate((table.meta, np.empty(0)))
    ]
    kept = iter(upstream.persist(link.client, made))
    counted, named = [], [[table.beside] for table in tables if table.beside]
    for array, looked in zip(kept, kept, strict=True):
        futures = [future for (future,) in upstream.chunk_futures(looked)]
        named.append(names := await upstream.results(link.client, futures))
        heights = [getattr(of, "n", of) for of in names]
        chunks = (tuple(heights), *array.chunks[1:])
        counted.append(type(array)(array.dask, array.name, chunks, dtype=array.dtype))
    if len(named) > 1 and not are_alike(*named):
        raise ValueError(f"y {NOT_ALIKE}")
    rows = iter(counted)
    return [next(rows) if isinstance(one, LazyTable) else one for one in data]


# -- dask arrays whose chunks stay where they are ------------------------------


def runs_of_chunks(heights: Sequence[int], k: int) -> list[list[tuple[int, slice]]]:
    """Deal the chunks of an array out to `k` parts, in order.

    The borders are those between chunks that are nearest to an even split, the lower
    one among equals, with one chunk per part at least. Only where there are fewer
    chunks than parts, chunks are cut, so that the largest part is as small as it can
    be with no part over two chunks. Empty chunks are left out.

    Parameters
    ----------
    heights : sequence of int
        Rows of each chunk.
    k : int
        Number of parts.

    Returns
    -------
    list of list of tuple
        For each part its chunks: number of the chunk and which of its rows. Each has
        one at least, so a part without rows still knows its columns.

    Examples
    --------
    >>> runs_of_chunks([4, 1, 1, 4], 2)
    [[(0, slice(0, 4, None)), (1, slice(0, 1, None))], [(2, slice(0, 1, None)), \
(3, slice(0, 4, None))]]
    >>> runs_of_chunks([4, 1], 3)
    [[(0, slice(0, 2, None))], [(0, slice(2, 4, None))], [(1, slice(0, 1, None))]]
    """
    full = _full_chunks(heights)
    if k > len(full):
        cuts = _cuts([heights[i] for i in full], k)
        return [
            [(i, part)]
            for i, pieces in zip(full, cuts, strict=True)
            for part in split_batch(heights[i], [1] * pieces)
        ]
    ends = list(itertools.accumulate(heights[i] for i in full))
    borders = [0]
    for rank in range(1, k):
        # Chunks before the border: one more than the border before, and enough left.
        least, most = borders[-1] + 1, len(full) - (k - rank)
        after = bisect.bisect_left(ends, -(-ends[-1] * rank // k), least - 1, most - 1)
        near = [n for n in (after, after + 1) if least <= n <= most]
        borders.append(
            min(near, key=lambda n: (abs(ends[n - 1] * k - ends[-1] * rank), n))
        )
    borders.append(len(full))
    return [
        [(i, slice(0, heights[i])) for i in full[a:b]]
        for a, b in itertools.pairwise(borders)
    ]


def _full_chunks(heights: Sequence[int]) -> list[int]:
    """Return the numbers of the chunks with rows; the first where none has any."""
    return [i for i, height in enumerate(heights) if height] or [0]


def _cuts(heights: Sequence[int], k: int) -> list[int]:
    """Return into how many of `k` pieces each chunk is cut, always the largest."""
    pieces = [1] * len(heights)
    largest = [(-height, i) for i, height in enumerate(heights)]
    heapq.heapify(largest)
    for _ in range(k - len(heights)):
        _, i = largest[0]
        pieces[i] += 1
        heapq.heapreplace(largest, (heights[i] // -pieces[i], i))
    return pieces


async def _from_chunks(
    link: Link, X: Any, y: Any, runs: Sequence[Sequence[tuple[int, slice]]]
) -> list[DataPart]:
    """Return the chunks of each run; arrays on the client are cut alike."""
    arrays = [X] if y is None else [X, y]
    heights = next(a.chunks[0] for a in arrays if _has_chunks(a))
    begins = np.cumsum([0, *heights])
    alike = [_in_rows(a, heights) if _has_chunks(a) else a for a in arrays]
    columns: list[list[Any]] = []
    for array in upstream.persist(link.client, alike):
        if _has_chunks(array):
            blocks = [block for (block,) in upstream.chunk_futures(array)]
            columns.append(await _cut(link, blocks, heights, runs))
        else:
            columns.append([(_span(array, begins, run),) for run in runs])
    lengths = [sum(part.stop - part.start for _, part in run) for run in runs]
    return [DataPart(*row) for row in zip(lengths, *columns, strict=True)]


def _in_rows(array: Any, heights: tuple[int, ...]) -> Any:
    """Return a dask array in these chunks of whole rows: a no-op where it is so."""
    return array.rechunk({0: heights, **dict.fromkeys(range(1, array.ndim), -1)})


async def _cut(
    link: Link,
    blocks: Sequence[Any],
    heights: Sequence[int],
    runs: Sequence[Sequence[tuple[int, slice]]],
) -> list[tuple[Any, ...]]:
    """Return each run's blocks; a chunk that is cut is cut on its worker."""
    cut = {i for run in runs for i, part in run if part != slice(0, heights[i])}
    held = await places(link, [blocks[i] for i in cut])
    return [
        tuple(
            beside(link.client, held, take_rows, blocks[i], part)
            if i in cut
            else blocks[i]
            for i, part in run
        )
        for run in runs
    ]


def _span(array: Any, begins: Any, run: Sequence[tuple[int, slice]]) -> Any:
    """Return the rows of a run from an array on the client."""
    (first, head), (last, tail) = run[0], run[-1]
    return take_rows(array, slice(begins[first] + head.start, begins[last] + tail.stop))


# -- rows dealt out -----------------------------------------------------------


async def _dealt(
    link: Link, X: Any, y: Any, *, workers: Sequence[str], split: Mapping[str, Any]
) -> list[DataPart]:
    """Deal rows out to trainers: of what is lazy, Dask moves the rows there are."""
    n = n_rows(X)
    # In a thread: with a scheme that shuffles this copies all rows.
    which = await asyncio.to_thread(rows, n, len(workers), **split)
    arrays = upstream.persist(link.client, [X] if y is None else [X, y])
    sources = [_Source(array) for array in arrays if _has_chunks(array)]
    held = await places(link, [f for source in sources for f in source.futures])
    cut = [await asyncio.to_thread(_each, array, which) for array in arrays]
    parts = []
    for index, worker, *pieces in zip(which, workers, *cut, strict=True):
        blocks = [(_assembled(link, piece),) for piece in pieces]
        moved = sum(source.moved(index, held, worker) for source in sources)
        labels = None if y is None else blocks[1]
        n_here = len(row_numbers(index, n))
        parts.append(DataPart(n_here, blocks[0], labels, worker, moved))
    await computed(future for part in parts for future in part.futures)
    return parts


def _each(array: Any, which: Sequence[Any]) -> list[Any]:
    with user_code("taking rows of the data"):
        return [take_rows(array, index) for index in which]


def _assembled(link: Link, part: Any) -> Any:
    """Return a future of a lazy part, in one piece."""
    if not _is_lazy(part):
        return part
    whole = part.rechunk(-1) if hasattr(part, "rechunk") else part
    return upstream.compute(link.client, whole)


class _Source:
    """A persisted dask array that rows are taken from."""

    def __init__(self, array: Any) -> None:
        self._n = int(array.shape[0])
        self._ends = np.cumsum(array.chunks[0])
        self._blocks = upstream.chunk_futures(array)
        self.futures = [future for chunk in self._blocks for future in chunk]

    def moved(self, index: Any, held: DataPlaces, worker: str) -> int:
        """Return how many blocks with some of the rows are not on a worker."""
        numbers = row_numbers(index, self._n)
        used = np.unique(np.searchsorted(self._ends, numbers, "right"))
        return sum(is_elsewhere(held, f, worker) for i in used for f in self._blocks[i])


# -- kinds --------------------------------------------------------------------


def _is_lazy(array: Any) -> bool:
    return hasattr(array, "__dask_graph__")


def _has_chunks(array: Any) -> bool:
    """Whether it is a dask array, whose chunks are known by number of rows."""
    return _is_lazy(array) and hasattr(array, "rechunk") and hasattr(array, "chunks")


# -- parts for loops of the user's --------------------------------------------


async def computed_parts(link: Link, parts: Sequence[Any]) -> list[Any]:
    """Return parts with a future for each that has something lazy, when all are computed.

    Lazy are futures, delayed objects and other dask collections, by themselves or in a
    tuple. Trainers that began while others still waited for their data would wait too.

    Parameters
    ----------
    link : Link
        The client's way to the cluster.
    parts : sequence
        As :func:`daskps.run` is given them.

    Returns
    -------
    list
        A future of each part that is lazy, the others as they are.

    Raises
    ------
    Exception
        The error of the computation of a part, with its number in a note.
    """
    members = [part if _is_pair(part) else (part,) for part in parts]
    # Together, so that what they share is computed once.
    lazy = [v for part in members for v in part if is_dask_collection(v)]
    started = iter(upstream.compute_all(link.client, lazy) if lazy else ())

    def begun(value: Any) -> Any:
        if is_dask_collection(value):
            return next(started)
        is_future = upstream.is_future(value)
        return upstream.own(link.client, value) if is_future else value

    found: list[Any] = []
    for part, given in zip(parts, members, strict=True):
        values = [begun(value) for value in given]
        if _is_pair(part):
            found.append(link.client.submit(_together, *values, pure=False))
        else:
            found += values
    for i, part in enumerate(found):
        if upstream.is_future(part):
            try:
                await upstream.computed(part)
            except Exception as error:
                error.add_note(f"raised by part {i} of the parts of run, which is lazy")
                raise
    return found


def is_lazy_part(part: Any) -> bool:
    """Whether it is computed before a loop gets it."""
    return is_dask_collection(part) or upstream.is_future(part) or _is_pair(part)


def _is_pair(part: Any) -> bool:
    """Whether it is a tuple with something lazy in it, such as features and labels."""
    return type(part) is tuple and any(
        is_dask_collection(value) or upstream.is_future(value) for value in part
    )


def _together(*values: Any) -> tuple[Any, ...]:
    return values
