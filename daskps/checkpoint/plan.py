"""The chunks that each shard writes, and the elements that shards of another cut read.

A chunk has one writer, the owner of the shard that has its first element. The shards of
an unbounded table own ranges of the hash, one behind the other: as each shard sorts its
rows by their hashes, all of the table is sorted.
"""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from daskps.checkpoint.arrays import Counts
from daskps.errors import IllegalStateError
from daskps.layout.chunks import Run, runs_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from daskps.checkpoint.arrays import Member, StoredArray
    from daskps.layout.arrays import Layout
    from daskps.layout.spans import Span
    from daskps.layout.tables import UnboundedTable


class StoredChunk(NamedTuple):
    """A file that is written: elements of shards in order, and then zeros."""

    path: str
    nbytes: int
    dtype: str
    #: Shard and span of each part, in order.
    parts: tuple[tuple[int, Span], ...]
    #: How many elements of zeros come behind them.
    pad: int

    @property
    def home(self) -> int:
        """The shard whose owner writes it."""
        return self.parts[0][0]


class ChunkPart(NamedTuple):
    """Elements [start, stop) of a chunk, and where they go."""

    start: int
    stop: int
    span: Span


class ChunkRead(NamedTuple):
    """A file that is read, and what of it a shard needs, in order."""

    path: str
    nbytes: int
    dtype: str
    parts: tuple[ChunkPart, ...]


def chunks_written(
    layout: Layout, arrays: Iterable[StoredArray], counts: Counts | None = None
) -> Iterator[StoredChunk]:
    """Give the chunks of arrays, and the parts of them that each shard has.

    Parameters
    ----------
    layout : Layout
        Of the store, as it is cut now.
    arrays : iterable of StoredArray
        From :func:`daskps.checkpoint.arrays.stored_arrays`.
    counts : Counts, optional
        Of unbounded tables: what each shard has.

    Yields
    ------
    StoredChunk
        In the order of the arrays.

    Raises
    ------
    IllegalStateError
        Where shards have more or fewer elements than an array.
    """
    counts = counts or Counts()
    for array in arrays:
        runs = [r for s in array.members for r in _runs(layout, array, s, counts)]
        if (runs[-1].stop if runs else 0) != array.grid.size:
            raise IllegalStateError(f"shards do not have the elements of {array.path}")
        yield from _chunks(array, iter(runs))


def _chunks(array: StoredArray, runs: Iterator[Run]) -> Iterator[StoredChunk]:
    run = next(runs, None)
    for chunk in array.grid.chunks():
        parts = []
        while run is not None and run.start < chunk.stop:
            start, stop = max(run.start, chunk.start), min(run.stop, chunk.stop)
            parts.append((run.shard, run.span(array.area, start, stop)))
            if run.stop > chunk.stop:
                break
            run = next(runs, None)
        pad = array.grid.chunk_size - (chunk.stop - chunk.start)
        path, nbytes = array.path_of(chunk), array.chunk_nbytes
        yield StoredChunk(path, nbytes, array.dtype, tuple(parts), pad)


def _runs(
    layout: Layout, array: StoredArray, member: Member, counts: Counts
) -> Iterator[Run]:
    """Give where the elements of a member are, in order."""
    n, index, n_rows = len(layout.parameters), member.index, None
    if index >= n and not (table := layout.tables[index - n]).is_bounded:
        n_rows = dict(enumerate(counts.of(table, array.area)))
    return runs_of(layout, index, width=member.width, first=member.start, n_rows=n_rows)


def chunks_read(
    layout: Layout, arrays: Iterable[StoredArray], shard: int
) -> Iterator[ChunkRead]:
    """Give what a shard needs of arrays and bounded tables, whoever has written them.

    Parameters
    ----------
    layout : Layout
        With the parameters and tables of the checkpoint, in any number of shards.
    arrays : iterable of StoredArray
        Of the checkpoint; those of unbounded tables are left out.
    shard : int
        The shard that reads.

    Yields
    ------
    ChunkRead
        Each file once.
    """
    n = len(layout.parameters)
    for array in arrays:
        parts: list[tuple[str, ChunkPart]] = []
        for member in array.members:
            if member.index >= n and not layout.tables[member.index - n].is_bounded:
                continue
            index, width = member.index, member.width
            for run in runs_of(
                layout, index, width=width, first=member.start, shard=shard
            ):
                parts += _parts(array, run)
        for path, of in groupby(parts, itemgetter(0)):
            found = tuple(part for _, part in of)
            yield ChunkRead(path, array.chunk_nbytes, array.dtype, found)


def _parts(array: StoredArray, run: Run) -> Iterator[tuple[str, ChunkPart]]:
    for chunk in array.grid.chunks(run.start, run.stop):
        start, stop = max(run.start, chunk.start), min(run.stop, chunk.stop)
        span = run.span(array.area, start, stop)
        part = ChunkPart(start - chunk.start, stop - chunk.start, span)
        yield array.path_of(chunk), part


def rows_read(
    array: StoredArray, position: int, start: int, stop: int
) -> Iterator[ChunkRead]:
    """Give the files that have rows [start, stop) of an array of an unbounded table.

    Parameters
    ----------
    array : StoredArray
        Of the checkpoint.
    position : int
        Of the table's piece in the shard that reads.
    start, stop : int
        The rows to read; the first one goes to the beginning of the piece.

    Yields
    ------
    ChunkRead
        In order.
    """
    wide = array.members[0].width
    run = Run(0, position, start * wide, stop * wide)
    for path, part in _parts(array, run):
        yield ChunkRead(path, array.chunk_nbytes, array.dtype, (part,))


# -- hashes of ids -------------------------------------------------------------


def hash_range(table: UnboundedTable, n_shards: int, shard: int) -> tuple[int, int]:
    """Return which hashes the ids of a shard have: from the first up to the second."""
    n = table.n_buckets
    first, stop = table.edges(n_shards)[shard : shard + 2].tolist()
    # The smallest upper halves h with h * n >> 32 in these buckets.
    low, high = (-(-(bucket << 32) // n) << 32 for bucket in (first, stop))
    return low, high


def rows_local(
    array: StoredArray, begins: Sequence[int], low: int, high: int
) -> tuple[int, int]:
    """Return rows among which all are that have hashes in [low, high): of whole chunks.

    Parameters
    ----------
    array : StoredArray
        Ids, or those of candidates.
    begins : sequence of int
        The hash that each of its chunks begins with.
    low, high : int
        From :func:`hash_range`.

    Returns
    -------
    (int, int)
        The first of them and where they end.
    """
    if low >= high:
        return 0, 0
    edges, of_chunk = np.array(begins, np.uint64), array.chunk[0]
    first = max(0, int(np.searchsorted(edges, np.uint64(low), "right")) - 1)
    # A range may end behind the largest hash, 2**64, which no word holds.
    last = int(np.searchsorted(edges, np.uint64(high - 1), "right"))
    return first * of_chunk, max(first, min(last * of_chunk, array.shape[0]))
