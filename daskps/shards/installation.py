"""A state that is installed in the segment of a new shard, before anybody sees it.

It comes in pieces, as it was cut for other shards: :class:`Installation` puts each
where it belongs. All that has been pushed to the shard since is bit-equal to what it
would have been in the shards that the state was taken from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.epochs import Epochs
from daskps.errors import LayoutError
from daskps.kernels import id_hash, index_probe
from daskps.kernels.row_moves import scatter
from daskps.layout.buckets import bucket_rows, n_buckets
from daskps.optim.factors import of_word, to_word
from daskps.shards.frozen_rows import unbounded_table_at
from daskps.shards.memory.format import EPOCH, PER_EPOCH, TICKS, VERSION
from daskps.shards.memory.growth import reserve
from daskps.shards.reader import table_at
from daskps.shards.run_record import epochs_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.layout.spans import Span
    from daskps.shards.arrays.unbounded_rows import UnboundedRows
    from daskps.shards.memory.format import Record
    from daskps.shards.memory.segment import Segment
    from daskps.shards.memory.table_memory import TableMemory
    from daskps.typing import Array


@dataclass(frozen=True, slots=True)
class Counted:
    """A shard's counts at one flip; but for the version all shards of a store agree.

    Of arrays only those that the shard has a piece of.
    """

    version: int
    #: Optimizer steps by index of the parameter or table.
    steps: Mapping[int, int]
    #: Of each table how many pushes have named it.
    clocks: Sequence[int]
    #: Of each table how many ids have got a row in this shard, and have lost it to
    #: others.
    came: Sequence[tuple[int, int]]
    #: Where it is in its epochs.
    epochs: Epochs
    #: By what learning rates are multiplied, by the same index; 1.0 of those left out.
    factors: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, segment: Segment, flip: int) -> Counted:
        """Return what a shard counts; for who holds back all that changes it."""
        record = segment.record(flip)
        steps = dict(zip(indices_of(segment), record.steps.tolist(), strict=True))
        came = [_came(table.unbounded) for table in segment.tables]
        at = epochs_of(record)
        factors = factors_of(segment, flip)
        return cls(record.version, steps, record.clocks.tolist(), came, at, factors)

    @classmethod
    def joined(cls, every: Sequence[Counted]) -> Counted:
        """Return the counts of all shards as those of the store.

        A push whose process died half-way may have reached some shards only, and so may
        a scaling of learning rates: the most steps count, and the least factor.
        """
        steps: dict[int, int] = {}
        factors: dict[int, float] = {}
        for one in every:
            for index, n in one.steps.items():
                factor = one.factors.get(index, 1.0)
                steps[index] = max(n, steps.get(index, 0))
                factors[index] = min(factor, factors.get(index, factor))
        came: Any = np.sum([one.came for one in every], axis=0, dtype=np.int64).tolist()
        return cls(
            version=max(one.version for one in every),
            steps=steps,
            clocks=np.max([one.clocks for one in every], axis=0).tolist(),
            came=came,
            epochs=min((Epochs(*one.epochs) for one in every), key=lambda at: at.place),
            factors=factors,
        )

    def put(self, segment: Segment) -> None:
        """Have a new shard count on from here; of others' parameters nothing is taken."""
        record = segment.current
        record.plain[VERSION] = self.version
        record.fixed[[EPOCH, PER_EPOCH, TICKS]] = self.epochs
        for position, piece in enumerate(segment.pieces):
            self._count(record, position, piece.parameter.index)
        for position, table in enumerate(segment.tables, len(segment.pieces)):
            self._count(record, position, table.piece.table.index)
            record.clocks[table.ordinal] = self.clocks[table.ordinal]
            if table.unbounded is not None:
                admitted, evicted = self.came[table.ordinal]
                table.unbounded.head[index_probe.ADMITTED] = admitted
                table.unbounded.head[index_probe.EVICTED] = evicted

    def _count(self, record: Record, position: int, index: int) -> None:
        record.steps[position] = self.steps.get(index, 0)
        record.factors[position] = to_word(self.factors.get(index, 1.0))


def factors_of(segment: Segment, flip: int) -> dict[int, float]:
    """Return by what learning rates are multiplied, by index, of those that are."""
    words = zip(indices_of(segment), segment.record(flip).factors, strict=True)
    return {index: of_word(word) for index, word in words if word}


def indices_of(segment: Segment) -> list[int]:
    """Return the index of the parameter or table at each position."""
    indices = [piece.parameter.index for piece in segment.pieces]
    return indices + [table.piece.table.index for table in segment.tables]


def _came(unbounded: UnboundedRows | None) -> tuple[int, int]:
    if unbounded is None:
        return 0, 0
    counts = unbounded.counts()
    return counts["admissions"], counts["evictions"]


