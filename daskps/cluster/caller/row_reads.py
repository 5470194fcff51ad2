"""Reads of rows without a lock or a message, from shards that this process reaches.

The shards, and the places where the rows of each table begin, stay the same from one
read to the next: they are looked up once. Any update of rows spoils a copy that it runs
into. A read that finds an update under way copies from the other shards first, and
waits a moment for the rest: it might also wait for its turn at the shard, but much
longer.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np

from daskps.cluster.caller.looks import LOOK_SECONDS, looks_at
from daskps.cluster.caller.row_routes import RowCut
from daskps.cluster.caller.row_source import (
    DONE,
    NEVER,
    SPOILED,
    RowCopy,
    RowSource,
)
from daskps.cluster.caller.shard_map import Prepared
from daskps.cluster.caller.targets import find_overlap
from daskps.cluster.host.copy_routine import copier
from daskps.cluster.host.row_copies import copy_both
from daskps.cluster.machine.pauses import Pause
from daskps.cluster.wire.rows import most_rows
from daskps.layout.ids import as_ids
from daskps.shards.steps import Ready

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from daskps.cluster.caller.absent_rows import AbsentIds
    from daskps.cluster.caller.counters import Counters
    from daskps.cluster.caller.lane_row_reads import LaneRowReads
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.caller.targets import Target
    from daskps.cluster.caller.ways import Ways
    from daskps.cluster.wire.deadline import Deadline
    from daskps.layout.tables import Table
    from daskps.typing import Array

#: Number of tries of a copy that updates run into, and how long a read waits in all for
#: updates that are under way.
TRIES, SPIN_SECONDS = 2, 0.0005
_ID = np.dtype(np.int64)


class TableAsked(NamedTuple):
    """Rows of one table that are read, and the array that they go to."""

    table: Table
    ids: Array
    #: Of shape (n, dim).
    out: Array


#: By shard; None for those that this process does not have.
_Found: TypeAlias = "dict[int, RowSource | None]"


class RowReads:
    """Reads of rows, and of arrays with them, by a handle or a trainer.

    Parameters
    ----------
    meta : StoreMap
        The store.
    ways : Ways
        How this process reaches its shards, and the trainer that reads.
    counters : Counters
        Counts the calls that take no message.
    by_lane : LaneRowReads, optional
        Reads rows of shards that are all of other processes.
    """

    def __init__(
        self,
        meta: StoreMap,
        ways: Ways,
        counters: Counters,
        by_lane: LaneRowReads | None = None,
    ) -> None:
        self._meta, self._ways, self._counters = meta, ways, counters
        self._by_lane = None if ways.run else by_lane
        self._known: Prepared[int, RowSource] = Prepared(meta, meta.layout.n_shards)
        self._n_arrays = len(meta.layout.parameters)
        #: The dtype of each table, and the number of rows of it that are read here at
        #: once.
        self._tables = {
            table.index: (np.dtype(table.dtype), most_rows(table))
            for table in meta.layout.tables
        }
        self._has_any_ids = not all(t.is_bounded for t in meta.layout.tables)
        #: When to look after the owners again.
        self._next_look = 0.0
        #: Clocks by which the slowest live trainer was behind at the last read.
        self.lag = 0

    def clear(self) -> None:
        """Forget the shards, and so let go of their memory."""
        self._known.clear()

    # -- of tables alone ---------------------------------------------------------

    def pull(
        self,
        rows: Mapping[str, Any],
        out: Mapping[str, Array] | None = None,
        clock: int = 0,
    ) -> dict[str, Array] | None:
        """Read rows of tables, if the read is simple, as nearly all are.

        Parameters
        ----------
        rows : mapping of str to array_like of int
            Ids by the names of tables.
        out : mapping of str to ndarray, optional
            Where they go, for each of the tables; new arrays by default.
        clock : int
            The clock of the trainer; 0 outside runs.

        Returns
        -------
        dict of str to ndarray
            The rows; None where the general read must read them, or say what is wrong.
        """
        tables = self._meta.layout.table_by_name
        if out is not None and out.keys() != rows.keys():
            return None
        asked, found = [], dict[str, "Array"]()
        for name, ids in rows.items():
            table = tables.get(name)
            made = table and self._asked(table, ids, None if out is None else out[name])
            if not made:
                return None
            asked.append(made[0])
            found[name] = made[1]
        if out is not None and len(out) > 1 and find_overlap(out.items()):
            return None
        return found if self.read(asked, clock) else None

    def pull_table(
        self,
        table: Table,
        ids: Any,
        out: Array | None = None,
        clock: int = 0,
        *,
        until: Callable[[], Deadline] | None = None,
    ) -> Array | None:
        """As :meth:`pull`, of one table; by lane too, where there is a deadline."""
        made = self._asked(table, ids, out)
        return made[1] if made and self.read((made[0],), clock, until) else None

    def read(
        self,
        asked: Sequence[TableAsked],
        clock: int = 0,
        until: Callable[[], Deadline] | None = None,
    ) -> bool:
        """Read rows; return whether that was possible."""
        pending = self._cut(asked)
        if not pending:
            return False
        known, found = self._known, dict[int, RowSource | None]()
        for shard in pending:
            found[shard] = known.find(shard)
        by_lane = self._by_lane
        if None not in found.values():
            is_read = self._may_copy(found) and self._copy(pending, found, clock)
        elif by_lane is not None and until is not None and by_lane.knows(pending):
            has_marks = self._has_any_ids and not all(
                one.table.is_bounded for one in asked
            )
            is_read = not has_marks and by_lane.read(pending, until)
        else:
            found = {shard: self._find(shard) for shard in pending}
            is_read = self._may_copy(found) and self._copy(pending, found, clock)
        if is_read:
            for _, ids, _ in asked:
                self._counters.rows_pulled += len(ids)
        return is_read

    def _copy(
        self,
        pending: dict[int, list[RowCopy]],
        found: Mapping[int, RowSource],
        clock: int,
    ) -> bool:
        """Copy rows out of these shards; return whether that was possible."""
        tries, pause, absent = 0, None, list["AbsentIds"]()
        while True:
            for shard, copies in [*pending.items()]:
                became = found[shard].read(copies, clock, absent)
                if became == NEVER:
                    return False
                if became == DONE:
                    del pending[shard]
                tries += became == SPOILED
            if not pending:
                break
            if tries >= TRIES or (pause and pause.seconds > SPIN_SECONDS):
                return False
            # Made after the look at the time: a thread that the kernel suspends here
            # still tries once more.
            pause = pause or Pause(SPIN_SECONDS)
            pause()
        for one in absent:
            one.fill()
        self._note(found)
        return True

    def _asked(
        self, table: Table, given: Any, out: Any
    ) -> tuple[TableAsked, Array] | None:
        """Return a read of rows and the caller's array, or None for the general read.

        The general read says what is wrong with the ids, or reads them in parts.
        """
        if (
            type(given) is np.ndarray
            and given.dtype == _ID
            and given.flags.c_contiguous
        ):
            ids, shape = given.reshape(-1), given.shape
        else:
            ids, shape = as_ids(given, f"table {table.name[:60]!r}", ValueError)
        dtype, most = self._tables[table.index]
        if len(ids) > most:
            return None
        dim = table.dim
        if out is None:
            out = np.empty((*shape, dim), dtype)
        elif (
            type(out) is not np.ndarray
            or out.shape != (*shape, dim)
            or out.dtype != dtype
            or not out.flags.carray
        ):
            return None
        return TableAsked(table, ids, out.reshape(len(ids), dim)), out

    def _cut(self, asked: Sequence[TableAsked]) -> dict[int, list[RowCopy]]:
        """Return by shard the copies to make."""
        n_shards, n_arrays = self._meta.layout.n_shards, self._n_arrays
        found = dict[int, list[RowCopy]]()
        for table, ids, out in asked:
            if n_shards == 1:
                one = RowCopy(table.index - n_arrays, ids, out, None)
                found.setdefault(0, []).append(one)
                continue
            cut = RowCut.find(table, ids, n_shards)
            if cut is None:
                return {}  # the general read says which id is not of the table
            for shard in cut.shards():
                mine, at = cut.ids_of(shard), cut.at_of(shard)
                one = RowCopy(table.index - n_arrays, mine, out, at)
                found.setdefault(shard, []).append(one)
        return found

    def contains(self, table: Table, ids: Array) -> Array | None:
        """Return which ids a table of any ids has; None where shards must be asked.

        No row is copied: the index of each shard has them.
        """
        cut = RowCut.of(table, ids, self._meta.layout.n_shards)
        found = {shard: self._find(shard) for shard in cut.shards()}
        if not self._may_copy(found):
            return None
        is_there = np.zeros(len(ids), bool)
        for shard, source in found.items():
            asked = table.index - self._n_arrays, cut.ids_of(shard)
            of = source.contains(*asked)
            if of is None and (of := source.contains(*asked)) is None:
                return None
            at = cut.at_of(shard)
            is_there[slice(None) if at is None else at] = of
        self._note(found)
        return is_there

    # -- with arrays ---------------------------------------------------------------

    def fill(self, target: Target, bounds: Iterable[int]) -> bool:
        """Read all elements and rows of a target.

        Parameters
        ----------
        target : Target
            The read, and the arrays that it fills.
        bounds : iterable of int
            For each of its shards the clock of the trainer, or outside runs the least
            version.

        Returns
        -------
        bool
            False where shards must be asked.
        """
        found = {shard: self._find(shard) for shard in target.shards}
        if not self._may_copy(found):
            return False
        pending = [*zip(found, bounds, strict=False)]
        # Trainers that begin with different shards run less into each other's updates,
        # and a trainer that has run into one reads the other shards meanwhile.
        first = max(0, self._ways.rank) % max(1, len(pending))
        pending = pending[first:] + pending[:first]
        for _ in range(TRIES):
            late = []
            for shard, least in pending:
                became = self._fill(target, shard, found[shard], least)
                if became == NEVER:
                    return False
                if became != DONE:
                    late.append((shard, least))
            if not late:
                self._note(found)
                return True
            pending = late
        return False

    def _fill(self, target: Target, shard: int, source: RowSource, least: int) -> int:
        """Copy the part of a target that one shard has; return the outcome."""
        if (flip := source.find_flip(least)) < 0:
            return NEVER
        outs = target.outs(shard)
        asked = zip(target.ranges(shard), outs, strict=True)
        copied = copy_both(
            source.segment,
            Ready(flip, 0),
            parts=[(*one, out) for one, out in asked],
            rows=target.row_reads(shard),
            copy=copier(sum(out.nbytes for out in outs)),
        )
        return DONE if copied else SPOILED

    def _find(self, shard: int) -> RowSource | None:
        """Return a shard as this process reaches it; None where it does not."""
        source, where = self._known.find(shard), self._meta.where
        if source is None and (found := self._ways.find_shard(shard)) is not None:
            serving, hosted = found
            if not hosted.locks_reads:
                segment = hosted.shard.segment
                source = RowSource.of(segment, looks_at(segment, self._ways), serving)
                self._known.keep(shard, source, where)
        return source

    def _may_copy(self, found: _Found) -> TypeGuard[dict[int, RowSource]]:
        """Return whether this process reaches all shards, and their owners live."""
        if None in found.values():
            if self._by_lane is not None:
                self._by_lane.note(found)  # for the next one
            return False
        if time.monotonic() > self._next_look:
            if not all(
                one is not None and one.serving.is_live() for one in found.values()
            ):
                return False
            self._next_look = time.monotonic() + LOOK_SECONDS
        return True

    def _note(self, found: Mapping[int, RowSource]) -> None:
        """Count a read, and note how late the trainers are that it did not wait for."""
        servings = set()
        self.lag = 0
        for source in found.values():
            servings.add(id(source.serving))
            self.lag = max(self.lag, source.looks.lag)
        self._counters.local_calls += len(servings)
