"""Reads of rows alone, from shards that this process reaches, or over sockets.

The shards, and the places where the rows of each table begin, stay the same from one
read to the next: they are looked up once. A pull inserts nothing: the reading process
works out the initial values of rows that an unbounded table does not have.
"""

from __future__ import annotations

import time
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from daskps.cluster.caller.local import AGAIN_SECONDS
from daskps.cluster.caller.reads import PreparedRead
from daskps.cluster.caller.routes import Request, Route
from daskps.cluster.caller.row_routes import IdSplit, RowSlice
from daskps.cluster.caller.shard_map import Prepared
from daskps.cluster.caller.socket_carrier import SocketCarrier
from daskps.cluster.caller.targets import NO_SLICES, Target, find_overlap
from daskps.cluster.protocol.row_messages import RowRequest, most_rows
from daskps.config import cache_dir
from daskps.errors import ProtocolError, StaleGenerationError
from daskps.layout.ids import as_ids
from daskps.layout.tables import UnboundedTable
from daskps.row_init import initial_rows
from daskps.shards.reader import RowsRead
from daskps.shards.steps import READ, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from daskps.cluster.caller.carriers import Carriers
    from daskps.cluster.caller.remote import RemoteShards
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.protocol.deadline import Deadline
    from daskps.layout.tables import Table
    from daskps.typing import Array

    #: Rows of one table that are read, by their ids, and the array of shape (n, dim)
    #: that they go to.
    TableRequest: TypeAlias = tuple[Table, Array, Array]


_ID = np.dtype(np.int64)
_READ = Step(wait=READ)


class AbsentRows(NamedTuple):
    """A read of ids; the shards will say which of these they have."""

    table: UnboundedTable
    split: IdSplit
    #: The array that the rows go to, and the row of it that the first id goes to.
    out: Array
    start: int
    #: The answers of the shards: 1 for each id, in the order of the cut, that has a
    #: row.
    marks: Array

    def fill(self) -> None:
        """Write the initial values of the rows that no shard has."""
        if self.marks.all():
            return
        absent = np.flatnonzero(self.marks == 0)
        (_, ids, given, _), table = self.split, self.table
        where = absent if given is None else given[absent]
        self.out.reshape(-1, table.dim)[self.start + where] = initial_rows(
            ids[absent],
            (table.dim, table.dtype),
            table.of.init,
            name=table.name,
            seed=table.of.seed,
            cache_dir=cache_dir(),
        )