class Installation:
    """Fills a segment that was just made.

    Parameters
    ----------
    segment : Segment
        The segment, without a push.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        #: By position of unbounded tables the number of each row, in the order of
        #: hashes.
        self._rows: dict[int, Array] = {}
        self._candidates: dict[int, Array] = {}

    def begin_table(self, position: int, ids: Array, candidates: Array) -> None:
        """Give rows to ids of an unbounded table, and note which are only counted.

        Parameters
        ----------
        position : int
            Of its piece in the shard.
        ids : ndarray, shape (n,), int64
            All that have rows there, in the order of their hashes.
        candidates : ndarray, shape (2, k), int64
            Ids without rows, and how often each was pushed.

        Raises
        ------
        LayoutError
            Where there is no memory for so many.
        ValueError
            If ids are not in order, are there twice, are none of this shard's, or are
            more than a bucket holds.
        ProtocolError
            If it is no unbounded table.
        """
        segment = self._segment
        table, unbounded = unbounded_table_at(segment, position)
        counted, counts = candidates
        counted = np.ascontiguousarray(counted)
        for some in (ids, counted):
            _check_ids(table, unbounded, some, segment.cache_dir)
        if (counts < 1).any():
            raise ValueError(f"ids of {table.piece} were counted less than once")
        n_ids = len(ids) + len(counted)
        if segment.memory is None:
            raise LayoutError("memory for rows is taken by the owner of a shard alone")
        reserve(segment.memory, table, unbounded, n_rows=len(ids), n_ids=n_ids)
        every, cache_dir = np.concatenate([ids, counted]), segment.cache_dir
        numbers = _numbers(unbounded, ids, cache_dir)
        values = np.concatenate([numbers + 1, -counts])
        unbounded.index.fill(every, values)
        head = unbounded.head
        unbounded.keys[numbers], unbounded.state[numbers] = ids, 1
        head[index_probe.USED], head[index_probe.CANDIDATES] = len(ids), len(counted)
        if not unbounded.of.max_rows:
            head[index_probe.END] = len(ids)
        self._rows[position] = numbers

    def put(self, span: Span, values: Array) -> None:
        """Write elements of the shard: those of unbounded rows after their ids.

        Parameters
        ----------
        span : Span
            Their place; unbounded rows count in the order of their hashes.
        values : ndarray
            As many, of the area's dtype, or of another one of floats.

        Raises
        ------
        ValueError, IndexError
            If they do not fit.
        """
        segment, (area, position, start, stop) = self._segment, span
        if position not in self._rows:
            target = segment.view(segment.current, span)
            if target.shape != values.shape or stop - start != len(values):
                raise ValueError(f"{len(values)} values for elements {span}")
            segment.payload.write(target, _as_dtype(values, target.dtype))
            return
        table = table_at(segment, position)
        target = table.by_area[area]
        rows, width = self._rows[position], target.shape[1]
        if not 0 <= start <= stop <= len(rows) * width or stop - start != len(values):
            raise ValueError(f"{len(values)} values for elements {span}")
        first, last = start // width, -(-stop // width)
        if start % width or stop % width:
            # Of a row that is cut, which takes a very long one.
            at = np.arange(start, stop)
            target[rows[at // width], at % width] = values
            return
        data = np.ascontiguousarray(values).reshape(-1, width)
        scatter(target, rows[first:last], data, cache_dir=segment.cache_dir)


def _as_dtype(values: Array, dtype: Any) -> Array:
    """Return values in another dtype of floats, or refuse what has no place there."""
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore"):
        found = values.astype(dtype)
    if (np.isfinite(values) & ~np.isfinite(found)).any():
        raise ValueError(f"values that are too large for {dtype}; use a wider dtype=")
    return found


def _check_ids(
    table: TableMemory, unbounded: UnboundedRows, ids: Array, cache_dir: str | None
) -> None:
    """Refuse ids that are not this shard's, or not in the order of their hashes."""
    if len(ids) and not table.piece.holds(ids, cache_dir=cache_dir):
        raise ValueError(f"ids that are not among {table.piece}")
    hashes = id_hash.hashes(ids, unbounded.hash_seed)
    if (hashes[1:] <= hashes[:-1]).any():
        raise ValueError(f"ids of {table.piece} are not in the order of their hashes")


def _numbers(unbounded: UnboundedRows, ids: Array, cache_dir: str | None) -> Array:
    """Return which row each id gets; where there are so many at most, one of its bucket's."""
    most = unbounded.of.max_rows
    if not most:
        return np.arange(len(ids))
    n, piece = n_buckets(most), unbounded.piece
    of = id_hash.buckets(ids, unbounded.hash_seed, n, cache_dir=cache_dir)
    buckets, first, counts = np.unique(of, return_index=True, return_counts=True)
    starts = np.array([bucket_rows(most, b) for b in buckets.tolist()], np.int64)
    stops = np.array([bucket_rows(most, b + 1) for b in buckets.tolist()], np.int64)
    if (counts > stops - starts).any():
        raise ValueError(f"more ids than rows in one of {piece}")
    within = np.arange(len(ids)) - np.repeat(first, counts)
    before = bucket_rows(most, piece.first_bucket)
    return np.repeat(starts - before, counts) + within
