"""Reads of a shard without its lock: elements and rows, all of one version, or nothing.

Elements have two buffers: a copy is whole unless a second publication has begun since
its flip. Rows have one buffer, and a log of what the last publication has changed. A
reader puts that over what it has gathered, where one publication ran into it; where two
did, or unbounded rows were changed, the copy is torn. Under the lock a reader also has
the rows of the publication before.

The bound of every policy is written once, in :meth:`Visibility.find_bound`. A process
that maps the memory asks without the lock, by :meth:`Visibility.find_flip`.

This module alone, outside of the shard's memory, compares flips and row sequences.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from daskps.errors import ProtocolError, StaleGenerationError
from daskps.kernels import past, scratch
from daskps.kernels.row_moves import FixedGather
from daskps.shards.arrays.row_operations import flip_of
from daskps.shards.arrays.unbounded_rows import FEWEST_LOOKED, MOST_LOOKED, Lookup
from daskps.shards.deputy import CLOSED
from daskps.shards.memory.format import (
    CLOCK,
    FLIP,
    GATE,
    GENERATION,
    LIVE,
    MIXED,
    N_RANKS,
    POLICY,
    RANK_WORDS,
    ROUNDS,
    ROWS_SEQUENCE,
    RUN,
    SIDE,
    STALENESS,
    VERSION,
    WITHDRAWS,
    WRITING,
)
from daskps.shards.memory.undo import LOGGED, is_logged, roll_back
from daskps.shards.run_record import POLICY_CODES
from daskps.shards.steps import Ready

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from daskps.shards.arrays.unbounded_rows import UnboundedRows
    from daskps.shards.memory.format import Record
    from daskps.shards.memory.segment import Segment
    from daskps.shards.memory.table_memory import TableMemory
    from daskps.typing import Array

    #: Elements of the vector of a dtype, the number of the array that they go to, and
    #: their place in it.
    PartRead: TypeAlias = tuple[tuple[str, int, int], int, slice]


#: Said instead of a flip: wait, or have the shard itself asked, by a call.
NOT_YET, REFER = -1, -2
BSP, SSP = POLICY_CODES["bsp"], POLICY_CODES["ssp"]
#: The clocks of more ranks than this are for NumPy to look at.
MOST_RANKS = 64
#: Said instead of a version: rows are being changed, or updates ran into the copy.
BUSY = -3
#: Number of tries of a copy of elements that updates run into. Any update of a table
#: spoils a read of rows, so a second try at once would fail as well.
TRIES = 4


def runs(
    segment: Segment, record: Record, part: tuple[str, int, int]
) -> Iterator[Array]:
    """Yield what a record has for a part of the vector of a dtype.

    Parameters
    ----------
    segment : Segment
        The memory.
    record : Record
        One of its records, which may be overwritten meanwhile: what a reader finds is
        good once it has seen that it was not.
    part : (str, int, int)
        The dtype, and the elements from where to where.

    Yields
    ------
    ndarray
        Weights, one view after the other, as few as possible: one where all lie in
        the same buffer.
    """
    (dtype, start, stop), side = part, record.plain[SIDE]
    if side != MIXED:
        yield segment.vectors[side][dtype][start:stop]
        return
    (starts, positions), sides = segment.places[dtype], record.weight_sides
    # The piece that the next element lies in is the one before `i`.
    n, at, i = len(starts), start, bisect_right(starts, start)
    while at < stop:
        side = sides[positions[i - 1]]
        while i < n and starts[i] < stop and sides[positions[i]] == side:
            i += 1
        end = min(stop, starts[i]) if i < n else stop
        yield segment.vectors[side][dtype][at:end]
        at, i = end, i + 1


class RowsRead(NamedTuple):
    """A read of rows of one table, by a process that has the memory of their shard."""

    #: Of its piece in the shard.
    position: int
    ids: Array
    #: The place that they go to, in C order; of no elements where only `found` is
    #: wanted.
    out: Array
    #: The row of `out` that is meant for each, None for one after the other.
    at: Array | None = None
    #: Of an unbounded table: becomes 1 for each id that has a row, uint8. Where it is
    #: 0, `out` is left as it is.
    found: Array | None = None


class Visibility:
    """The flips of one shard that a trainer, or a handle, may see.

    Parameters
    ----------
    segment : Segment
        The shard's memory.
    run, rank : int
        The trainer's run and its number in it; 0 and -1 for a handle, which sees
        whatever is in force.
    """

    def __init__(self, segment: Segment, run: int, rank: int) -> None:
        self._segment, self._run = segment, run
        self._header = segment.header
        one, other = segment.records
        self._records = one.plain, other.plain
        self._ranks_at = one.ranks_at
        self._live_at = self._ranks_at + rank * RANK_WORDS + LIVE
        self._generation = self._header[GENERATION]
        #: Clocks by which the slowest live trainer was behind at the last look.
        self.lag = 0

    def find_flip(self, bound: int) -> int:
        """Return the flip that may be read; or NOT_YET, or REFER.

        The bound is the clock of the trainer; for a handle the least version.
        """
        header = self._header
        flip = header[FLIP]
        words = self._records[flip & 1]
        if header[GATE] == CLOSED or header[GENERATION] != self._generation:
            return REFER
        if not self._run:
            return flip if words[VERSION] >= bound else REFER
        return self.find_bound(flip, bound) if words[RUN] == self._run else REFER

    def find_bound(self, flip: int, clock: int) -> int:
        """Return `flip` where its record lets the trainer read; or NOT_YET, or REFER.

        REFER is for what is not at this flip: the round before the last one, and what a
        trainer reads that has finished.
        """
        words = self._records[flip & 1]
        if words[POLICY] == BSP:
            ahead = clock - words[ROUNDS]
            if ahead > 0:
                return NOT_YET
            return flip if ahead == 0 and words[self._live_at] else REFER
        lag = clock - self.find_slowest(flip, clock)
        if words[POLICY] == SSP and lag > words[STALENESS]:
            return NOT_YET
        self.lag = max(0, lag)
        return flip

    def find_slowest(self, flip: int, clock: int) -> int:
        """Return the least clock of the trainers that are waited for, or `clock`."""
        words, at = self._records[flip & 1], self._ranks_at
        n_ranks = words[N_RANKS]
        if n_ranks > MOST_RANKS:
            clocks = self._segment.records[flip & 1].live[:, CLOCK]
            return int(clocks.min()) if len(clocks) else clock
        return min(
            (
                words[at + CLOCK]
                for at in range(at, at + n_ranks * RANK_WORDS, RANK_WORDS)
                if words[at + LIVE]
            ),
            default=clock,
        )


class ShardReader(Visibility):
    """One read of a shard, made ready once: elements at fixed places, and any rows.

    It holds no array that it reads into: such arrays must not live on here.

    Parameters
    ----------
    segment : Segment
        The shard's memory.
    parts : sequence of PartRead
        The elements.
    run, rank : int
        The trainer that reads; 0 and -1 for a handle.
    in_bytes : bool, default False
        Whether elements go to arrays of bytes, and their places count these.
    """

    def __init__(
        self,
        segment: Segment,
        parts: Sequence[PartRead] = (),
        run: int = 0,
        rank: int = -1,
        *,
        in_bytes: bool = False,
    ) -> None:
        super().__init__(segment, run, rank)
        self._parts, self._in_bytes = parts, in_bytes
        #: The copies to make where all weights lie in one buffer, by that; the last
        #: stays None.
        self._whole: list[list[tuple[int, slice, Array]] | None] = [None, None, None]
        self._tables: dict[int, tuple[TableMemory, FixedGather | None]] = {}
        sizes = [(b - a) * np.dtype(dtype).itemsize for (dtype, a, b), _, _ in parts]
        #: None to assign to a slice, which costs half as much as a call.
        self._copy: Callable[[Array, Array], None] | None = None
        if sum(sizes) >= past.LARGE_NBYTES:
            self._copy = partial(past.copy, cache_dir=segment.cache_dir)

    def read(
        self, bound: int, outs: Sequence[Array], rows: Sequence[RowsRead] = ()
    ) -> int:
        """Read all of it, if it may be read now.

        Parameters
        ----------
        bound : int
            The clock of the trainer; outside runs the least version.
        outs : sequence of ndarray, shape (n,)
            The arrays that elements go to.
        rows : sequence of RowsRead
            The rows to read with them.

        Returns
        -------
        int
            The version that was read; below 0 NOT_YET, BUSY, or REFER where the shard
            must be asked.

        Raises
        ------
        ProtocolError
            For an id that the piece does not have, or arrays that do not fit.
        """
        for _ in range(1 if rows else TRIES):
            flip = self.find_flip(bound)
            if flip < 0:
                return flip
            version = self._records[flip & 1][VERSION]
            try:
                if self.read_at(flip, outs, rows):
                    return version
            except StaleGenerationError:
                return REFER  # its device has ended
        return BUSY

    def read_at(
        self,
        flip: int,
        outs: Sequence[Array],
        rows: Sequence[RowsRead] = (),
        *,
        locked: bool = False,
    ) -> bool:
        """Copy what a flip has; return whether all of it is of that flip.

        Parameters
        ----------
        flip : int
            The flip in force when the read began, or the one before it.
        outs, rows
            As of :meth:`read`.
        locked : bool, default False
            Whether the caller has the shard's lock: then it can also read rows that a
            process has left half-way, and those of the publication before.

        Returns
        -------
        bool
            False where the copies hold anything.
        """
        if rows:
            if locked:
                roll_back(self._segment)
            try:
                if not self._copy_rows(flip, rows, locked=locked):
                    return False
            except ValueError as error:
                raise ProtocolError(
                    f"rows were asked of a shard that cannot give them: {error}; run the "
                    f"same version of daskps in all processes"
                ) from error
            if not self._parts:
                return True
        side, copy = self._records[flip & 1][SIDE], self._copy
        found = self._whole[side] or self._find(flip, side)
        if self._segment.payload.device is not None:
            self._segment.payload.read((outs[i][where], a) for i, where, a in found)
            found = []
        for number, where, weights in found:
            if copy is None:
                outs[number][where] = weights
            else:
                copy(outs[number][where], weights)
        header = self._header
        return header[WRITING] <= flip + 1 and header[FLIP] >= flip

    def show(self, bound: int) -> tuple[int, int, list[Array]]:
        """Return a flip, its version, and its elements themselves, as long as it `holds`.

        Instead of a flip NOT_YET, or REFER, where nothing may be read.
        """
        flip = self.find_flip(bound)
        if flip < 0:
            return flip, 0, []
        words = self._records[flip & 1]
        found = self._whole[words[SIDE]] or self._find(flip, words[SIDE])
        return flip, words[VERSION], [weights for *_, weights in found]

    def holds(self, flip: int) -> bool:
        """Return whether elements that were read at a flip belong to it."""
        header = self._header
        return header[WRITING] <= flip + 1 and header[FLIP] >= flip

    def latest(self, ready: Ready) -> Ready:
        """Return the same read at the flip in force."""
        flip = self._header[FLIP]
        version = self._segment.record(flip).version
        return Ready(flip, version, ready.duplicate, ready.lag)

    def see(self, position: int, shape: tuple[int, ...]) -> list[Array]:
        """Return both buffers of a piece, read-only; :meth:`find_side` says which one."""
        buffers = [w[position].reshape(shape) for w in self._segment.weights]
        for buffer in buffers:
            buffer.flags.writeable = False
        return buffers

    def find_side(self, position: int, bound: int) -> int:
        """Return which buffer has a piece as it may be read now; else NOT_YET, or REFER."""
        flip = self.find_flip(bound)
        return flip if flip < 0 else self._segment.record(flip).weight_sides[position]

    def _find(self, flip: int, side: int) -> list[tuple[int, slice, Array]]:
        """Return the copies to make at a flip, which has all weights in a buffer, or MIXED."""
        segment, found = self._segment, []
        record = segment.record(flip)
        for part, number, where in self._parts:
            if side == MIXED:
                sources = [*runs(segment, record, part)]
            else:
                dtype, start, stop = part
                sources = [segment.vectors[side][dtype][start:stop]]
            at = where.start
            for weights in sources:
                source = weights.view(np.uint8) if self._in_bytes else weights
                found.append((number, slice(at, at + len(source)), source))
                at += len(source)
        if side != MIXED:
            self._whole[side] = found
        return found

    # -- rows ----------------------------------------------------------------------

    def _copy_rows(
        self, flip: int, wanted: Sequence[RowsRead], *, locked: bool
    ) -> bool:
        """Copy rows; return whether all are of that flip.

        Of the flip in force they may be. Under the lock they may be of the one before,
        where no later publication has begun since, and it was not withdrawn.
        """
        segment, header = self._segment, self._header
        sequence = header[ROWS_SEQUENCE]
        # Looked at after the sequence: what was published before that would not change
        # it.
        now = header[FLIP]
        is_before = locked and flip == now - 1 and header[WRITING] == now
        is_before = is_before and header[WITHDRAWS] != now
        if not (flip == now or is_before):
            return False
        gathered: list[tuple[TableMemory, RowsRead, Array]] = []
        looked: list[tuple[UnboundedRows, Lookup | None]] = []
        for one in wanted:
            table, copy = self._tables.get(one.position) or self._table(one.position)
            if (unbounded := table.unbounded) is not None:
                if sequence & LOGGED:
                    return False
                # A row that has not changed in the last publication is as it was
                # before.
                has_log = is_before and flip_of(table.buffers.undo[0]) == now
                record = segment.records[flip & 1]
                one, kept = _look_up(
                    table, unbounded, one, record, sequence=sequence, before=has_log
                )
                looked.append((unbounded, kept))
            dim = table.piece.table.dim
            out = one.out if one.out.ndim == 2 else one.out.reshape(-1, dim)
            if copy is None or not copy(one.ids, out, one.at):
                read, first = segment.payload.read_rows, table.piece.first_row
                read(table.rows, one.ids, out, one.at, first=first)
            gathered.append((table, one, out))
        is_still = header[ROWS_SEQUENCE] == sequence and not sequence & LOGGED
        if is_still and not is_before:
            # For a push of the same ids, the next call of a trainer as a rule.
            for unbounded, kept in looked:
                unbounded.looked = kept or unbounded.looked
            return True
        # No log tells which ids had which rows, and a device may not have written yet what
        # one counts.
        is_written = (
            segment.payload.device is None or not header[ROWS_SEQUENCE] & LOGGED
        )
        if not is_written or (looked and not is_still):
            return False
        for table, one, out in gathered:
            table.put_back(flip, one.ids, out, one.at, cache_dir=segment.cache_dir)
        return is_still or is_logged(sequence, header[ROWS_SEQUENCE])

    def _table(self, position: int) -> tuple[TableMemory, FixedGather | None]:
        """Return the table at a position, and what copies rows out of it, if that is here."""
        table, kept = table_at(self._segment, position), self._segment.cache_dir
        copy = None
        if self._segment.payload.device is None:
            copy = FixedGather(table.rows, table.piece.first_row, cache_dir=kept)
        self._tables[position] = table, copy
        return table, copy


def _look_up(
    table: TableMemory,
    unbounded: UnboundedRows,
    wanted: RowsRead,
    record: Record,
    *,
    sequence: int,
    before: bool,
) -> tuple[RowsRead, Lookup | None]:
    """Return an unbounded read by their rows, as far as there are, and what to keep of it.

    With `before` the rows are those before the last publication.
    """
    ids, since = wanted.ids, table.since(record)
    if keeps := FEWEST_LOOKED <= len(ids) <= MOST_LOOKED:
        # Another thread may write into the caller's array.
        ids = scratch.empty(len(ids), np.int64)
        ids[:] = wanted.ids
    if before:
        rows = unbounded.find_before(ids, since)
        n_absent = int(np.count_nonzero(rows < 0))
    else:
        rows = scratch.empty(len(ids), np.int64)
        n_absent = unbounded.index.look_up(ids, rows, since=since)
    position, _, out, at, marks = wanted
    if marks is None or marks.shape != rows.shape:
        raise not_any(table)
    marks[:] = rows >= 0 if n_absent else 1
    if not out.size:
        read = RowsRead(position, rows[:0], out)
    elif not n_absent:
        read = RowsRead(position, rows, out, at)
    else:
        there = np.flatnonzero(marks)
        read = RowsRead(position, rows[there], out, there if at is None else at[there])
    return read, Lookup(sequence, ids, rows, since) if keeps else None


class RowsAtRest:
    """Whether rows of a shard have changed since this was made.

    For reads that take more than rows of some ids: which rows there are, and all of
    them.
    """

    def __init__(self, segment: Segment) -> None:
        self._header = segment.header
        self._sequence = self._header[ROWS_SEQUENCE]
        #: The flip in force, looked at after the sequence.
        self.flip = self._header[FLIP]

    def holds(self) -> bool:
        """Return whether none has, and whether the record of the flip is still there."""
        header, sequence = self._header, self._sequence
        is_same = not sequence & LOGGED and header[ROWS_SEQUENCE] == sequence
        return is_same and header[WRITING] <= self.flip + 1


def table_at(segment: Segment, position: int) -> TableMemory:
    """Return the table at a position.

    Raises
    ------
    ProtocolError
        If there is none.
    """
    ordinal = position - len(segment.pieces)
    if not 0 <= ordinal < len(segment.tables):
        raise ProtocolError(
            f"rows were asked of piece {position} of a shard, which is no table; run the "
            f"same version of daskps in all processes"
        )
    return segment.tables[ordinal]


def not_any(table: TableMemory) -> ProtocolError:
    """Return what is said where rows are asked for as those of another kind."""
    return ProtocolError(
        f"rows of table {table.piece.table.name[:60]!r} were asked as those of another "
        f"kind of table; run the same version of daskps in all processes"
    )