class RowReads:
    """Reads of rows of tables by a handle.

    Parameters
    ----------
    meta : StoreMap
        The store.
    carriers : Carriers
        How this process reaches its shards.
    remote : RemoteShards
        The way to those of other processes.
    """

    def __init__(
        self, meta: StoreMap, carriers: Carriers, remote: RemoteShards
    ) -> None:
        self._meta, self._carriers, self._counters = meta, carriers, remote.counters
        self._remote = remote
        #: Until when shards count as those of other processes: a nearer way that is
        #: closed may be open soon.
        self._remote_until: dict[int, float] = {}
        #: Of reads over sockets; which shards they go to differs from read to read.
        self._route = Route(meta.where, {}, None)
        self._known: Prepared[int, PreparedRead] = Prepared(meta, meta.layout.n_shards)
        #: Positions of tables in each shard, less their numbers.
        n_arrays = len(meta.layout.parameters)
        self._firsts = [len(of) - n_arrays for of in meta.layout.pieces]
        #: The dtype of each table, and the number of rows of it that are read here at
        #: once.
        self._tables = {
            table.index: (np.dtype(table.dtype), most_rows(table))
            for table in meta.layout.tables
        }

    def clear(self) -> None:
        """Forget the shards, and so let go of their memory."""
        self._known.clear()

    def pull(
        self,
        rows: Mapping[str, Any],
        out: Mapping[str, Array] | None = None,
    ) -> dict[str, Array] | None:
        """Read rows of tables, if the read is simple, as nearly all are.

        Parameters
        ----------
        rows : mapping of str to array_like of int
            Ids by the names of tables.
        out : mapping of str to ndarray, optional
            Where they go, for each of the tables; new arrays by default.

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
        return found if self.read(asked) else None

    def pull_table(
        self,
        table: Table,
        ids: Any,
        out: Array | None = None,
        *,
        until: Callable[[], Deadline] | None = None,
    ) -> Array | None:
        """As :meth:`pull`, of one table; by socket too, where there is a deadline."""
        made = self._asked(table, ids, out)
        return made[1] if made and self.read((made[0],), until) else None

    def read(
        self,
        asked: Sequence[TableRequest],
        until: Callable[[], Deadline] | None = None,
    ) -> bool:
        """Read rows; return whether that was possible."""
        pending: dict[int, list[RowsRead]] = {}
        absent: list[AbsentRows] = []
        for one in asked:
            if not self._cut(one, pending, absent):
                return False  # the general read says which id is not of the table
        if not pending:
            return False
        known, now = self._remote_until, time.monotonic()
        if (
            until is not None
            and not absent
            and min(map(known.get, pending, repeat(0.0))) > now
        ):
            is_read = self._read_remote(pending, until)
        else:
            is_read = self._read(pending)
        if is_read:
            for rows in absent:
                if np.count_nonzero(rows.marks) < len(rows.marks):
                    rows.fill()
            for _, ids, _ in asked:
                self._counters.rows_pulled += len(ids)
        return is_read

    def _read(self, pending: Mapping[int, Sequence[RowsRead]]) -> bool:
        """Read rows of shards that this process reaches; return whether it could."""
        found: list[PreparedRead] = []
        remote: list[int] = []
        where = self._meta.where
        for shard in pending:
            one = self._known.find(shard)
            if one is None and (one := PreparedRead.of(self._carriers, {}, [shard])):
                self._known.keep(shard, one, where)
            if one is None:
                remote.append(shard)
            else:
                found.append(one)
        if remote:
            if self._remote.sockets is not None:  # for the next one
                soon = time.monotonic() + AGAIN_SECONDS
                self._remote_until.update(dict.fromkeys(remote, soon))
            return False
        read = found[0] if len(found) == 1 else PreparedRead.joined(found)
        try:
            lag = read.read(repeat(0), (), pending)
        except ProtocolError:
            return False  # of one shard nobody has looked at the ids
        if lag is None:
            return False
        self._counters.local_calls += read.n_hosts
        return True

    def _read_remote(
        self,
        pending: Mapping[int, Sequence[RowsRead]],
        until: Callable[[], Deadline],
    ) -> bool:
        """Read rows over sockets; a message asks for those that no socket answers.

        Returns False for ids that a shard does not have, the general read says which; and
        for shards that are no more.
        """
        layout, flats = self._meta.layout, list["Array"]()
        rows: dict[int, tuple[RowSlice, ...]] = {}
        for shard, copies in pending.items():
            of, first = [], len(layout.pieces[shard])
            for position, ids, out, at, _ in copies:
                piece = layout.table_pieces[shard][position - first]
                if not piece.holds(ids, cache_dir=cache_dir()):
                    return False
                asked = RowRequest(position, ids, piece.table.dim, piece.table.dtype)
                to = slice(0, len(ids)) if at is None else at
                of.append(RowSlice(asked, len(flats), to))
                flats.append(out.reshape(-1))
            rows[shard] = tuple(of)
        target = Target(NO_SLICES, flats, dict, rows)
        request = Request(self._route, _READ, {}, target)
        route = self._remote.find_socket_route(request, [*pending])
        if route is not None:
            try:
                SocketCarrier.of(self._remote, route, request, until()).run()
            except StaleGenerationError:
                return False
        return route is not None

    def _asked(
        self, table: Table, given: Any, out: Any
    ) -> tuple[TableRequest, Array] | None:
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
        return (table, ids, out.reshape(len(ids), dim)), out

    def _cut(
        self,
        asked: TableRequest,
        pending: dict[int, list[RowsRead]],
        absent: list[AbsentRows],
    ) -> bool:
        """Add a read by shard; return whether all ids are of the table.

        Of an unbounded table also what becomes of those that no shard has.
        """
        (table, ids, out), n_shards = asked, self._meta.layout.n_shards
        # The caller's may be of the shards that the store had before.
        table = self._meta.layout.table_by_name[table.name]
        if n_shards == 1 and table.is_bounded:
            one = RowsRead(self._firsts[0] + table.index, ids, out)
            pending.setdefault(0, []).append(one)
            return True
        split: IdSplit | None = IdSplit(table, ids, None, (0, len(ids)))
        if n_shards > 1:
            split = IdSplit.find(table, ids, n_shards)
        if split is None:
            return False
        found = None
        if isinstance(table, UnboundedTable):
            found = np.empty(len(ids), np.uint8)
            absent.append(AbsentRows(table, split, out, 0, found))
        # A shard that is alone is asked for no ids, too.
        for shard in (0,) if n_shards == 1 else split.shards():
            position = self._firsts[shard] + table.index
            start, stop = split.starts[shard], split.starts[shard + 1]
            at = None if split.at is None else split.at[start:stop]
            marks = None if found is None else found[start:stop]
            one = RowsRead(position, split.ids[start:stop], out, at, marks)
            pending.setdefault(shard, []).append(one)
        return True

    def contains(self, table: Table, ids: Array) -> Array | None:
        """Return which ids an unbounded table has; None where shards must be asked.

        No row is copied: the index of each shard has them.
        """
        pending: dict[int, list[RowsRead]] = {}
        absent: list[AbsentRows] = []
        nothing = np.empty((0, table.dim), table.dtype)
        if not self._cut((table, ids, nothing), pending, absent):
            return None
        if not self._read(pending):
            return None
        [(_, split, _, _, marks)] = absent
        found = np.empty(len(ids), bool)
        found[slice(None) if split.at is None else split.at] = marks
        return found
