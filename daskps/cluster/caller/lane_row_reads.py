"""Reads of rows by lanes alone, without the objects of a general call."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from daskps.cluster.caller import routes
from daskps.cluster.caller.lane import LaneSaid
from daskps.cluster.caller.lane_route import CallArrays, HostCalls, LaneRoute
from daskps.cluster.caller.near import AGAIN_SECONDS
from daskps.cluster.caller.row_routes import RowSlice
from daskps.cluster.caller.shard_map import Prepared
from daskps.cluster.caller.socket_carrier import Sockets
from daskps.cluster.caller.targets import Target
from daskps.cluster.wire.rows import RowsAsked
from daskps.config import cache_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from daskps.cluster.caller.far import Far
    from daskps.cluster.caller.lanes import Lanes
    from daskps.cluster.caller.routes import Request
    from daskps.cluster.wire.deadline import Deadline
    from daskps.shards.reader import RowsRead
    from daskps.typing import Array

#: Number of forms kept ready: one for each host and choice of tables.
MOST_FORMS = 64


class LaneRowReads:
    """Reads of rows of tables by a handle, from shards of other processes.

    Parameters
    ----------
    far : Far
        The way to them.
    lanes : Lanes
        The lanes of this process.
    """

    def __init__(self, far: Far, lanes: Lanes) -> None:
        self._far, self._lanes, self._meta = far, lanes, far.meta
        self._known: Prepared[tuple[str, tuple[int, ...]], HostCalls]
        self._known = Prepared(far.meta, MOST_FORMS)
        #: Until when shards count as far: a nearer way that is closed may be open soon.
        self.far: dict[int, float] = {}

    def note(self, shards: Iterable[int]) -> None:
        """Count shards as far, for a while."""
        self.far.update(dict.fromkeys(shards, time.monotonic() + AGAIN_SECONDS))

    def knows(self, shards: Iterable[int]) -> bool:
        """Return whether all of these shards were far a moment ago."""
        until = self.far
        return min([until.get(shard, 0.0) for shard in shards]) > time.monotonic()

    def read(
        self, pending: Mapping[int, Sequence[RowsRead]], until: Callable[[], Deadline]
    ) -> bool:
        """Read rows; a message asks for those that no lane answers.

        Parameters
        ----------
        pending : mapping of int to sequence of RowsRead
            The rows to read of each shard, of tables with a number of rows.
        until : callable
            Returns its end.

        Returns
        -------
        bool
            False for ids that a shard does not have: the general read says which.
        """
        meta, far = self._meta, self._far
        layout, where = meta.layout, meta.where
        rows: dict[int, tuple[RowSlice, ...]] = {}
        hosts: dict[str, list[int]] = {}
        flats: list[Array] = []
        named = set()
        for shard, copies in pending.items():
            hosts.setdefault(where.owners[shard], []).append(shard)
            first, of = len(layout.pieces[shard]), []
            for position, ids, out, at, _ in copies:
                ordinal = position - first
                table = layout.tables[ordinal]
                piece = layout.table_pieces[shard][ordinal]
                if not piece.holds(ids, cache_dir=cache_dir()):
                    return False
                asked = RowsAsked(position, ids, table.dim, table.dtype)
                to = slice(0, len(ids)) if at is None else at
                of.append(RowSlice(asked, len(flats), to))
                flats.append(out.reshape(-1))
                named.add(ordinal)
            rows[shard] = tuple(of)
        tables, frames = tuple(sorted(named)), []
        arrays = CallArrays({}, [*flats])
        make = partial(self._request, rows, flats)
        for worker, shards in hosts.items():
            form = self._known.find((worker, tables))
            if form is None:
                every = [s for s, w in enumerate(where.owners) if w == worker]
                request = make()._replace(route=routes.route_of(meta, (), None))
                form = HostCalls(meta, every, request, ((), tables, False), words=[])
                self._known.keep((worker, tables), form, where)
            frames.append(form.frame((), rows, shards, arrays))
        route = LaneRoute(self._lanes)
        route.frames = tuple(frames)
        said = LaneSaid(arrays=arrays.brings, outs=arrays.outs)
        Sockets(far, route, said, make=make, deadline=until()).run()
        return True

    def _request(
        self, rows: Mapping[int, tuple[RowSlice, ...]], flats: Sequence[Array]
    ) -> Request:
        """Return the same read as a request by message."""
        return routes.read(self._meta, Target({}, flats, dict, rows))
